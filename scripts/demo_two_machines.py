"""The demo with two machines: what one has computed is a hit on the other, through a Valkey server between them.

Both machines are daemons on this computer, with stores of their own, and the first is stopped before the second is asked.
The blocks are sealed with a key that both have. Run it through ``scripts/demo --two-machines``.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import omlxd
from scripts.daemon_process import DaemonProcess
from scripts.demo import Runs, identical, run_engine
from scripts.demo_engine import Answer
from scripts.smollm import model_folder
from scripts.valkey_process import ValkeyProcess

SEND_SECONDS = 60.0


def main(*, as_json: bool, progress: Console) -> int:
    """Run it; the exit code is 1 when the answers differ, or when nothing came from the other machine."""
    runs, sent = run_all(progress)
    same = identical(runs) and runs["other"].reused > 0
    if as_json:
        figures: dict[str, object] = {name: _figures(run) for name, run in runs.items()}
        print(json.dumps({**figures, "sent_bytes": sent, "identical": same}, indent=2))
    else:
        show(runs, sent, same, Console())
    return 0 if same else 1


def run_all(console: Console) -> tuple[Runs, int]:
    """The prompt on the first machine, then, with that one stopped, on the second; and the bytes that went to the server."""
    with Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.completed:>4.0f} tokens"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        folder = model_folder()
        with tempfile.TemporaryDirectory(prefix="omlxd-demo-") as directory, ValkeyProcess() as server:
            key_file = Path(directory) / "remote.key"
            key_file.touch(mode=0o600)
            key_file.write_text(secrets.token_hex(32))
            settings = {"remote_url": server.url, "remote_key_file": str(key_file)}
            with DaemonProcess(Path(directory) / "one", **settings) as one:
                cold = run_engine(folder, one, progress, "one")
                sent = wait_until_sent(one)
            with DaemonProcess(Path(directory) / "two", **settings) as two:
                other = run_engine(folder, two, progress, "other")
    return {"one": cold, "other": other}, sent


def wait_until_sent(daemon: DaemonProcess) -> int:
    """Until nothing waits to be sent; the bytes that were."""
    with omlxd.connect(daemon.socket, name="demo") as client:
        deadline = time.monotonic() + SEND_SECONDS
        while True:
            remote = client.stats()["remote"]
            if not remote["queue"]:
                return int(remote["sent_bytes"])
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"{remote['queue']} blocks were not sent within {SEND_SECONDS:.0f} s: {remote['reason']}"
                )
            time.sleep(0.05)


def show(runs: Runs, sent: int, same: bool, console: Console) -> None:
    """For people."""
    one, other = runs["one"], runs["other"]
    console.print(f"machine one: {one.ttft_s:.2f} s to the first token, {one.computed} tokens computed, then stopped")
    console.print(f"between:     {sent / 1e6:.1f} MB sent to the server, sealed")
    console.print(
        f"machine two: {other.ttft_s:.2f} s to the first token, {other.computed} computed, {other.reused} reused: "
        f"{one.ttft_s / other.ttft_s:.1f} x faster"
    )
    console.print(f"Answer: {' '.join(other.text.split())}", highlight=False)
    console.print(
        "Both answers are the same, token for token." if same else "The answers DIFFER, or nothing was reused."
    )


def _figures(run: Answer) -> dict[str, object]:
    return {"ttft_s": round(run.ttft_s, 4), "computed": run.computed, "reused": run.reused}
