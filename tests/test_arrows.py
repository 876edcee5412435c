"""Which module may import which: omlxd -> storage -> policy, and an engine pulls in no daemon."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DAEMON_SIDE = ["omlxd.server", "lmdb", "zstandard", "pydantic"]


def modules_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module name that a source file imports, at any depth, absolute."""
    package = ("omlxd", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin
            for alias in node.names:
                yield f"{origin}.{alias.name}"


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_there_are_modules_to_check() -> None:
    assert modules_of("policy")
    assert modules_of("storage")


@pytest.mark.parametrize("path", modules_of("policy"), ids=lambda p: p.name)
def test_policy_imports_nothing_of_ours_but_policy(path: Path) -> None:
    ours = [n for n in imports(path) if inside(n, "omlxd", "storage", "policy")]
    assert [n for n in ours if not inside(n, "omlxd.policy") and n != "omlxd"] == []


@pytest.mark.parametrize("path", modules_of("storage"), ids=lambda p: p.name)
def test_storage_imports_only_storage_and_policy_of_ours(path: Path) -> None:
    ours = [n for n in imports(path) if inside(n, "omlxd", "storage", "policy")]
    allowed = [n for n in ours if inside(n, "omlxd.storage", "omlxd.policy")]
    assert [n for n in ours if n not in allowed and n != "omlxd"] == []


def engine_side() -> list[str]:
    engines = ROOT / "omlxd" / "engines"
    names = ["omlxd.client", "omlxd.aio"]
    names += [f"omlxd.engines.{p.stem}" for p in sorted(engines.glob("*.py")) if p.stem[0] != "_"]
    return names


@pytest.mark.parametrize("module", engine_side())
def test_engine_side_pulls_in_no_daemon(module: str) -> None:
    script = f"import sys, {module}\nprint([n for n in {DAEMON_SIDE!r} if n in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_import_omlxd_alone_pulls_in_nothing_heavy() -> None:
    heavy = ("mlx", "numpy", "msgpack", "pydantic", "click")
    script = f"import sys, omlxd\nprint([n for n in sys.modules if n.split('.')[0] in {heavy!r}])\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_blocking_client_pulls_in_no_event_loop_and_no_mlx() -> None:
    heavy = ("asyncio", "ssl", "mlx", "plistlib", "psutil", "platformdirs", "rich", "click")
    script = f"import sys, omlxd; omlxd.connect\nprint([n for n in sys.modules if n.split('.')[0] in {heavy!r}])\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
