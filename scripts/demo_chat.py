"""The chat demo: a conversation through mlx-lm's HTTP server, with restarts, with omlxd and without.

Five turns; then server (and daemon) are stopped and started; then turn six, and another question after turn three. What
is measured is the time to the first piece of text of each answer, and how many of the prompt's tokens were reused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.daemon_process import CHECKOUT, DaemonProcess
from scripts.server_process import Message, ServerProcess, Turn
from scripts.smollm import model_folder

PLOT = CHECKOUT / "docs" / "demo-chat.png"
TEXT = Path(__file__).with_name("demo_prompt.txt")
ANSWER_TOKENS = 24
QUESTIONS = [
    "When was the lighthouse lit for the first time?",
    "How many keepers lived there, and what did they do?",
    "What is special about the lens?",
    "What did they do when there was fog?",
    "When did the last keeper leave?",
    "What does the last entry in the log books say?",
]
BRANCH_AFTER = 3
BRANCH = "How far could the beam be seen on a clear night?"


@dataclass(frozen=True, slots=True)
class Named:
    """A turn and what it is called in the table."""

    name: str
    turn: Turn


def converse(server: ServerProcess, restart: Callable[[], None], step: Callable[[str], None]) -> list[Named]:
    """The conversation; ``restart`` stops and starts everything."""
    text = TEXT.read_text().rsplit("\n\n", 1)[0]
    messages: list[Message] = [{"role": "system", "content": f"Answer questions about this text.\n\n{text}"}]
    turns = []
    branch: list[Message] = []
    for number, question in enumerate(QUESTIONS, start=1):
        if number == len(QUESTIONS):
            step("restart")
            restart()
        step(f"turn {number}")
        messages.append({"role": "user", "content": question})
        turn = server.ask(messages, ANSWER_TOKENS)
        messages.append({"role": "assistant", "content": turn.text})
        after = " (restarted)" if number == len(QUESTIONS) else ""
        turns.append(Named(f"{number}{after}", turn))
        if number == BRANCH_AFTER:
            branch = list(messages)
    step(f"branch from turn {BRANCH_AFTER}")
    turn = server.ask([*branch, {"role": "user", "content": BRANCH}], ANSWER_TOKENS)
    return [*turns, Named(f"branch from {BRANCH_AFTER}", turn)]


def measure(progress_console: Console) -> dict[str, list[Named]]:
    """The conversation with omlxd, then without."""
    results = {}
    with (
        Progress(
            TextColumn("{task.description:<40}"), BarColumn(), TimeElapsedColumn(), console=progress_console
        ) as progress,
        tempfile.TemporaryDirectory(prefix="omlxd-demo-") as directory,
    ):
        folder = model_folder()
        for name in ("with omlxd", "without"):
            task = progress.add_task(name, total=len(QUESTIONS) + 2)

            def step(what: str, task: object = task, name: str = name) -> None:
                progress.update(task, description=f"{name}: {what}", advance=1)  # type: ignore[arg-type]

            with ExitStack() as stack:
                log = Path(directory) / "server.log"
                if name == "without":
                    server = stack.enter_context(ServerProcess(folder, os.environ, log, kept=False))
                    stoppable = [server]
                else:
                    daemon = stack.enter_context(DaemonProcess(Path(directory) / "daemon"))
                    server = stack.enter_context(ServerProcess(folder, daemon.environment, log))
                    stoppable = [server, daemon]  # type: ignore[list-item]

                def restart(stoppable: list[ServerProcess] = stoppable) -> None:
                    for process in stoppable:
                        process.stop()
                    for process in reversed(stoppable):
                        process.start()

                results[name] = converse(server, restart, step)
            progress.update(task, description=f"{name}: done", completed=len(QUESTIONS) + 2)
    return results


def show(results: dict[str, list[Named]], console: Console) -> None:
    """The table for people."""
    table = Table(title="time to first token")
    table.add_column("turn")
    for title in ("prompt", "with omlxd", "reused", "without", "reused", ""):
        table.add_column(title, justify="right")
    for ours, plain in zip(results["with omlxd"], results["without"], strict=True):
        table.add_row(
            ours.name,
            str(ours.turn.prompt_tokens),
            f"{ours.turn.ttft_s:.2f} s",
            str(ours.turn.reused),
            f"{plain.turn.ttft_s:.2f} s",
            str(plain.turn.reused),
            f"{plain.turn.ttft_s / ours.turn.ttft_s:.1f} x",
        )
    console.print(table)


def plot(results: dict[str, list[Named]], path: Path) -> None:
    """Bars, one pair a turn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    width = 0.38
    for offset, (name, turns) in zip((-width / 2, width / 2), results.items(), strict=True):
        places = [index + offset for index in range(len(turns))]
        bars = axes.bar(places, [named.turn.ttft_s for named in turns], width, label=name)
        axes.bar_label(bars, [f"{named.turn.reused}" for named in turns], fontsize=8)
    axes.set_xticks(range(len(turns)), [f"turn {named.name}".replace("turn branch", "branch") for named in turns])
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("time to first token, s")
    axes.set_title(
        "A conversation through mlx_lm.server, restarted before turn six (numbers: tokens reused)", fontsize=10
    )
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(*, as_json: bool, plot_path: Path | None, progress: Console) -> int:
    """Run it; the exit code."""
    results = measure(progress)
    path = plot_path or PLOT
    plot(results, path)
    if as_json:
        figures = {
            name: [{"turn": named.name, **asdict(named.turn)} for named in turns] for name, turns in results.items()
        }
        print(json.dumps({**figures, "plot": str(path)}, indent=2))
    else:
        show(results, Console())
        progress.print(f"The plot is in {path}.")
    return 0
