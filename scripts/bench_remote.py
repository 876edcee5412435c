"""The remote tier: ``scripts/bench remote [--json]``. Needs a Valkey or Redis server; with root and ``ip``, a shaped link too.

Two questions. How much of a link does a restore use (yardstick: the client library fetching the same values, in the same
run, over the same link)? And what does the tier cost those who need nothing of it: a local load's p99 with the tier off,
well, hung and gone, all measured in turns?
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import omlxd
from scripts.daemon_process import DaemonProcess
from scripts.valkey_process import ValkeyProcess

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
BLOCKS = 48
LINK_BITS = 1_000_000_000
LOCAL_BLOCKS = 64
ROUNDS = 12
LOADS = 150
"""Local loads of one daemon before the next has its turn."""

NAMESPACE, NEAR, FAR = "omlxd-bench", "10.214.77.1", "10.214.77.2"


@contextmanager
def shaped_link() -> Iterator[tuple[str, tuple[str, ...]]]:
    """A host behind 1 Gbit/s (and 1 ms there and back, where the kernel has netem): its address, and how to run there."""
    inside = ("ip", "netns", "exec", NAMESPACE)

    def run(*words: str, check: bool = True) -> bool:
        return subprocess.run(words, check=check, capture_output=True).returncode == 0

    run("ip", "netns", "add", NAMESPACE)
    try:
        run("ip", "link", "add", "omlxdbench", "type", "veth", "peer", "name", "far", "netns", NAMESPACE)
        run("ip", "addr", "add", f"{NEAR}/24", "dev", "omlxdbench")
        run("ip", "link", "set", "omlxdbench", "up")
        for words in (
            ("addr", "add", f"{FAR}/24", "dev", "far"),
            ("link", "set", "far", "up"),
            ("link", "set", "lo", "up"),
        ):
            run(*inside, "ip", *words)
        for prefix, device in (((), "omlxdbench"), (inside, "far")):
            add = (*prefix, "tc", "qdisc", "add", "dev", device, "root")
            if not run(*add, "netem", "delay", "0.5ms", "rate", "1gbit", "limit", "20000", check=False):
                run(*add, "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms")
        yield FAR, inside
    finally:
        run("ip", "netns", "del", NAMESPACE)


def chain(seed: int, blocks: int) -> list[bytes]:
    """Names of a made-up prompt's blocks."""
    return [np.random.default_rng((seed, at)).bytes(32) for at in range(blocks)]


def space_of(client: omlxd.Cache) -> omlxd.Space:
    """One namespace for all."""
    return client.namespace(model="bench/remote", fingerprint="f", block_tokens=64)


def wait(condition: Callable[[], bool], what: str) -> None:
    """Until it is so, for half a minute at most."""
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain for {what}")
        time.sleep(0.02)


def fill(server: ValkeyProcess, folder: Path, hashes: list[bytes]) -> None:
    """Put blocks on the server, from a daemon of their own."""
    payload = np.random.default_rng(1).bytes(BLOCK_BYTES)
    with DaemonProcess(folder, remote_url=server.url, ssd_size="0") as one, omlxd.connect(one.socket) as client:
        wait(lambda: client.stats()["remote"]["state"] == "ok", "the server")
        space_of(client).store_keys(hashes, [payload] * len(hashes))
        wait(lambda: client.stats()["remote"]["counts"].get("written", 0) == len(hashes), "the blocks to be sent")


