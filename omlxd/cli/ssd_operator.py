"""The store on the SSD, through the daemon that has it open, or by itself while no daemon runs. Both give the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omlxd.cli.blocks import find_block
from omlxd.cli.context import Common, Exit, fail
from omlxd.errors import Refused, Unavailable
from omlxd.protocol import Message

if TYPE_CHECKING:
    from omlxd.client import Cache
    from omlxd.config import Config
    from omlxd.storage.ssd import SsdTier

LONG_SECONDS = 3_600.0
"""How long one step of these commands may take: a copy of a large file is one."""

Tell = Callable[[Message], None]


class SsdOperator(Protocol):
    """What the commands ask for. Answers and parts are those of the verbs in ``ssd_verbs.py``."""

    def gc(self, *, dry_run: bool) -> Message:
        """Keep the limit, give free pages back; or tell what that would mean."""

    def verify(self, tell: Tell, *, after: bytes, bytes_per_second: float) -> Message:
        """Check every record behind ``after``; ``tell`` hears how far it is."""

    def compact(self, *, rewrite: bool) -> Message:
        """Make the file as small as its contents."""

    def export(self, tell: Tell, what: str, file: Path) -> Message:
        """Blocks of a namespace, or a chain, into an archive."""

    def import_(self, tell: Tell, file: Path) -> Message:
        """An archive's blocks into the store."""


@contextmanager
def ssd_operator(common: Common, *, begin: bool = False) -> Iterator[SsdOperator]:
    """The daemon, or, where none answers, the store itself; ``begin`` one where there is none."""
    try:
        with common.daemon(timeout=LONG_SECONDS) as cache:
            yield ThroughDaemon(cache)
            return
    except Unavailable as error:
        config, why = common.config(), str(error)
    with stopped_store(config, why, begin=begin) as stopped:
        yield stopped


