"""One engine process of the demo: it loads the model, answers one prompt and says how that went (JSON, one line)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

BLOCK_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """How a run went."""

    ttft_s: float
    """From the prompt's text to the first token, in seconds. The model was loaded before."""
    computed: int
    """Prompt tokens that the model computed."""
    reused: int
    """Prompt tokens whose KV data came from the daemon."""
    ram_blocks: int
    """Blocks of the prompt that were in shared memory when it came, ..."""
    ssd_blocks: int
    """... and on the SSD."""
    tokens: list[int]
    text: str


def answer(folder: Path, socket: str, text: str, count: int) -> Answer:
    """Answer ``text`` greedily with ``count`` tokens."""
    import mlx_lm

    import omlxd
    from omlxd.engines.mlx_lm import PromptCache, stream_generate

    model, tokenizer = mlx_lm.load(str(folder))[:2]
    client = omlxd.connect(socket, name="demo")
    kept = PromptCache(client, model, folder, block_tokens=BLOCK_TOKENS, raise_errors=True)
    (space,) = kept.spaces().values()
    where = space.match(_prompt(tokenizer, text))
    begun = time.perf_counter()
    prompt = _prompt(tokenizer, text)
    tokens, parts, first = [], [], 0.0
    for response in stream_generate(
        model, tokenizer, prompt, prompt_cache=kept, max_tokens=count, prompt_progress_callback=_progress
    ):
        first = first or time.perf_counter() - begun
        tokens.append(response.token)
        parts.append(response.text)
    reused = kept.stats.restored_tokens
    client.close()
    return Answer(first, len(prompt) - reused, reused, where.ram, where.ssd, tokens, "".join(parts))


def _prompt(tokenizer: object, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    prompt: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)  # type: ignore[attr-defined]
    return prompt


def _progress(done: int, total: int) -> None:
    print(f"{done} {total}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("socket")
    parser.add_argument("prompt", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    result = answer(arguments.folder, arguments.socket, arguments.prompt.read_text(), arguments.tokens)
    print(json.dumps(dataclasses.asdict(result)))


if __name__ == "__main__":
    main()
