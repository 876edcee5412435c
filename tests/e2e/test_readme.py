"""Every command and every piece of Python that the README shows is run; what it shows of the output is what comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

import omlxd
from scripts.daemon_process import CHECKOUT, DaemonProcess

README = (CHECKOUT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line.partition("#")[0].strip() for kind, text in BLOCKS if not kind for line in text.splitlines()]
PATIENCE_SECONDS = 120.0
INSTALL_SECONDS = 500.0


def run(environment: dict[str, str], *words: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        words, env=environment, cwd=CHECKOUT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def serve(directory: Path, *words: str, patience: float = PATIENCE_SECONDS) -> None:
    """Start a daemon that runs in the foreground, use it, end it as Ctrl-C does."""
    home = directory / "home"
    home.mkdir()
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(("OMLXD_", "XDG_"))}
    socket = directory / "s"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            words,
            env={**theirs, "HOME": str(home), "OMLXD_SOCKET": str(socket), "OMLXD_SSD_SIZE": "64MiB"},
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + patience
        while True:
            with suppress(omlxd.Unavailable), omlxd.connect(socket) as cache:
                assert cache.stats()
                break
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0, (directory / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(INSTALL_SECONDS + 2 * PATIENCE_SECONDS)
def test_both_set_up_commands_are_there_and_the_daemon_starts(tmp_path: Path) -> None:
    assert {"./scripts/run", "./scripts/test"} <= set(COMMANDS)
    serve(tmp_path, str(CHECKOUT / "scripts" / "run"), patience=INSTALL_SECONDS)
    subprocess.run(["bash", "-n", CHECKOUT / "scripts" / "test"], check=True, timeout=PATIENCE_SECONDS)  # it runs us


def test_what_is_installed_from_the_checkout_serves(tmp_path: Path) -> None:
    assert "pip install '.[mlx-lm]'" in COMMANDS
    assert "omlxd serve" in COMMANDS
    # What it needs is there already; without its dependencies no network is asked.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    run(dict(os.environ), *pip, "--target", str(tmp_path / "site"), f"{CHECKOUT}[mlx-lm]")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from omlxd.cli import main; main(['serve'])"
    serve(tmp_path, sys.executable, "-c", program)


def test_the_other_commands_work(daemon: DaemonProcess, tmp_path: Path) -> None:
    elsewhere = {"./scripts/run", "./scripts/test", "pip install '.[mlx-lm]'", "omlxd serve", ""}
    elsewhere.add("omlxd install --start")  # tests/omlxd/test_service.py does, under a real systemd
    commands = [command for command in COMMANDS if command not in elsewhere]
    assert len(commands) >= 4
    for command in commands:
        program, *words = command.split()
        assert program == "omlxd", command
        run({**daemon.environment, "HOME": str(tmp_path)}, sys.executable, "-m", "omlxd", *words)
    named = set(re.findall(r"`(omlxd [a-z]+)[^`]*`", README))
    assert len(named) >= 5
    for command in sorted(named):
        run(daemon.environment, sys.executable, "-m", *command.split(), "--help")


def test_the_engine_of_your_own(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = [text for kind, text in BLOCKS if kind == "python" and "Layout.of" in text]
    monkeypatch.setenv("OMLXD_SOCKET", str(daemon.socket))
    payloads = [[mx.full((2, 64, 8), index), mx.arange(64)] for index in range(3)]
    names = {"arrays": payloads[0], "payloads": payloads, "tokens": list(range(200))}
    exec(program, names)
    assert names["hit"].tokens == 0  # type: ignore[attr-defined]
    seen = program.replace("block.arrays()", "seen.append(block.arrays())")
    names["seen"] = []
    exec(seen, names)
    assert names["hit"].tokens == 192  # type: ignore[attr-defined]
    assert len(names["seen"]) == 3
    assert bool(mx.array_equal(names["seen"][2][0], payloads[2][0]))


def test_the_example_for_mlx_lm_is_the_one_that_is_tested() -> None:
    """tests/model/test_engines_doc.py runs it."""
    programs = re.findall(r"^```python\n(.*?)^```$", (CHECKOUT / "docs" / "engines.md").read_text(), re.M | re.S)
    assert [text for kind, text in BLOCKS if kind == "python" and "mlx_lm" in text] == [programs[0]]


def shape(line: str) -> str:
    """A line of output without what differs from run to run: figures, bars, paths, names of models."""
    line = re.sub(r"[█▉▊▋▌▍▎▏░]+", "", line)
    line = re.sub(r"(~|/)[^ ]*/[^ ]*", "PATH", line)
    line = re.sub(r"^[0-9a-f]{8} +\S+", "ID MODEL", line)
    line = re.sub(r"\d[\d.,]*(( ([KMGT]i)?B| %| min| s| h)(/s)?|/s)?|(?<= )-(?= |$)", "#", line)
    return " ".join(line.split())


def test_the_status_that_is_shown_is_what_it_says(daemon: DaemonProcess) -> None:
    (shown,) = [text for kind, text in BLOCKS if kind == "text"]
    with omlxd.connect(daemon.socket) as cache:
        space = cache.namespace(model="org/model", fingerprint="f", block_tokens=64)
        space.store(list(range(326)), [bytes([index]) * 100_000 for index in range(5)])
        with space.load(list(range(326))) as lease:
            assert len(list(lease)) == 5
        time.sleep(2.5)  # rates are taken over whole intervals
    columns = max(len(line) for line in shown.splitlines())
    environment = {**daemon.environment, "COLUMNS": str(max(80, columns)), "HOME": "/nonexistent"}
    printed = run(environment, sys.executable, "-m", "omlxd", "status")
    assert [shape(line) for line in shown.splitlines()] == [shape(line) for line in printed.splitlines()]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (CHECKOUT / target).exists(), target