def measure_link(server: ValkeyProcess, folder: Path) -> dict[str, float]:
    """Bytes a second of a restore, and of the library fetching the same values one after the other and four at once."""
    from concurrent.futures import ThreadPoolExecutor

    import valkey

    hashes = chain(1, BLOCKS)
    fill(server, folder / "one", hashes)
    client = valkey.Valkey(server.address, server.port)
    names = [name for name in client.keys("omlxd:*") if client.strlen(name) >= 100_000]
    groups = [names[at : at + 4] for at in range(0, len(names), 4)]
    total = BLOCKS * BLOCK_BYTES
    restored, direct = [], []
    for attempt in range(3):
        begun = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            assert sum(sum(map(len, values)) for values in pool.map(client.mget, groups)) == total
        direct.append(total / (time.perf_counter() - begun))
        with (
            DaemonProcess(folder / f"two{attempt}", remote_url=server.url, ssd_size="0", remote_deadline="1s") as two,
            omlxd.connect(two.socket) as at_two,
        ):
            wait(lambda at_two=at_two: at_two.stats()["remote"]["state"] == "ok", "the server")  # type: ignore[misc]
            space = space_of(at_two)
            begun = time.perf_counter()
            with space.load_keys(hashes, timeout=30) as lease:
                assert len(list(lease)) == BLOCKS, lease.stopped
            restored.append(total / (time.perf_counter() - begun))
    return {"restore_bytes_per_s": statistics.median(restored), "library_bytes_per_s": statistics.median(direct)}


def measure_local(folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of a local match and load of 64 blocks in RAM, p50 and p99: tier off, well, hung, gone."""
    hashes, payload = chain(2, LOCAL_BLOCKS), bytes(100_000)
    with ExitStack() as stack:
        well, hung, gone = (stack.enter_context(ValkeyProcess()) for _ in range(3))
        settings = {
            "off": {},
            **{name: {"remote_url": one.url} for name, one in (("well", well), ("hung", hung), ("gone", gone))},
        }
        spaces = {}
        for name, remote in settings.items():
            daemon = stack.enter_context(DaemonProcess(folder / name, ssd_size="0", **remote))
            client = stack.enter_context(omlxd.connect(daemon.socket))
            spaces[name] = space_of(client)
            spaces[name].store_keys(hashes, [payload] * LOCAL_BLOCKS)
        time.sleep(1)  # what was stored is being sent: not what is measured here
        hung.pause()
        gone.kill()
        seconds: dict[str, list[float]] = {name: [] for name in spaces}
        for turn in range(ROUNDS):
            for name, space in spaces.items():
                for at in range(LOADS):
                    if (
                        at % 50 == 0
                    ):  # somebody else's new prompt: it has to be asked for, where there is somebody to ask
                        space.match_keys(chain(1000 + turn * LOADS + at, 20))
                    begun = time.perf_counter()
                    space.match_keys(hashes)
                    with space.load_keys(hashes) as lease:
                        assert len(list(lease)) == LOCAL_BLOCKS
                    seconds[name].append(time.perf_counter() - begun)
        hung.go_on()
    return {
        name: {"p50_s": statistics.median(all_), "p99_s": statistics.quantiles(all_, n=100)[98]}
        for name, all_ in seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="omlxd-bench-") as directory:
        folder = Path(directory)
        with ValkeyProcess() as server:
            figures["loopback"] = measure_link(server, folder / "loopback")
        try:
            with shaped_link() as (address, inside), ValkeyProcess(address=address, prefix=inside) as server:
                figures["gigabit"] = {**measure_link(server, folder / "gigabit"), "link_bytes_per_s": LINK_BITS / 8}
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no shaped link can be made here (root and iproute2 are needed): {error}", file=sys.stderr)
        figures["local"] = measure_local(folder / "local")
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    for name in ("loopback", "gigabit"):
        if isinstance(row := figures.get(name), dict):
            print(name, *(f"{what.removesuffix('_bytes_per_s')} {rate / 1e6:.0f} MB/s" for what, rate in row.items()))
    local = figures["local"]
    assert isinstance(local, dict)
    for name, row in local.items():
        ratio = row["p99_s"] / local["off"]["p99_s"]
        print(
            f"local load, tier {name}: p50 {row['p50_s'] * 1e3:.2f} ms, p99 {row['p99_s'] * 1e3:.2f} ms ({ratio:.2f} x off)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
