"""A libtpu that doesn't fit kills the process while TensorFlow is imported, so it has to be found before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keras_dist.backends.tpu import place
from keras_dist.errors import ConfigurationError

pytestmark = pytest.mark.timeout(60)


def versions(tensorflow: str | None, libtpu_version: str | None) -> None:
    place.check({"tensorflow-tpu": tensorflow, "libtpu": libtpu_version}.get)


@pytest.mark.parametrize(
    ("tensorflow", "version"),
    [
        (None, None), (None, "0.0.51"), ("2.20.0", "0.0.14"), ("2.20.0", "0.0.23"), ("2.20.0", "0.0.30"),
        ("2.20.1", "0.0.30.post1"), ("2.19.1", "0.0.10"), ("2.31.0", "0.0.99"),
    ],
)  # fmt: skip
def test_what_fits(tensorflow: str | None, version: str | None) -> None:
    versions(tensorflow, version)


@pytest.mark.parametrize(
    ("tensorflow", "version", "problem", "remedy"),
    [
        ("2.20.0", "0.0.51", "would kill the process", "'tensorflow-tpu==2.20.0' 'libtpu==0.0.23'"),
        ("2.20.0", "0.0.31", "libtpu 0.0.31; tensorflow-tpu 2.20.0 runs with 0.0.14 to 0.0.30", "libtpu==0.0.23"),
        ("2.20.0", "0.0.13", "would kill the process", "libtpu==0.0.23"),
        ("2.20.0", None, "is installed without libtpu", "libtpu==0.0.23"),
        ("2.19.1", "0.0.11", "runs with 0.0.10", "'tensorflow-tpu==2.19.1' 'libtpu==0.0.10'"),
    ],
)
def test_what_does_not(tensorflow: str, version: str | None, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        versions(tensorflow, version)
    assert problem in str(raised.value)
    assert remedy in str(raised.value)


def installed_in(folder: Path, **packages: str) -> None:
    for name, version in packages.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_it_is_told_before_tensorflow_is_imported(tmp_path: Path) -> None:
    """A package `tensorflow` that ends the process stands for the real one, which aborts."""
    installed_in(tmp_path, tensorflow_tpu="2.20.0", libtpu="0.0.51")
    for package in ("tensorflow", "keras"):
        (tmp_path / f"{package}.py").write_text("import os\nos._exit(134)\n")
    root = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n"
        "import keras_dist as kd\n"
        "try: kd.init()\n"
        "except kd.ConfigurationError as error: print(error); print('tensorflow' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "The installed libtpu doesn't fit tensorflow-tpu 2.20.0: importing TensorFlow would kill the process.",
        "Received: libtpu 0.0.51; tensorflow-tpu 2.20.0 runs with 0.0.14 to 0.0.30",
        "Remedy: Install the pair: python -m pip install 'tensorflow-tpu==2.20.0' 'libtpu==0.0.23'",
        "False",
    ]
