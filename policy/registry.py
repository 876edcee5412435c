"""Names of policies, and where their classes are. A module is imported when its policy is first asked for."""

from __future__ import annotations

from importlib import import_module

from omlxd.policy.base import CachePolicy

_PLACES: dict[str, tuple[str, str]] = {
    "lru": ("omlxd.policy.lru", "LRUCachePolicy"),
    "arc": ("omlxd.policy.arc", "ARCCachePolicy"),
    "fifo": ("omlxd.policy.fifo", "FIFOCachePolicy"),
    "s3fifo": ("omlxd.policy.s3fifo", "S3FIFOCachePolicy"),
    "prefix": ("omlxd.policy.prefix", "PrefixCachePolicy"),
}


def policy_names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_PLACES)


def register_policy(name: str, module: str, class_name: str) -> None:
    """Give the class `class_name` of `module` a name. ValueError when the name is taken or could be mistaken
    for `module:Class`.
    """
    if name in _PLACES:
        raise ValueError(f"policy {name!r} is registered already, as {':'.join(_PLACES[name])}; choose another name")
    if not name or ":" in name:
        raise ValueError(f"policy name {name!r} is not allowed: it must not be empty nor contain ':'")
    _PLACES[name] = (module, class_name)


def get_policy(name: str) -> type[CachePolicy]:
    """The class for a registered name or for `package.module:Class`. ValueError says what was wrong and which
    names exist.
    """
    if name in _PLACES:
        module, class_name = _PLACES[name]
    else:
        module, colon, class_name = name.partition(":")
        if not (colon and module and class_name):
            raise ValueError(f"unknown policy {name!r}; known: {', '.join(policy_names())}, or 'package.module:Class'")
    known = f"known: {', '.join(policy_names())}"
    try:
        found: object = getattr(import_module(module), class_name, None)
    except ImportError as error:
        raise ValueError(f"policy {name!r}: cannot import {module!r} ({error}); {known}") from error
    if found is None:
        raise ValueError(f"policy {name!r}: module {module!r} has no {class_name!r}; {known}")
    if not (isinstance(found, type) and issubclass(found, CachePolicy)):
        raise ValueError(f"policy {name!r}: {class_name!r} is no subclass of omlxd.policy.CachePolicy; {known}")
    return found
