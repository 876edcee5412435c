"""An engine process for the tests: a small model, prompts on stdin (JSON), how they went on stdout (JSON)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

import omlxd
from omlxd.engines.mlx_lm import PromptCache
from tests.model.tiny import KINDS, build

SIZE = 16


def main() -> None:
    job = json.load(sys.stdin)
    folder = Path(job["folder"])
    model = build(KINDS[0], folder, save=False)
    kept = PromptCache(omlxd.connect(job["socket"]), model, folder, block_tokens=SIZE, raise_errors=True)
    results = []
    for tokens in job["prompts"]:
        cache, restored = kept.restore(tokens)
        done = kept.prefill(tokens, cache, restored)
        logits = model(mx.array(tokens[done:])[None], cache=cache)[0, -1]
        results.append({"restored": restored, "logits": np.array(logits).tobytes().hex()})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
