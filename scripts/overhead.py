"""What keeping costs an engine whose prompts are all new: prefill and save, against mlx-lm alone.

Runs are interleaved, with mlx-lm alone and with omlxd in turn (each in a namespace of its own, so that nothing is
restored), over the same prompt and model. Prints the medians of the time that passed and of the processor time that this
process used (which other work on the machine disturbs less), and their ratios to mlx-lm alone in the same pieces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.daemon_process import DaemonProcess
from scripts.smollm import model_folder

TEXT = Path(__file__).with_name("demo_prompt.txt")


Seconds = tuple[float, float]
"""Passed, and of the processor."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(begun: Seconds) -> Seconds:
    return time.perf_counter() - begun[0], time.process_time() - begun[1]


def plain(model: Any, tokens: list[int], step: int) -> Seconds:
    """To prefill, by mlx-lm alone; its first token ends it."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    begun = now()
    next(generate_step(mx.array(tokens), model, max_tokens=1, prefill_step_size=step))
    return since(begun)


def keeping(model: Any, folder: Path, client: Any, tokens: list[int], salt: str) -> Seconds:
    """To look, prefill, keep and compute the first token."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from omlxd.engines.mlx_lm import PromptCache

    kept = PromptCache(client, model, folder, salt=salt, raise_errors=True)
    begun = now()
    cache, restored = kept.restore(tokens)
    done = kept.prefill(tokens, cache, restored)
    next(generate_step(mx.array(tokens[done:]), model, max_tokens=1, prompt_cache=cache))
    kept.save(tokens, cache)
    seconds = since(begun)
    if restored or kept.stats.saved.stored != len(tokens) // kept.block_tokens:
        raise SystemExit(f"this was no empty cache, or not everything was kept: {kept.stats}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of the prompt (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import mlx_lm

    import omlxd

    folder = model_folder()
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    tokens = (tokenizer.encode(TEXT.read_text()) * 8)[: arguments.tokens]
    seconds: dict[str, list[Seconds]] = {"mlx-lm": [], "mlx-lm, pieces of 64": [], "with omlxd": []}
    with tempfile.TemporaryDirectory(prefix="omlxd-overhead-") as directory, DaemonProcess(Path(directory)) as daemon:
        client = omlxd.connect(daemon.socket)
        plain(model, tokens, 64)  # warm up
        for run in range(arguments.runs):
            seconds["mlx-lm"].append(plain(model, tokens, 2048))
            seconds["with omlxd"].append(keeping(model, folder, client, tokens, f"run {run}"))
            seconds["mlx-lm, pieces of 64"].append(plain(model, tokens, 64))
    medians = {
        name: {
            "passed_s": statistics.median(passed for passed, _ in values),
            "processor_s": statistics.median(used for _, used in values),
        }
        for name, values in seconds.items()
    }
    if arguments.json:
        print(json.dumps({"tokens": len(tokens), "runs": arguments.runs, "median": medians}, indent=2))
        return
    alone = medians["mlx-lm, pieces of 64"]
    for name, median in medians.items():
        told = [f"{median[what]:8.3f} s {median[what] / alone[what]:6.3f} x" for what in ("passed_s", "processor_s")]
        print(f"{name:<22} {told[0]}   processor {told[1]}")


if __name__ == "__main__":
    main()
