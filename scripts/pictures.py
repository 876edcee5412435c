"""The terminal pictures of docs/pictures: a real model answers prompts in a real daemon, and tmux shows what a person sees.

python -m scripts.pictures            needs tmux
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from scripts.daemon_process import CHECKOUT, DaemonProcess
from scripts.smollm import model_folder

PROMPT = CHECKOUT / "scripts" / "demo_prompt.txt"
PICTURES = CHECKOUT / "docs" / "pictures"
COLUMNS, ROWS = 80, 34
SETTLE_SECONDS = 1.0
PATIENCE_SECONDS = 60.0


class Terminal:
    """A tmux session of its own, on a server of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._base = ["tmux", "-L", "omlxd-pictures"]
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        subprocess.run(
            [*self._base, "-f", "/dev/null", "new-session", "-d", *size, "bash --norc --noprofile"],
            env={**environment, "PS1": "$ ", "TERM": "xterm-256color"},
            check=True,
        )

    def close(self) -> None:
        subprocess.run([*self._base, "kill-server"], check=False)

    def screen(self) -> str:
        """What is on the screen, with colours."""
        done = subprocess.run([*self._base, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True)
        return done.stdout

    def picture(self, name: str, command: str, *, leave: str = "") -> None:
        """Run ``command``, wait until the screen stays as it is, and keep it as ``name``.svg."""
        self.type("clear")
        self._wait_still()
        self.type(command)
        shown = self._wait_still()
        if leave:
            subprocess.run([*self._base, "send-keys", leave], check=True)
        console = Console(record=True, width=COLUMNS, file=(PICTURES / "log").open("w"), color_system="truecolor")
        console.print(Text.from_ansi("\n".join(shown.rstrip().splitlines())))
        (PICTURES / "log").unlink()
        console.save_svg(str(PICTURES / f"{name}.svg"), title=f"omlxd: {name}")

    def type(self, line: str) -> None:
        subprocess.run([*self._base, "send-keys", line, "Enter"], check=True)

    def _wait_still(self) -> str:
        """The screen once nothing has changed on it for a moment. A live display is taken as it is after a while."""
        before, since = self.screen(), time.monotonic()
        deadline = since + PATIENCE_SECONDS
        while time.monotonic() < min(deadline, since + SETTLE_SECONDS + (4 if not before.strip().endswith("$") else 0)):
            time.sleep(0.2)
            now = self.screen()
            if now != before and time.monotonic() - since < 8:
                before, since = now, time.monotonic()
        return self.screen()


def _longer_prompt(folder: Path, file: Path) -> None:
    """The demo's prompt, changed near its end and going on for longer, as token ids."""
    import mlx_lm

    tokenizer = mlx_lm.load(str(folder))[1]
    text = PROMPT.read_text()
    cut = len(text) * 3 // 4
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text[:cut] + " And now for something else. " + text[cut:]}],
        add_generation_prompt=True,
    )
    file.write_text(" ".join(map(str, ids)))
    (file.parent / "SmolLM2").symlink_to(folder)


def main() -> None:
    """Make all of them."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    folder = model_folder()
    with (
        tempfile.TemporaryDirectory(prefix="omlxd-pictures-") as directory,
        DaemonProcess(Path(directory), ram_size="512MiB", ssd_size="2GiB") as daemon,
    ):
        engine = [sys.executable, "-m", "scripts.demo_engine", folder, daemon.socket, PROMPT, "--tokens", "24"]
        for _ in range(2):
            subprocess.run(engine, cwd=CHECKOUT, check=True, stdout=subprocess.DEVNULL)
        _longer_prompt(folder, Path(directory) / "longer.tokens")
        terminal = Terminal({**daemon.environment, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"})
        busy = subprocess.Popen(
            ["bash", "-c", f"while :; do {' '.join(map(str, engine))} >/dev/null; done"],
            cwd=CHECKOUT,
            start_new_session=True,
        )
        try:
            terminal.type(f"omlxd() {{ {sys.executable} -m omlxd $*; }}; PS1='$ '; cd {directory}")
            terminal.picture("status", "omlxd status")
            terminal.picture("top", "omlxd top", leave="C-c")
            terminal.picture("ls", "omlxd ls --sort size --limit 20")
            terminal.picture("explain", "omlxd explain --model SmolLM2 --tokens longer.tokens")
            terminal.picture("doctor", "omlxd doctor")
        finally:
            os.killpg(busy.pid, signal.SIGKILL)
            terminal.close()


if __name__ == "__main__":
    main()
