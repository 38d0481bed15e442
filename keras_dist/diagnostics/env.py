"""`keras-dist env`: versions, hardware, network, launcher and backend for a bug report.

What needs TensorFlow is found by a probe, another process, which may fail.
"""

import argparse
import contextlib
import ctypes.util
import dataclasses
import importlib.util
import json
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keras_dist import environment
from keras_dist.backends import backend_class, choose
from keras_dist.environment import installed_version
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.nodes import ipv4_of
from keras_dist.launcher.processes import output_of


def _describe_interface(name: str) -> dict[str, Any]:
    found = {}
    for file in ("operstate", "speed"):
        with contextlib.suppress(OSError):  # a virtual interface has no speed
            found[file] = Path("/sys/class/net", name, file).read_text().strip()
    speed = found.get("speed", "")
    return {
        "address": ipv4_of(name), "state": found.get("operstate"),
        "mbit_per_s": int(speed) if speed.isdecimal() and int(speed) > 0 else None,
    }  # fmt: skip


_PACKAGES = (
    "tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly",  # each provides the package `tensorflow`
    "keras", "horovod", "numpy", "tensorflow-datasets",
)  # fmt: skip
_PROBE_SECONDS = 120.0
_MARK = "probed: "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for a program")


def main(args: argparse.Namespace) -> int:
    facts = describe()
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    lines = list(_lines(facts))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name + ':':{width + 1}} {value}")
    return 0


def describe() -> dict[str, Any]:
    """Returns the facts, by name: texts, numbers, lists and dicts, and `None` for what is not there."""
    probed, infiniband = _probe(), Path("/sys/class/infiniband")
    nccl = map(installed_version, ("nvidia-nccl-cu12", "nvidia-nccl-cu13"))
    return {
        "keras_dist": installed_version("keras_dist"),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": platform.platform(),
        "cores": environment.cores(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "horovod": probed["horovod"],
        "mpi": _mpi(),
        "nccl": {"package": next(filter(None, nccl), None), "library": ctypes.util.find_library("nccl")},
        "gpus": _gpus(),
        "tpu": {"libtpu": installed_version("libtpu"), **probed["tpu"]},
        "network": {name: _describe_interface(name) for _, name in socket.if_nameindex()},
        "infiniband": sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else [],
        "launcher": _or_error(_launcher),
        "variables": environment.launcher_variables(),
        "backend": probed["backend"],
    }


def _lines(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each fact; one in a dict of a dict has a name of two parts."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value and not prefix:
            yield from _lines(value, f"{name} ")
        else:
            yield prefix + name, _text(value)


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _probe() -> dict[str, Any]:
    """Returns what another process finds by importing TensorFlow, Horovod and the backends."""
    command = [sys.executable, "-c", "from keras_dist.diagnostics.env import print_probed; print_probed()"]
    output, failure = output_of(command, {**environment.current(), "TF_CPP_MIN_LOG_LEVEL": "3"}, _PROBE_SECONDS)
    if not failure:
        return dict(json.loads(output.rpartition(_MARK)[2].splitlines()[0]))
    why = ": ".join([failure, *output.splitlines()[-1:]])
    return dict.fromkeys(_PROBED, {"error": f"TensorFlow or Keras can't be imported ({why})"})


def _mpi() -> str | None:
    if (mpirun := shutil.which("mpirun")) is None:
        return None
    output, failure = output_of([mpirun, "--version"], environment.current(), 10.0)
    return (output.splitlines() or [f"{mpirun}: {failure}"])[0]


def _gpus() -> list[str]:
    """Reads the driver's files, since TensorFlow would claim the GPUs."""
    folder = Path("/proc/driver/nvidia/gpus")
    try:
        gpus = {gpu.name: (gpu / "information").read_text() for gpu in sorted(folder.iterdir())}
    except OSError:
        return []
    models = {name: re.search(r"^Model:(.*)", text, re.MULTILINE) for name, text in gpus.items()}
    return [model[1].strip() if model else name for name, model in models.items()]


def _or_error(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except ConfigurationError as error:
        return {"error": str(error).replace("\n", " ")}


def _launcher() -> dict[str, Any] | None:
    launch = environment.detect_launch()
    return {"name": launch.launcher, **dataclasses.asdict(launch.topology)} if launch else None


def print_probed() -> None:
    """Prints the facts that need TensorFlow, in a process of its own, whose libraries print too."""
    print(_MARK + json.dumps({name: _or_error(find) for name, find in _PROBED.items()}))


def _horovod() -> dict[str, Any] | None:
    from keras_dist.backends.horovod.backend import load

    if importlib.util.find_spec("horovod") is None:
        return None
    hvd = load()
    return {part: bool(getattr(hvd, f"{part}_built")()) for part in ("gloo", "mpi", "nccl", "ccl", "cuda", "rocm")}


def _tpu() -> dict[str, Any]:
    launch = None
    with contextlib.suppress(ConfigurationError):  # the fact "launcher" has it
        launch = environment.detect_launch()
    priority = backend_class("tpu").priority(launch)
    return {"is_used": priority.score > 0, "reason": priority.reason}


def _backend() -> dict[str, Any]:
    backend, priority = choose(environment.detect_launch())
    return {"name": backend.name, "reason": priority.reason}


_PROBED = {"horovod": _horovod, "tpu": _tpu, "backend": _backend}
