"""The environment that compiles, made once: the TPU compiler and tensorflow-tpu can't share one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TextIO

from keras_dist import environment
from keras_dist.diagnostics.env import installed_version
from keras_dist.errors import DistributionError
from keras_dist.permissions import locked, refuse_if_others_can_write
from keras_dist.progress import ProgressLine

# The extra `tpu-check` of setup.cfg. It uses private names of these packages, so the versions are narrow.
REQUIREMENTS = ("keras>=3.13,<3.16", "tensorflow-cpu>=2.21,<2.22", "jax[tpu]==0.10.2")
_COMPILER = REQUIREMENTS[-1:]  # enough if this environment has a suitable TensorFlow, which is used
_SECONDS = {REQUIREMENTS: 150.0, _COMPILER: 60.0}


def python_of(stream: TextIO) -> Path:
    """Returns the Python of an environment that has the compiler; makes the environment if there is none.

    It is in `KERAS_DIST_TPU_CHECK`, or in a folder of the user's cache for these pins.
    """
    wanted = {"jax": "0.10.2", "libtpu": "0.", "tensorflow-cpu": "2.21."}  # of the extra `tpu-check`
    if all(_version(name).startswith(version) for name, version in wanted.items()):
        return Path(sys.executable)
    if (named := environment.get(environment.TPU_CHECK)) is not None:
        folder = Path(named).absolute()
    else:
        digest = hashlib.sha256(repr(_missing()).encode()).hexdigest()[:8]
        folder = cache_folder() / f"python{sys.version_info[0]}.{sys.version_info[1]}-{digest}"
    python = folder / "bin" / "python"
    problem = "The folder for the TPU compiler can't be written."
    remedy = f"Choose another one with {environment.TPU_CHECK} or XDG_CACHE_HOME."
    with locked(folder.with_name(folder.name + ".lock"), problem, remedy):
        refuse_if_others_can_write(folder / "bin", "run from", f"choose another folder with {environment.TPU_CHECK}")
        if not (folder / "ready").exists():
            _make(folder, python, stream)
    return python


def cache_folder() -> Path:
    """For dry runs, in the user's cache."""
    return environment.cache_folder() / "tpu-check"


def _missing() -> tuple[str, ...]:
    """Returns what the new environment needs: only the compiler if this one has a suitable TensorFlow, not TPU's."""
    if environment.get(environment.TPU_CHECK) is not None or _version("tensorflow-tpu"):
        return REQUIREMENTS  # other environments may use the named folder, too
    fits = any(_version(name).startswith("2.21.") for name in ("tensorflow", "tensorflow-cpu"))
    return _COMPILER if fits else REQUIREMENTS


def _version(name: str) -> str:
    return installed_version(name) or ""


def _make(folder: Path, python: Path, stream: TextIO) -> None:
    stream.write(f"Making an environment for the TPU compiler, once (1 to 2 GB): {folder}\n")
    log, missing = folder.with_name(folder.name + ".log"), _missing()
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *missing]
    with open(log, "w") as output:
        steps = {
            "making the environment": [sys.executable, "-m", "venv", "--clear", str(folder)],
            "installing the TPU compiler": install,
        }
        for step, command in steps.items():
            with (
                ProgressLine(stream) as line,
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process,
            ):
                line.start(step, _SECONDS[missing] if command is install else None)
                try:
                    line.wait(process)
                except BaseException:
                    process.kill()
                    raise
            if process.returncode:
                lines = log.read_text(errors="replace").splitlines()[-8:]
                raise DistributionError(
                    "The environment for the TPU compiler could not be made.",
                    "\n  ".join([*lines, f"The whole log: {log}"]),
                    "Check the network and the disk. To make it by hand: python -m venv DIR && DIR/bin/pip install "
                    f"{' '.join(map(repr, REQUIREMENTS))} && touch DIR/ready, then set {environment.TPU_CHECK}=DIR.",
                )
    (folder / "ready").touch()
    log.unlink()
