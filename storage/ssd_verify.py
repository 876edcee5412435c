"""Reading everything back, to find what is damaged before somebody needs it. Any worker thread, online or offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from omlxd.storage.environment import Environment
from omlxd.storage.ssd_errors import Damaged, DiskTrouble, Missing
from omlxd.storage.ssd_reader import Reader

_KEYS_AT_ONCE = 256  # read in one short transaction


@dataclass(slots=True)
class VerifyReport:
    """What was found so far. Sizes in bytes."""

    blocks: int = 0
    stored_bytes: int = 0
    damaged: list[tuple[bytes, str]] = field(default_factory=list)
    """(key, what is wrong); the tier is told by ``SsdTier.damaged``."""
    resume_after: bytes = b""
    """Give it to the next run to go on behind the last block; empty when all were seen."""
    trouble: str = ""
    """Why the disk ended the run early; empty when it did not."""


def verify(
    environment: Environment,
    reader: Reader,
    *,
    progress: Callable[[VerifyReport], bool] = lambda report: True,
    after: bytes = b"",
    bytes_per_second: float = 0.0,
    timer: Callable[[], float],
    sleep: Callable[[float], None],
) -> VerifyReport:
    """Check every record behind the key ``after`` against its checksum, in the order of keys.

    ``progress`` is told after each block and ends the run by False; ``bytes_per_second`` 0: as fast as it goes. A record that
    leaves meanwhile is no damage.
    """
    report = VerifyReport()
    try:
        _verify(environment, reader, report, progress, after, bytes_per_second, timer, sleep)
    except DiskTrouble as error:
        report.trouble = error.reason
    return report


def _verify(
    environment: Environment,
    reader: Reader,
    report: VerifyReport,
    progress: Callable[[VerifyReport], bool],
    after: bytes,
    bytes_per_second: float,
    timer: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    begun = timer()
    for key in _keys(environment, after):
        try:
            report.stored_bytes += reader.verify(environment, key)
            report.blocks += 1
        except DiskTrouble:
            raise
        except Missing:
            pass
        except Damaged as error:
            report.blocks += 1
            report.damaged.append((key, error.reason))
        report.resume_after = key
        if not progress(report):
            return
        if bytes_per_second > 0:
            ahead = report.stored_bytes / bytes_per_second - (timer() - begun)
            if ahead > 0:
                sleep(ahead)
    report.resume_after = b""


def _keys(environment: Environment, after: bytes) -> Iterator[bytes]:
    """All keys behind ``after``, read some at a time: no transaction stays open."""
    while True:
        with environment.reading() as reading:
            behind = (key for key, _ in reading.items(environment.blocks, after) if key != after)
            batch = list(islice(behind, _KEYS_AT_ONCE))
        if not batch:
            return
        yield from batch
        after = batch[-1]
