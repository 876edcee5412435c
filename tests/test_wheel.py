"""What is built from this tree, and what an installed copy of it exposes."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def python(*args: str | Path, cwd: Path) -> str:
    """Runs this interpreter outside the checkout's import path; its output, or a failure."""
    done = subprocess.run(
        [sys.executable, "-P", *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, out: Path, kind: str) -> Path:
    python("-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, source, cwd=out)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(folder: str) -> set[str]:
    """The Python files of a folder of the checkout, as a wheel names them."""
    return {
        f"omlxd/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    }


def test_wheel_holds_storage_and_policy_inside_omlxd_only(wheel: Path) -> None:
    names = names_in(wheel)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"omlxd"}
    assert sources("storage")
    assert sources("storage") | sources("policy") <= names
    assert "omlxd/py.typed" in names
    assert "omlxd/cli/__init__.py" in names
    assert not [name for name in names if name.endswith(".pyc")]


def test_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "omlxd = omlxd.cli:main" in archive.read(entry_points).decode()
        assert any(n.endswith("licenses/LICENSE") for n in archive.namelist())


def test_source_archive_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # not before Python 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    (tmp_path / "out").mkdir()
    again = build(source, tmp_path / "out", "wheel")
    assert names_in(again) == names_in(wheel)


def test_installed_wheel_imports_and_shadows_nobody(wheel: Path, tmp_path: Path) -> None:
    python(
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        tmp_path / "site",
        wheel,
        cwd=tmp_path,
    )
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import importlib.util as u, omlxd, omlxd.storage, omlxd.policy, omlxd.storage.blocks\n"
        "print(omlxd.storage.__path__[0])\n"
        "assert u.find_spec('storage') is None and u.find_spec('policy') is None\n"
    )
    assert python("-c", script, cwd=tmp_path).strip() == str(tmp_path / "site/omlxd/storage")


def test_editable_install_follows_the_links_and_shadows_nobody(tmp_path: Path) -> None:
    out = tmp_path / "editable"
    out.mkdir()
    hook = (
        f"import os; os.chdir({str(ROOT)!r})\n"
        "from hatchling.build import build_editable\n"
        f"build_editable({str(out)!r})\n"
    )
    python("-c", hook, cwd=tmp_path)
    (built,) = out.iterdir()
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    script = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
        "import importlib.util as u, omlxd.cli, omlxd.storage.blocks, omlxd.policy\n"
        "print(omlxd.__file__)\n"
        "assert u.find_spec('storage') is None and u.find_spec('policy') is None\n"
    )
    assert Path(python("-c", script, cwd=tmp_path).strip()).resolve() == ROOT / "omlxd/__init__.py"


def test_a_program_beside_a_checkout_called_omlxd_finds_the_package(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "omlxd").mkdir()  # what `git clone` makes: a folder without an __init__.py
    (tmp_path / "site" / "omlxd").symlink_to(ROOT / "omlxd")  # what scripts/environment makes
    script = f"import sys; sys.path.append({str(tmp_path / 'site')!r})\nimport omlxd\nprint(omlxd.__version__)\n"
    assert python("-c", script, cwd=tmp_path).strip()
