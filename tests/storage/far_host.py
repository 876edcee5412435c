"""A second host on this computer: a network namespace at the end of a shaped link. Needs root and iproute2 (Linux)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

NEEDS = "needs root and iproute2 (ip, tc) on Linux: run it as root, apt-get install iproute2"


def available() -> bool:
    """May namespaces be made here?"""
    if not shutil.which("ip") or not shutil.which("tc") or os.geteuid() != 0:
        return False
    name = f"omlxd-probe-{secrets.token_hex(2)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _run("ip", "netns", "del", name)
    return True


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class FarHost:
    """``address`` is the far end, ``near`` this one."""

    name: str
    address: str
    near: str
    delayed: bool
    """Is the link's delay kept? Kernels without ``sch_netem`` only keep its rate."""

    def command(self, *words: str) -> list[str]:
        """A command that runs on the far host."""
        return ["ip", "netns", "exec", self.name, *words]

    def swallow(self) -> None:
        """From now on the far host's packets vanish, and nobody is told."""
        _run(*self.command("ip", "route", "add", "blackhole", f"{self.near}/32"))

    def pull(self) -> None:
        """The cable is out."""
        _run(*self.command("ip", "link", "set", "far", "down"))

    def heal(self) -> None:
        """All is as before."""
        subprocess.run(
            self.command("ip", "route", "del", "blackhole", f"{self.near}/32"), check=False, capture_output=True
        )
        _run(*self.command("ip", "link", "set", "far", "up"))


@contextlib.contextmanager
def far_host(rate: str = "1gbit", delay: str = "0.5ms") -> Iterator[FarHost]:
    """A host behind a link of ``rate`` and ``delay`` each way; removed at the end."""
    number = secrets.randbelow(200) + 20
    mark = secrets.token_hex(3)
    name, near_link = f"omlxd-{mark}", f"om{mark}"
    near, address = f"10.213.{number}.1", f"10.213.{number}.2"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", near_link, "type", "veth", "peer", "name", "far", "netns", name)
        inside = ("ip", "netns", "exec", name)
        _run("ip", "addr", "add", f"{near}/24", "dev", near_link)
        _run("ip", "link", "set", near_link, "up")
        _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", "far")
        _run(*inside, "ip", "link", "set", "far", "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        delayed = True
        for prefix, device in (((), near_link), (inside, "far")):
            add = (*prefix, "tc", "qdisc", "add", "dev", device, "root")
            netem = subprocess.run([*add, "netem", "delay", delay, "rate", rate], capture_output=True, check=False)
            if netem.returncode:
                delayed = False
                _run(*add, "tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
        yield FarHost(name, address, near, delayed)
    finally:
        _run("ip", "netns", "del", name)