class ThroughDaemon:
    """Asks the daemon."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def gc(self, *, dry_run: bool) -> Message:
        """As the protocol says."""
        return self._cache.call("gc", dry_run=dry_run)

    def verify(self, tell: Tell, *, after: bytes, bytes_per_second: float) -> Message:
        """As the protocol says."""
        fields: dict[str, object] = {"after": after}
        if bytes_per_second:
            fields["bytes_per_second"] = bytes_per_second
        return self._follow("verify", tell, **fields)

    def compact(self, *, rewrite: bool) -> Message:
        """As the protocol says."""
        return self._cache.call("compact", rewrite=rewrite)

    def export(self, tell: Tell, what: str, file: Path) -> Message:
        """As the protocol says."""
        try:
            return self._follow("export", tell, namespace=what, file=str(file))
        except Refused as error:
            if error.code != "not_found" or not _is_hex(what):
                raise
        row, _ = find_block(self._cache, what.lower())
        return self._follow("export", tell, keys=row["key"], file=str(file))

    def import_(self, tell: Tell, file: Path) -> Message:
        """As the protocol says."""
        return self._follow("import", tell, file=str(file))

    def _follow(self, verb: str, tell: Tell, **fields: object) -> Message:
        last: Message = {}
        for last in self._cache.stream(verb, timeout=None, **fields):
            tell(last)
        return last


@contextmanager
def stopped_store(config: Config, why: str, *, begin: bool = False) -> Iterator[StoppedStore]:
    """The store of a daemon that does not run, locked while it is worked on; ``begin`` one where there is none."""
    from omlxd.ssd_opening import NoSsd, begin_stopped, limit_of, open_stopped
    from omlxd.storage.ssd import SsdError

    path = Path(config.ssd.path).expanduser()
    try:
        if begin:
            begin_stopped(config)
        tier = open_stopped(config)
    except (NoSsd, SsdError) as error:
        fail(f"{why}; and its store can't be worked on: {error}")
    try:
        if tier.aside:
            fail(f"the store was broken and is moved aside: {tier.aside}", Exit.NOT_FOUND)
        yield StoppedStore(tier, limit_of(config, path))
    except (SsdError, OSError) as error:
        fail(str(error))
    finally:
        tier.close()


class StoppedStore:
    """Works on the store itself. It is open with room for all that it has: only ``gc`` applies the limit."""

    def __init__(self, tier: SsdTier, limit: int) -> None:
        """``limit``: what the configuration says, in bytes."""
        from omlxd.storage.ssd import MIN_LIMIT

        self._tier = tier
        self._limit = max(MIN_LIMIT, limit)

    def gc(self, *, dry_run: bool) -> Message:
        """As the daemon's verb."""
        from omlxd.ssd_verbs import collected

        tier, roomy = self._tier, self._tier.limit
        tier.limit = self._limit
        answer = collected(tier)
        if dry_run:
            tier.limit = roomy
            return {**answer, "dry_run": True}
        tier.collect()
        self._carry_out()
        return {**answer, "dry_run": False, "used_after": tier.used_bytes, "state": str(tier.state)}

    def verify(self, tell: Tell, *, after: bytes, bytes_per_second: float) -> Message:
        """As the daemon's verb."""
        from omlxd.ssd_verbs import PART_SECONDS, progress_of, verified
        from omlxd.storage.ssd_verify import VerifyReport

        total, told = len(self._tier), time.monotonic()

        def progress(report: VerifyReport) -> bool:
            nonlocal told
            if time.monotonic() - told >= PART_SECONDS:
                told = time.monotonic()
                tell({**progress_of(report), "total": total})
            return True

        report = self._tier.verify(progress=progress, after=after, bytes_per_second=bytes_per_second)
        for key, reason in report.damaged:
            self._tier.damaged(key, reason)
        self._carry_out()
        return verified(report, total)

    def compact(self, *, rewrite: bool) -> Message:
        """As the daemon's verb."""
        from omlxd.ssd_verbs import wants_rewrite

        before = self._tier.used_bytes
        self._tier.collect()
        self._carry_out()
        copied = rewrite or wants_rewrite(self._tier)
        if copied:
            self._tier.rewrite()
            self._tier.observe(self._tier.probe())
        return {"before": before, "after": self._tier.used_bytes, "rewritten": copied}

    def export(self, tell: Tell, what: str, file: Path) -> Message:
        """As the daemon's verb."""
        keys = self._keys(what)
        blocks = self._tier.export(keys, file, lambda done: tell({"blocks": done, "total": len(keys)}))
        return {"blocks": blocks, "total": len(keys), "bytes": file.stat().st_size, "file": str(file)}

    def _keys(self, what: str) -> list[bytes]:
        from omlxd.ssd_verbs import keys_of

        spaces = [
            space
            for space in self._tier.namespaces()
            if space.descriptor.get("model") == what or (len(what) >= 4 and space.id.hex().startswith(what.lower()))
        ]
        if spaces:
            return [key for space in spaces for key in keys_of(self._tier, space.id)]
        last: list[bytes] = []
        if _is_hex(what):
            last = [key for key in self._tier.entries if key.hex().startswith(what.lower())]
            if len(last) > 1:
                few = "\n".join(key.hex() for key in last[:5])
                fail(f"{len(last)} blocks' keys begin with {what!r}; give more digits:\n{few}")
        if not last:
            known = (
                ", ".join(sorted({str(space.descriptor.get("model")) for space in self._tier.namespaces()})) or "none"
            )
            fail(f"the store has no namespace and no block named {what!r}; known models: {known}", Exit.NOT_FOUND)
        return self._tier.chain(last[0])

    def import_(self, tell: Tell, file: Path) -> Message:
        """As the daemon's verb."""
        from omlxd.storage.ssd_archive import check_archive

        self._tier.limit = self._limit
        total, before = check_archive(file), len(self._tier)
        stored = self._tier.import_(file, lambda done: tell({"blocks": done, "total": total}))
        declined = sum(count for what, count in self._tier.counts.items() if what.startswith("declined_"))
        present = self._tier.counts["declined_present"]
        assert stored >= len(self._tier) - before
        return {"blocks": stored, "present": present, "declined": declined - present, "total": total}

    def _carry_out(self) -> None:
        tier = self._tier
        while tier.has_chores and (plan := tier.plan()) is not None:
            outcome = tier.commit(plan)
            tier.applied(plan, outcome)
            if outcome.reason:
                fail(f"the disk takes no writes: {outcome.reason}")


def _is_hex(text: str) -> bool:
    return bool(text) and all(digit in "0123456789abcdefABCDEF" for digit in text)
