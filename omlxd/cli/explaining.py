"""`omlxd explain`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from omlxd.cli.context import Common, Exit, fail, json_option, pass_common, show, show_json
from omlxd.cli.views import duration, plain_table
from omlxd.counting import counted
from omlxd.operations import pack_keys
from omlxd.storage.blocks import block_key

if TYPE_CHECKING:
    from omlxd.client import Cache
    from omlxd.engines.explain import Explanation, Fate, Line, NamespaceSeen

EXPLAIN_SECONDS = 60.0
AT_ONCE = 2_000
TEXT = 60


class DaemonSource:
    """What explaining asks, asked of a running daemon."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def namespaces(self) -> list[NamespaceSeen]:
        """All that the daemon knows."""
        from omlxd.engines.explain import NamespaceSeen
        from omlxd.storage.chain import Namespace

        answer = []
        for row in self._cache.call("namespaces")["namespaces"]:
            one = Namespace.from_descriptor(row["descriptor"])
            answer.append(
                NamespaceSeen(one.id, one.model, one.fingerprint, one.block_tokens, one.layout, one.salt is not None)
            )
        return answer

    def fates(self, namespace: NamespaceSeen, hashes: Sequence[bytes]) -> list[Fate]:
        """What became of each block."""
        from omlxd.engines.explain import Fate, State

        states = {
            "ram": State.HOT,
            "ssd": State.SSD,
            "remote": State.REMOTE,
            "pending": State.PENDING,
            "gone": State.EVICTED,
            "refused": State.REFUSED,
            "never": State.NEVER,
        }
        answer = []
        for start in range(0, len(hashes), AT_ONCE):
            rows = self._cache.call("fates", keys=pack_keys(hashes[start : start + AT_ONCE]))["fates"]
            answer += [Fate(states[state], cause, at) for state, cause, at in rows]
        return answer

    def following(self, namespace: NamespaceSeen, chain_hash: bytes | None) -> int:
        """How many stored blocks come directly after one."""
        parent = block_key(chain_hash) if chain_hash is not None else None
        return int(self._cache.call("following", namespace=namespace.id, parent=parent)["blocks"])


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="The model's folder, or the name it has here.")
@click.option(
    "--prompt", type=click.File("r", encoding="utf-8"), help="A text file; needs the model's folder. - is stdin."
)
@click.option("--tokens", type=click.File("r", encoding="utf-8"), help="A file of token ids. - is stdin.")
@json_option
@pass_common
def explain(common: Common, model: Path | None, prompt: TextIO | None, tokens: TextIO | None, as_json: bool) -> None:
    """Tell why a prompt would be restored, or not.

    Block by block: in shared memory, on the SSD, on another machine, evicted
    (when, why), refused, stored in another namespace, or never stored; and where
    the prompt leaves the nearest stored chain.

    \b
    omlxd explain --model ~/models/Qwen3-8B-4bit --prompt prompt.txt
    omlxd explain --model Qwen3-8B-4bit --tokens tokens.json --json
    """
    from omlxd.engines import explain as explaining
    from omlxd.engines.fingerprint import fingerprint

    if (prompt is None) == (tokens is None):
        raise click.UsageError("give the prompt either as text (--prompt) or as token ids (--tokens)")
    folder = model if model is not None and model.is_dir() else None
    if prompt is not None and folder is None:
        raise click.UsageError("--prompt needs --model FOLDER, for the model's tokenizer")
    decode = None
    try:
        if folder is not None and (prompt is not None or (folder / "tokenizer.json").is_file()):
            encode, decode = explaining.tokenizer_of(folder)
        ids = encode(prompt.read()) if prompt is not None else explaining.read_tokens(tokens.read() if tokens else "")
    except (ValueError, OSError, ImportError) as error:
        fail(str(error))
    with common.daemon(timeout=EXPLAIN_SECONDS) as cache:
        answers = explaining.explain(
            DaemonSource(cache),
            ids,
            fingerprint=fingerprint(folder) if folder is not None else None,
            model=str(model) if model is not None and folder is None else None,
            decode=decode,
        )
    if as_json:
        show_json({"tokens": len(ids), "namespaces": [_document(answer) for answer in answers]})
    elif not answers:
        fail(
            "nothing was ever stored for "
            + (f"the weights in {folder}" if folder else f"a model named {model}" if model else "any model"),
            Exit.NOT_FOUND,
        )
    else:
        for number, answer in enumerate(answers):
            if number:
                click.echo()
            _show(answer, time.time())


def _document(answer: Explanation) -> dict[str, object]:
    return {
        "namespace": answer.namespace.id.hex(),
        "model": answer.namespace.model,
        "group": answer.namespace.group.value,
        "block_tokens": answer.namespace.block_tokens,
        "restorable_tokens": answer.restorable,
        "tail_tokens": answer.tail,
        "divergence": asdict(answer.divergence) if answer.divergence is not None else None,
        "notes": list(answer.notes),
        "blocks": [
            {
                "index": line.index,
                "start": line.start,
                "stop": line.stop,
                "state": line.fate.state.value,
                "cause": line.fate.cause,
                "at": line.fate.at,
            }
            for line in answer.lines
        ],
    }


def _show(answer: Explanation, now: float) -> None:
    space = answer.namespace
    click.echo(f"{space.model}, namespace {space.id.hex()[:8]} ({space.group.value}): ", nl=False)
    click.echo(f"{answer.restorable} of {answer.tokens} tokens could be restored now")
    if answer.lines:
        table = plain_table("tokens", "blocks", "state", "why", right=("tokens", "blocks"))
        for fate, group in groupby(answer.lines, key=lambda line: _told(line, now)):
            lines = list(group)
            table.add_row(f"{lines[0].start}-{lines[-1].stop}", str(len(lines)), *fate)
        show(table)
    there = answer.divergence
    if there is not None and there.start < answer.tokens:
        if there.others and there.start == 0:
            click.echo(f"What is stored begins differently ({counted(there.others, 'other beginning')}).")
        elif there.others:
            ways = counted(there.others, "other continuation")
            click.echo(f"What is stored goes on differently between tokens {there.start} and {there.stop} ({ways}).")
        else:
            click.echo(f"What is stored of this prompt ends at token {there.start}.")
        if there.text:
            short = " ".join(there.text.split())
            click.echo(f"There yours reads: {short[:TEXT]}{'...' if len(short) > TEXT else ''}")
    if answer.tail:
        click.echo(f"The last {answer.tail} tokens are less than a block ({space.block_tokens}) and never stored.")
    for note in answer.notes:
        click.echo(f"Note: {note}.")


def _told(line: Line, now: float) -> tuple[str, str]:
    """State and reason, as the table shows them: neighbours that read the same are one row."""
    cause = "to make room" if line.fate.cause == "evicted" else line.fate.cause
    if line.fate.at is not None:
        cause = f"{cause}, {duration(max(0.0, now - line.fate.at))} ago"
    return line.fate.state.value, cause
