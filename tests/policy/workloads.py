"""Workloads that no policy was tuned on: small, made from a seed, and very different from each other.

Each is a list of requests, each request the ids of its blocks, heads first; an id names a whole prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import accumulate, islice
from random import Random

from omlxd.lab.traces import Request, Trace

Chains = list[list[int]]

REQUESTS = 2_000


class _Names:
    """Ids of prefixes."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, Hashable], int] = {}

    def chain(self, parts: Iterable[Hashable]) -> list[int]:
        """The ids of a prompt that consists of `parts`, one for each block."""
        ids: list[int] = []
        before = -1
        for part in parts:
            before = self._ids.setdefault((before, part), len(self._ids))
            ids.append(before)
        return ids


def _document(name: Hashable, blocks: int) -> list[Hashable]:
    return [(name, index) for index in range(blocks)]


def _zipf(random: Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws ranks 0 to `count` - 1."""
    sums = list(accumulate(1.0 / (rank + 1) ** exponent for rank in range(count)))
    return lambda: min(count - 1, bisect_left(sums, random.random() * sums[-1]))


def scan(random: Random) -> Iterator[list[Hashable]]:
    """Nothing is ever asked for again."""
    for number in range(REQUESTS):
        yield _document(number, random.randint(1, 12))


def loop(random: Random) -> Iterator[list[Hashable]]:
    """The same 120 documents, over and over in the same order."""
    for number in range(REQUESTS):
        yield _document(number % 120, 4 + number % 7)


def shuffled_batches(random: Random) -> Iterator[list[Hashable]]:
    """A batch of 200 prompts behind one instruction, run again and again, each time in another order."""
    order = list(range(200))
    for number in range(REQUESTS):
        if number % 200 == 0:
            random.shuffle(order)
        which = order[number % 200]
        yield [*_document("instruction", 3), *_document(which, 2 + which % 9)]


def single_blocks(random: Random) -> Iterator[list[Hashable]]:
    """Prompts of one block, popular as in Zipf's law."""
    draw = _zipf(random, 1_500, 0.9)
    for _ in range(2 * REQUESTS):
        yield [draw()]


def uniform(random: Random) -> Iterator[list[Hashable]]:
    """300 documents, each as likely as the other at any time."""
    for _ in range(REQUESTS):
        yield _document(random.randrange(300), 6)


def system_prompts(random: Random) -> Iterator[list[Hashable]]:
    """A few long system prompts, each followed by what never comes again."""
    draw = _zipf(random, 12, 1.0)
    for number in range(REQUESTS):
        system = draw()
        yield [*_document(("system", system), 10 + 3 * system), *_document(number, random.randint(1, 10))]


def retrieval(random: Random) -> Iterator[list[Hashable]]:
    """Three of 100 documents in the order of their scores behind a system prompt, then a question."""
    draw = _zipf(random, 100, 0.8)
    for number in range(REQUESTS):
        parts = _document("system", 2)
        for document in dict.fromkeys(draw() for _ in range(3)):
            parts += _document(document, 3)
        yield [*parts, number]


def _conversations(
    random: Random, pick: Callable[[int], int], name: Hashable, system: int, growth: int, most: int
) -> Iterator[list[Hashable]]:
    """Conversations that grow with each turn and start over when they are long; `pick` says whose turn it is."""
    ages: dict[int, int] = {}
    lengths: dict[int, int] = {}
    for number in range(100 * REQUESTS):
        who = pick(number)
        length = lengths.get(who, 0) + random.randint(1, growth)
        if length > most:
            ages[who], length = ages.get(who, 0) + 1, 1
        lengths[who] = length
        yield [*_document((name, "system"), system), *_document((name, who, ages.get(who, 0)), length)]


def agents_that_pause(random: Random) -> Iterator[list[Hashable]]:
    """Forty agents work in bursts; between bursts they wait for long."""
    busy: list[int] = []

    def pick(number: int) -> int:
        if len(busy) < 4 or random.random() < 0.03:
            busy.append(random.randrange(40))
        if len(busy) > 5:
            busy.pop(0)
        return random.choice(busy)

    return islice(_conversations(random, pick, "agents", 8, 3, 60), REQUESTS)


def one_user(random: Random) -> Iterator[list[Hashable]]:
    """One conversation after the other; sometimes an old one is taken up again."""
    state = [0]

    def pick(number: int) -> int:
        if random.random() < 0.06:
            state[0] = random.randrange(30)
        return state[0]

    return islice(_conversations(random, pick, "user", 2, 2, 40), REQUESTS)


def many_models(random: Random) -> Iterator[list[Hashable]]:
    """Six models with users of their own, from short chats to long contexts."""
    streams = [
        _conversations(random, lambda _, m=model: random.randrange(5 + 4 * m), model, model, 1 + model, 6 * (model + 1))
        for model in range(6)
    ]
    for _ in range(REQUESTS):
        yield next(random.choice(streams))


def near_the_top(random: Random) -> Iterator[list[Hashable]]:
    """What LRU is best at: the more lately a document was used, the likelier it is now."""
    stack = list(range(400))
    for _ in range(REQUESTS):
        place = min(399, int(random.expovariate(1 / 40.0)))
        which = stack.pop(place)
        stack.insert(0, which)
        yield _document(which, 2 + which % 5)


def drift(random: Random) -> Iterator[list[Hashable]]:
    """Zipf's law over documents that come into fashion and go out of it."""
    draw = _zipf(random, 300, 1.0)
    for number in range(REQUESTS):
        yield _document(draw() + number // 10, 4)


def change_of_nature(random: Random) -> Iterator[list[Hashable]]:
    """Agents by day, batches by night: what was learnt in the first half is wrong in the second."""
    half = REQUESTS // 2
    yield from islice(agents_that_pause(random), half)
    for number in range(half):
        yield _document(("batch", number % 90), 5)


def phases(random: Random) -> Iterator[list[Hashable]]:
    """Made against a policy that learns: every 250 requests what is used once and what is used again change places."""
    for number in range(2 * REQUESTS):
        phase, step = divmod(number, 250)
        if phase % 2:
            yield _document(("once", number), 5) if step % 2 else _document(("soon", phase, step // 2 % 12), 5)
        else:
            yield _document(("loop", step % 40), 5) if step % 2 else _document(("twice", number // 20), 5)


def ambush(random: Random) -> Iterator[list[Hashable]]:
    """Made against trials: long stretches of a loop teach that what is young is worthless, then only the young is used."""
    for number in range(2 * REQUESTS):
        if number // 500 % 2 == 0:
            yield _document(("loop", number % 150), 4)
        else:
            yield _document(("young", (number - random.randint(1, 10)) // 3), 4)


def search_tree(random: Random) -> Iterator[list[Hashable]]:
    """A tree of thoughts: each request continues an earlier one, mostly a late one."""
    prompts: list[list[Hashable]] = [["root", "root", "root"]]
    for number in range(REQUESTS):
        back = min(len(prompts) - 1, int(random.expovariate(1 / 15.0)))
        prompt = prompts[-1 - back]
        if len(prompt) > 50:
            prompt = prompts[0]
        prompts.append([*prompt, (number, 0), (number, 1)])
        yield prompts[-1]


def twice(random: Random) -> Iterator[list[Hashable]]:
    """Each prompt is asked twice in a row and never again, among a few that everybody asks."""
    for number in range(REQUESTS):
        yield _document(("all", number % 15), 6) if number % 3 == 2 else _document(("pair", number // 3), 6)


def larger_than_the_cache(random: Random) -> Iterator[list[Hashable]]:
    """Twenty very long documents, asked for in turn with questions of one block."""
    for number in range(REQUESTS // 2):
        yield [*_document(random.randrange(20), 150), number]


WORKLOADS: dict[str, Callable[[Random], Iterator[list[Hashable]]]] = {
    make.__name__: make
    for make in (
        scan, loop, shuffled_batches, single_blocks, uniform, system_prompts, retrieval, agents_that_pause, one_user,
        many_models, near_the_top, drift, change_of_nature, phases, ambush, search_tree, twice, larger_than_the_cache,
    )
}  # fmt: skip


def workload(name: str, seed: int = 0) -> Trace:
    """The workload `name` as a trace of one-token blocks."""
    names = _Names()
    chains = [names.chain(parts) for parts in WORKLOADS[name](Random(f"{name}-{seed}"))]
    return Trace(name, 1, [Request(now, -1, len(ids), 0, ids) for now, ids in enumerate(chains)])
