"""The demo: a prompt is computed once, then restored from shared memory and, after a restart, from the SSD.

Three processes answer the same prompt with a real model (SmolLM2-135M): the first computes it, the second finds it
in the daemon's shared memory, the third, after the daemon was stopped and started, on the SSD. All three answers must
be the same, token for token, or the exit code is 1. Run it through ``scripts/demo``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from scripts.daemon_process import DaemonProcess
from scripts.demo_engine import Answer
from scripts.smollm import model_folder

PROMPT = Path(__file__).with_name("demo_prompt.txt")
ANSWER_TOKENS = 32
FEWEST_TOKENS = 24
ENGINE_SECONDS = 600

Runs = dict[str, Answer]


def run_engine(folder: Path, daemon: DaemonProcess, progress: Progress, name: str) -> Answer:
    """One engine process, from its start to its end."""
    task = progress.add_task(f"{name}: loading the model", total=None)
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.demo_engine", folder, daemon.socket, PROMPT, "--tokens", str(ANSWER_TOKENS)],
        env=daemon.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        said = []
        for line in engine.stderr:
            match line.split():
                case [done, total] if done.isdigit() and total.isdigit():
                    label = f"{name}: prompt" if done != total else f"{name}: answering"
                    progress.update(task, description=label, completed=int(done), total=int(total))
                case _:
                    said.append(line)
        result = engine.stdout.read()
        if engine.wait(ENGINE_SECONDS):
            raise SystemExit(f"the {name} run failed:\n{''.join(said)[-3000:]}")
    progress.update(task, description=f"{name}: done")
    return Answer(**json.loads(result))


def run_all(console: Console) -> Runs:
    """The three runs, with the daemon stopped and started before the last one."""
    with Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.completed:>4.0f} tokens"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("building the model", total=None)
        folder = model_folder()
        progress.update(task, description="model is there", total=1, completed=1, visible=False)
        with tempfile.TemporaryDirectory(prefix="omlxd-demo-") as directory, DaemonProcess(Path(directory)) as daemon:
            runs = {
                "cold": run_engine(folder, daemon, progress, "cold"),
                "ram": run_engine(folder, daemon, progress, "ram"),
            }
            task = progress.add_task("daemon: stop and start", total=None)
            daemon.stop()
            daemon.start()
            progress.update(task, total=1, completed=1, visible=False)
            runs["ssd"] = run_engine(folder, daemon, progress, "ssd")
    return runs


def tier_of(run: Answer) -> str:
    """Where the reused blocks were."""
    if not run.reused:
        return "-"
    return " + ".join(name for name, blocks in (("RAM", run.ram_blocks), ("SSD", run.ssd_blocks)) if blocks)


def identical(runs: Runs) -> bool:
    """Did all runs answer with the same tokens, and enough of them to tell?"""
    enough = all(len(run.tokens) >= FEWEST_TOKENS for run in runs.values())
    return enough and len({tuple(run.tokens) for run in runs.values()}) == 1


def show(runs: Runs, console: Console) -> None:
    """The table for people."""
    table = Table()
    table.add_column("run")
    for title in ("time to first token", "computed", "reused"):
        table.add_column(title, justify="right")
    table.add_column("tier")
    table.add_column("", justify="right")
    cold = runs["cold"].ttft_s
    for name, run in runs.items():
        faster = "" if name == "cold" else f"{cold / run.ttft_s:.1f} x faster"
        table.add_row(name, f"{run.ttft_s:.2f} s", str(run.computed), str(run.reused), tier_of(run), faster)
    console.print(table)
    console.print(f"Answer ({len(runs['cold'].tokens)} tokens): {' '.join(runs['cold'].text.split())}", highlight=False)
    if identical(runs):
        console.print("All three answers are the same, token for token.")
    else:
        console.print("The answers DIFFER:", style="bold red")
        for name, run in runs.items():
            console.print(f"{name}: {run.text!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A prompt is computed once, then restored from RAM and from the SSD.")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout; progress stays on stderr")
    parser.add_argument("--chat", action="store_true", help="a conversation through mlx-lm's server instead")
    parser.add_argument("--two-machines", action="store_true", help="two daemons, and a Valkey server between them")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --chat: where the plot goes (default: docs/)")
    arguments = parser.parse_args()
    progress = Console(stderr=True)
    if arguments.chat:
        from scripts import demo_chat

        return demo_chat.main(as_json=arguments.json, plot_path=arguments.plot, progress=progress)
    if arguments.two_machines:
        from scripts import demo_two_machines

        return demo_two_machines.main(as_json=arguments.json, progress=progress)
    runs = run_all(progress)
    if arguments.json:
        figures: dict[str, object] = {
            name: {"ttft_s": round(run.ttft_s, 4), "computed": run.computed, "reused": run.reused}
            for name, run in runs.items()
        }
        print(json.dumps({**figures, "identical": identical(runs)}, indent=2))
    else:
        show(runs, Console())
    return 0 if identical(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
