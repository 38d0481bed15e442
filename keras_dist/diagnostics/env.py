"""`keras-dist env`: versions and hardware for a bug report. Reads package metadata, imports none of the packages."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError

# Distributions that provide the package `tensorflow`.
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")
_OTHERS = ("keras", "horovod", "numpy")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `keras-dist env`: none."""


def main(args: argparse.Namespace) -> int:
    """Runs `keras-dist env` and returns the exit code."""
    facts = describe()
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name + ':':{width + 1}} {value}")
    return 0


def describe() -> dict[str, str]:
    """Returns versions, hardware and launcher, by name.

    Example:

    >>> describe()["keras"]
    '3.15.1'
    """
    return {
        "keras_dist": installed_version("keras_dist") or "not installed",
        "python": f"{platform.python_version()} ({sys.executable})",
        "tensorflow": _tensorflow(),
        **{name: installed_version(name) or "not installed" for name in _OTHERS},
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "gpus": _gpus(),
        "launcher": _launcher(),
    }


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tensorflow() -> str:
    found = [f"{version} ({name})" for name in _TENSORFLOWS if (version := installed_version(name))]
    return ", ".join(found) or "not installed"


def _gpus() -> str:
    """Reads the driver's files, since TensorFlow would take seconds and claim the GPUs."""
    try:
        models = [_gpu_model(gpu) for gpu in sorted(_NVIDIA_GPUS.iterdir())]
    except OSError:
        return "none"
    return f"{len(models)} ({', '.join(models)})" if models else "none"


def _gpu_model(gpu: Path) -> str:
    for line in (gpu / "information").read_text().splitlines():
        if line.startswith("Model:"):
            return line.partition(":")[2].strip()
    return gpu.name


def _launcher() -> str:
    try:
        launch = environment.detect_launch()
    except ConfigurationError as error:
        return str(error).replace("\n", " ")
    return f"{launch.launcher}, {launch.topology}" if launch else "none (plain python)"
