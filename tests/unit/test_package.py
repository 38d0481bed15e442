"""The wheel that `make dist` builds from its source distribution: all that is needed is in it, its command runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import keras_dist as kd

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("keras_dist", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    # With the setuptools of this environment, so that the test needs no network.
    run(folder, "-c", "from setuptools import build_meta; build_meta.build_sdist('source')")
    (source,) = (folder / "source").iterdir()
    pip = ("-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(folder, *pip, "--wheel-dir", "dist", str(source))
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def run(folder: Path, *command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_all_files_of_the_package(wheel: Path) -> None:
    sources = {path.relative_to(ROOT) for path in (ROOT / "keras_dist").rglob("*") if path.is_file()}
    ours = {path for path in sources if "__pycache__" not in path.parts and path.suffix != ".in"}  # of `make lock`
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("keras_dist/")}
    assert packed == set(map(str, ours))


def test_its_command_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
        (entry_points,) = (name for name in files.namelist() if name.endswith("entry_points.txt"))
        assert "keras-dist = keras_dist.cli:main" in files.read(entry_points).decode()
    command = "import keras_dist; from keras_dist.cli import main; print(keras_dist.__file__); main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(tmp_path / "keras_dist" / "__init__.py"), f"keras-dist {kd.__version__}"]
