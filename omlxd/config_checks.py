"""What values a setting may have: checks, and the types that carry them.

Each check takes what the file, a variable or a flag says and gives it back as it is kept, or raises ValueError with what
is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from omlxd.paths import PathError, check_socket_path
from omlxd.policy.registry import get_policy
from omlxd.storage.durations import parse_duration
from omlxd.storage.remote_url import parse_url
from omlxd.storage.sizes import MIN_SSD_BYTES, format_size, parse_size

ANY_TOTAL = 1 << 62
"""A total that makes every percentage valid: only the form is checked when loading."""


def _size(*, auto: bool = False, percent: bool = False, zero: bool = True, least: int = 0) -> Callable[[object], str]:
    def check(value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"{value!r} is neither a whole number nor text")
        nbytes = parse_size(value, total=ANY_TOTAL if percent else None, auto=1 if auto else None)
        if nbytes == 0 and not zero:
            raise ValueError(f"size {value!r}: this cannot be 0")
        if 0 < nbytes < least and str(value).strip().lower() != "auto":
            raise ValueError(f"size {value!r}: {format_size(least)} are the least, or 0 to switch it off")
        return str(value).strip()

    return check


def _policy(value: str) -> str:
    get_policy(value)
    return value


def _socket(value: str) -> str:
    if value:
        try:
            check_socket_path(Path(value).expanduser())
        except PathError as error:
            raise ValueError(str(error)) from None
    return value


def _group(value: str) -> str:
    if value:
        import grp

        try:
            grp.getgrnam(value)
        except KeyError:
            raise ValueError('there is no such group on this system; "" is for you alone') from None
    return value


def _folder(value: str) -> str:
    if not value or "\0" in value:
        raise ValueError("a path is needed")
    if not Path(value).expanduser().is_absolute():
        raise ValueError("the path must be absolute (or start with ~): a service has no folder of its own")
    return value


def _listen(value: str) -> str:
    if value in ("", "off"):
        return ""
    host, _, port = value.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError('"off", or a loopback address and port like "127.0.0.1:9464"')
    return value


def _remote_url(value: str) -> str:
    if value:
        parse_url(value)
    return value


def _remote_admission(value: str) -> str:
    from omlxd.storage.remote_writer import Admission  # an event loop and more, that only this setting's check needs

    Admission.parse(value)
    return value


def _duration(value: str) -> str:
    parse_duration(value)
    return value


Size = Annotated[str, BeforeValidator(_size(auto=True, percent=True))]
SsdSize = Annotated[str, BeforeValidator(_size(auto=True, percent=True, least=MIN_SSD_BYTES))]
Bytes = Annotated[str, BeforeValidator(_size(zero=False))]
Share = Annotated[str, BeforeValidator(_size(percent=True, zero=False))]
Dirty = Annotated[str, BeforeValidator(_size(auto=True, percent=True, zero=False))]
Policy = Annotated[str, AfterValidator(_policy)]
Rate = Annotated[str, BeforeValidator(_size())]
MinFree = Annotated[str, BeforeValidator(_size(percent=True))]
Duration = Annotated[str, AfterValidator(_duration)]
Socket = Annotated[str, AfterValidator(_socket)]
Group = Annotated[str, AfterValidator(_group)]
Folder = Annotated[str, AfterValidator(_folder)]
Listen = Annotated[str, AfterValidator(_listen)]
RemoteUrl = Annotated[str, AfterValidator(_remote_url)]
RemoteAdmission = Annotated[str, AfterValidator(_remote_admission)]
Codec = Literal["auto", "raw", "zstd", "zstd-planes"]
