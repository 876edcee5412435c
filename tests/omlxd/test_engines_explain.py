from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from omlxd.engines.caches import Group
from omlxd.engines.explain import Fate, NamespaceSeen, State, explain, read_tokens
from omlxd.storage.chain import Namespace, chain_hashes
from omlxd.storage.layout import Layout, TensorSpec

SIZE = 4


def namespace(
    fingerprint: str = "weights", *, salt: str | None = None, cache: str = "KVCache()", model: str = "m"
) -> NamespaceSeen:
    layout = Layout((TensorSpec(f"0:{cache}:0", "float16", (1, 1, SIZE, 8)),)).to_bytes()
    made = Namespace(model=model, fingerprint=fingerprint, block_tokens=SIZE, layout=layout, salt=salt)
    return NamespaceSeen(made.id, model, fingerprint, SIZE, layout, salt is not None)


@dataclass
class Kept:
    """A store in a dictionary."""

    known: list[NamespaceSeen]
    blocks: dict[bytes, Fate] = field(default_factory=dict)
    parents: dict[bytes, bytes | None] = field(default_factory=dict)

    def store(self, space: NamespaceSeen, tokens: Sequence[int], state: State = State.HOT) -> None:
        parent: bytes | None = None
        for chain_hash in chain_hashes(space.id, tokens, SIZE):
            self.blocks[chain_hash] = Fate(state)
            self.parents[chain_hash] = parent
            parent = chain_hash

    def set(self, space: NamespaceSeen, tokens: Sequence[int], index: int, fate: Fate) -> None:
        self.blocks[chain_hashes(space.id, tokens, SIZE)[index]] = fate

    def namespaces(self) -> list[NamespaceSeen]:
        return self.known

    def fates(self, space: NamespaceSeen, hashes: Sequence[bytes]) -> list[Fate]:
        return [self.blocks.get(chain_hash, Fate(State.NEVER)) for chain_hash in hashes]

    def following(self, space: NamespaceSeen, chain_hash: bytes | None) -> int:
        return sum(parent == chain_hash and self.blocks[key].state.restorable for key, parent in self.parents.items())


PROMPT = list(range(100, 122))  # five blocks and two tokens


def test_a_prompt_that_is_there_is_restored_up_to_its_tail() -> None:
    space = namespace()
    kept = Kept([space])
    kept.store(space, PROMPT)
    (answer,) = explain(kept, PROMPT)
    assert [line.fate.state for line in answer.lines] == [State.HOT] * 5
    assert (answer.restorable, answer.tail, answer.divergence) == (20, 2, None)


def test_the_divergence_is_where_the_nearest_chain_goes_on_with_other_tokens() -> None:
    space = namespace()
    kept = Kept([space])
    kept.store(space, PROMPT)
    branch = [*PROMPT[:9], 7, *PROMPT[10:]]
    (answer,) = explain(kept, branch, decode=lambda tokens: " ".join(map(str, tokens)))
    assert answer.restorable == 8
    assert answer.divergence is not None
    assert (answer.divergence.start, answer.divergence.stop, answer.divergence.others) == (8, 12, 1)
    assert answer.divergence.text == "108 7 110 111"
    assert [line.fate.state for line in answer.lines[2:]] == [State.NEVER] * 3


def test_a_chain_that_ends_is_no_other_chain() -> None:
    space = namespace()
    kept = Kept([space])
    kept.store(space, PROMPT[:8])
    (answer,) = explain(kept, PROMPT)
    assert answer.divergence is not None
    assert (answer.divergence.start, answer.divergence.others) == (8, 0)


def test_what_lies_behind_an_evicted_block_is_said_to_be_of_no_use() -> None:
    space = namespace()
    kept = Kept([space])
    kept.store(space, PROMPT, State.SSD)
    kept.set(space, PROMPT, 1, Fate(State.EVICTED, "room was needed", 12.5))
    (answer,) = explain(kept, PROMPT)
    assert answer.lines[1].fate == Fate(State.EVICTED, "room was needed", 12.5)
    assert answer.restorable == SIZE
    assert any("3 blocks behind" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (namespace("new weights"), "other weights"),
        (namespace(salt="alice"), "another salt"),
        (namespace(cache="ConcatenateKVCache()"), "other cache classes"),
        (namespace(model="another"), "for the model another"),
    ],
)
def test_blocks_of_another_namespace_are_named_with_what_keeps_it_apart(other: NamespaceSeen, reason: str) -> None:
    space = namespace()
    kept = Kept([space, other])
    kept.store(other, PROMPT)
    (answer,) = [found for found in explain(kept, PROMPT) if found.namespace == space]
    assert {line.fate.state for line in answer.lines} == {State.ELSEWHERE}
    assert reason in answer.lines[0].fate.cause
    assert answer.restorable == 0


def test_the_fingerprint_picks_the_namespaces_of_these_weights() -> None:
    old, new = namespace("old"), namespace("new")
    assert [found.namespace for found in explain(Kept([old, new]), PROMPT, fingerprint="new")] == [new]


def test_state_is_restored_from_its_last_snapshot_whatever_is_missing_before() -> None:
    space = namespace(cache="ArraysCache(2)")
    assert space.group is Group.STATE
    kept = Kept([space])
    kept.set(space, PROMPT, 3, Fate(State.HOT))
    (answer,) = explain(kept, PROMPT)
    assert answer.restorable == 16


def test_a_short_prompt_is_said_to_be_too_short() -> None:
    (answer,) = explain(Kept([namespace()]), PROMPT[:3])
    assert (answer.tail, answer.restorable, list(answer.lines)) == (3, 0, [])
    assert "too short" in answer.notes[0]


def test_of_a_prompt_of_whole_blocks_the_last_is_computed_again() -> None:
    space = namespace()
    kept = Kept([space])
    kept.store(space, PROMPT[:8])
    (answer,) = explain(kept, PROMPT[:8])
    assert answer.restorable == SIZE
    assert answer.divergence is None
    assert "computed again" in answer.notes[0]


def test_token_files_are_numbers_with_anything_between_them() -> None:
    assert read_tokens("[1, 2,\n 3]") == read_tokens("1 2 3") == [1, 2, 3]
    with pytest.raises(ValueError, match="'-4'"):
        read_tokens("1, -4")
