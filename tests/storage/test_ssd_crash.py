"""Ends without warning: processes that are killed, machines that lose power."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.storage.ssd_data_file import DATA_NAME
from tests.storage.ssd_store import assert_exact, chain_of, key_of, open_tier, restore, spill

MIB = 1 << 20
LONG = os.environ.get("OMLXD_LONG") == "1"
PAGE = 4096


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 1000] if not LONG else [1, 1000, 2000, 3000, 4000])
def test_a_killed_process_leaves_a_store_that_opens_adds_up_and_has_what_was_committed(
    tmp_path: Path, seed: int
) -> None:
    rounds = 100 if LONG else 20
    command = [sys.executable, "-m", "tests.storage.crash_ssd", str(tmp_path), str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{rounds} kills" in done.stdout


# -- power cuts -----------------------------------------------------------------------------------


def read_data(path: Path) -> bytes:
    return (path / DATA_NAME).read_bytes()


def write_image(path: Path, pages: list[bytes], owner: bytes) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    (path / DATA_NAME).write_bytes(b"".join(pages))
    (path / "owner").write_bytes(owner)


def pages_of(data: bytes) -> list[bytes]:
    return [data[at : at + PAGE] for at in range(0, len(data), PAGE)]


def mixed(old: list[bytes], new: list[bytes], rng: random.Random, metas: tuple[bytes, bytes]) -> list[bytes]:
    """A disk to which some of the pages that differ came, in no order; the meta pages are given."""
    length = len(new) if rng.random() < 0.8 else max(len(old), rng.randrange(len(old), len(new) + 1))
    share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    found: list[bytes] = []
    for number in range(length):
        before = old[number] if number < len(old) else bytes(PAGE)
        after = new[number] if number < len(new) else before
        if before != after and rng.random() < 0.1:
            cut = rng.randrange(0, PAGE, 512)  # torn between two sectors
            found.append(after[:cut] + before[cut:])
        else:
            found.append(after if rng.random() < share else before)
    found[:2] = metas
    return found


def work(path: Path, durability: str, commits: int, seed: int) -> tuple[list[bytes], list[set[bytes]], bytes]:
    """States of the file after each commit, and the keys that were visible in each."""
    rng = random.Random(seed)
    tier = open_tier(path, limit=4 * MIB, durability=durability)
    states, visible = [read_data(path)], [set[bytes]()]
    for number in range(commits):
        spill(tier, chain_of((seed, number), [rng.randrange(1, 200_000) for _ in range(rng.randrange(1, 4))]))
        states.append(read_data(path))
        visible.append(set(tier.entries))
    owner = (path / "owner").read_bytes()
    tier.close(clean=False)
    return states, visible, owner


@pytest.mark.parametrize("seed", range(20 if LONG else 4))
def test_with_durability_commit_a_power_cut_loses_the_last_commit_at_most(tmp_path: Path, seed: int) -> None:
    """What is on the disk while commit n+1 runs: commit n's data (synced), its meta page or the one before, and any of n+1's pages.

    Once n+1's data are synced, all of them, and its meta page or not.
    """
    rng = random.Random(seed)
    states, visible, owner = work(tmp_path / "live", "commit", 14, seed)
    images = 0
    for n in range(3, len(states) - 1):
        old, new, older = pages_of(states[n]), pages_of(states[n + 1]), pages_of(states[n - 1])
        for during in (True, True, False):
            if during:
                meta = rng.choice([older, old])
                image = mixed(old, new, rng, (meta[0], meta[1]))
                expected = visible[n] & visible[n - 1]
            else:
                meta = rng.choice([old, new])
                image = [meta[0], meta[1], *new[2:]]
                expected = visible[n] & visible[n + 1]
            write_image(tmp_path / "cut", image, owner)
            tier = open_tier(tmp_path / "cut", limit=4 * MIB, boot="second")
            assert tier.aside == ""
            assert expected <= set(tier.entries)
            assert_exact(tier)
            spill(tier, chain_of("after", [100_000]))
            assert_exact(tier)
            tier.close()
            images += 1
    assert images == 3 * (len(states) - 4)


@pytest.mark.parametrize("durability", ["interval", "none"])
@pytest.mark.parametrize("seed", range(12 if LONG else 3))
def test_below_that_a_power_cut_may_cost_the_store_but_never_gives_a_wrong_byte(
    tmp_path: Path, durability: str, seed: int
) -> None:
    """Nothing was synced since the start: any of the pages, meta pages too, may be on the disk.

    Opened in another process, since what it must not do is die.
    """
    rng = random.Random(seed)
    states, _, owner = work(tmp_path / "live", durability, 12, seed)
    images = []
    for number in range(25):
        early, late = sorted(rng.sample(range(1, len(states)), 2))
        old, new = pages_of(states[early]), pages_of(states[late])
        metas = rng.choice([old, new]), rng.choice([old, new])
        path = tmp_path / f"cut{number}"
        write_image(path, mixed(old, new, rng, (metas[0][0], metas[1][1])), owner)
        images.append(str(path))
    code = (
        "import sys; from pathlib import Path; from tests.storage.ssd_store import *\n"
        "for path in sys.argv[1:]:\n"
        "    tier = open_tier(Path(path), limit=4 << 20, boot='second')\n"
        "    read_all(tier); spill(tier, chain_of('after', [100_000] * 5)); read_all(tier); tier.close()\n"
        "    print('aside' if tier.aside else 'kept', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *images], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 25


def test_a_store_whose_owners_keep_dying_is_gone_through_thoroughly_before_the_next_one_takes_it(
    tmp_path: Path,
) -> None:
    """The head of a value is wrong: nobody looks at it at an ordinary start, since there are so many."""
    tier = open_tier(tmp_path)
    spill(tier, chain_of("a", [200_000]))
    tier.close()
    data = bytearray(read_data(tmp_path))
    head = next(at for at in range(2 * PAGE, len(data), PAGE) if data[at + 10] == 0x04)
    data[head + 12] ^= 1  # its count of pages
    (tmp_path / DATA_NAME).write_bytes(data)
    for _ in range(3):
        tier = open_tier(tmp_path)
        assert not tier.aside
        tier.close(clean=False)
    tier = open_tier(tmp_path)
    assert "says otherwise" in tier.aside
    tier.observe(tier.probe())  # it has got on with it: no more suspicion
    tier.close(clean=False)
    assert b"\n0\n" in (tmp_path / "owner").read_bytes()


def test_a_torn_tree_is_found_without_being_followed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, durability="none")
    spill(tier, chain_of("a", [1000] * 30))
    tier.close(clean=False)
    data = bytearray(read_data(tmp_path))
    for at in range(2 * PAGE, len(data), PAGE):
        if data[at + 10] & 0x02:  # a leaf: its nodes' offsets become nonsense
            data[at + 16 : at + 32] = b"\xff" * 16
    (tmp_path / DATA_NAME).write_bytes(data)
    tier = open_tier(tmp_path, durability="none", boot="second")
    assert "structure" in tier.aside
    assert (tmp_path / "set-aside" / DATA_NAME).exists()
    assert len(tier) == 0
    tier.close()


def test_what_was_committed_is_there_after_an_unclean_end(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    spill(tier, chain_of("a", [1000, 200_000]))
    tier.close(clean=False)
    tier = open_tier(tmp_path)
    assert not tier.clean_start
    assert len(restore(tier, key_of("a", 1))) == 200_000
    tier.close()
