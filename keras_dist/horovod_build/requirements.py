"""What a build needs from the machine: finds it, or names everything that is missing and how to install it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """What to build, and how. Gloo is always built."""

    mpi: bool = False
    gpu: bool = False  # NCCL operations. Untested.
    jobs: int = 1  # compilers that run at once

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the operations that are built: part of a wheel's key."""
        return ("gloo", *(("mpi",) if self.mpi else ()), *(("gpu",) if self.gpu else ()))


def default_wheel_dir(environ: Mapping[str, str]) -> Path:
    return environment.cache_folder(environ) / "horovod"


def default_checksum_dir(environ: Mapping[str, str]) -> Path:
    """Not beside the wheels."""
    return environment.state_folder(environ) / "horovod"


def default_jobs() -> int:
    """One for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)  # each needs up to 0.6 GB; Horovod itself never starts more


# Each of them provides the package `tensorflow`. If several are installed, the first of them counts.
TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-macos",
    "tensorflow-cpu-aws", "intel-tensorflow", "tf-nightly", "tf-nightly-cpu", "tf-nightly-tpu",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorFlow:
    """The installed TensorFlow, and the distribution that provides it."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclasses.dataclass(frozen=True)
class Tool:
    """A program that a build runs, and the system packages that provide it, by package manager."""

    description: str
    packages: Mapping[str, str]


COMPILER = Tool(
    "C++ compiler (g++, c++ or clang++ on PATH, or $CXX)", {"apt": "g++", "dnf": "gcc-c++", "conda": "cxx-compiler"}
)
MAKE = Tool("make", {"apt": "make", "dnf": "make", "conda": "make"})
CMAKE = Tool("cmake", {"apt": "cmake", "dnf": "cmake", "conda": "cmake"})
MPI = Tool(
    "MPI compiler (mpicxx), for --mpi",
    {"apt": "libopenmpi-dev openmpi-bin", "dnf": "openmpi-devel", "conda": "openmpi"},
)


def installed_tensorflow() -> TensorFlow | None:
    """Returns the installed TensorFlow, read from its metadata, since importing it takes seconds."""
    for name in TENSORFLOW_DISTRIBUTIONS:
        try:
            return TensorFlow(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_requirements(options: BuildOptions, environ: Mapping[str, str]) -> TensorFlow:
    """Returns the TensorFlow to build for, after checking that the machine has everything that a build needs.

    CMake is not required: if it is missing, pip fetches it for the build. Names all that is missing, and how to install
    it.
    """
    tensorflow = installed_tensorflow()
    tools = missing_tools(options, environ)
    missing = [tool.description for tool in tools]
    remedies = [install_line(tools, environ)] if tools else []
    if tensorflow is None:
        missing.append("TensorFlow")
        remedies.append("python -m pip install 'keras_dist[cpu]'   (or [gpu], [tpu]; or any TensorFlow you prefer)")
    if not _has_pip():
        missing.append("pip")
        remedies.append("python -m ensurepip --upgrade")
    if missing or tensorflow is None:
        raise ConfigurationError(
            "Something is missing that is needed to compile Horovod for the installed TensorFlow.",
            "no " + "; no ".join(missing),
            "\n  ".join(["Install it and run this again:", *remedies]),
        )
    return tensorflow


def missing_tools(options: BuildOptions, environ: Mapping[str, str]) -> list[Tool]:
    """Returns the tools that a build needs and that are not on `PATH`."""
    path = environ.get("PATH", "")
    compilers = environ.get("CXX", "").split()[:1] or ["g++", "c++", "clang++"]
    wanted = [(COMPILER, compilers), (MAKE, ["make", "gmake"])]
    if options.mpi:
        wanted.append((MPI, ["mpicxx", "mpic++"]))
    return [tool for tool, programs in wanted if not any(shutil.which(program, path=path) for program in programs)]


def install_line(tools: Sequence[Tool], environ: Mapping[str, str]) -> str:
    """Returns the command that installs `tools` on this system; on an unknown system, one command for each known."""
    commands = {"conda": "conda install -c conda-forge", "apt": "sudo apt-get install -y", "dnf": "sudo dnf install -y"}
    lines = {
        **{name: " ".join([line, *(tool.packages[name] for tool in tools)]) for name, line in commands.items()},
        "macos": "xcode-select --install   (and: brew install cmake open-mpi)",
    }
    if (manager := _package_manager(environ)) is not None:
        return lines[manager]
    labels = {"apt": "Debian, Ubuntu", "dnf": "Fedora, RHEL", "conda": "conda", "macos": "macOS"}
    return "\n  ".join(f"{label}: {lines[name]}" for name, label in labels.items())


def _package_manager(environ: Mapping[str, str]) -> str | None:
    if environ.get("CONDA_PREFIX"):
        return "conda"
    if sys.platform == "darwin":
        return "macos"
    programs = {"apt-get": "apt", "dnf": "dnf", "yum": "dnf"}
    # The system's directories too: a PATH that lacks the compiler may lack these as well.
    path = ":".join([environ.get("PATH", ""), "/usr/bin", "/bin"])
    return next((name for program, name in programs.items() if shutil.which(program, path=path)), None)


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None
