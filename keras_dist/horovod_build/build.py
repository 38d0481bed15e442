"""Compiles Horovod's source into a wheel, shows the progress, and keeps the log of a failure."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from keras_dist.horovod_build.cache import BUILD_VARIABLES, HOROVOD_VERSION
from keras_dist.horovod_build.errors import HorovodBuildError
from keras_dist.horovod_build.options import BuildOptions
from keras_dist.horovod_build.progress import Progress
from keras_dist.horovod_build.source import fetch_source, fetch_tools

POLL_INTERVAL_S = 0.5
LINES_SHOWN = 12

ERROR = re.compile(r"\berror: |CMake Error|undefined reference|Killed signal|cannot allocate memory", re.I)
OUT_OF_MEMORY = re.compile(r"Killed signal|cannot allocate memory|virtual memory exhausted", re.I)


@contextlib.contextmanager
def built_wheel(options: BuildOptions, environ: Mapping[str, str], log: Path, stream: TextIO) -> Iterator[Path]:
    """Builds a wheel in a temporary directory, which is removed at the end, however that comes.

    Args:
        options: What to build.
        environ: The user's environment.
        log: Where the build's output goes. It stays there only if the build fails.
        stream: Where progress is shown.

    Yields:
        The path of the wheel.

    Raises:
        HorovodBuildError: If the build fails.
    """
    with tempfile.TemporaryDirectory(prefix="keras_dist-horovod-") as name:
        directory = Path(name)
        stream.write("Fetching the source of Horovod and the tools of its build\n")
        environ = fetch_tools(directory / "tools", environ)
        source = fetch_source(directory / "source", environ)
        wheels = directory / "wheels"
        command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(wheels)]
        stream.write(f"Building Horovod {HOROVOD_VERSION} (3 minutes on two cores); its output goes to {log}\n")
        # Compilers that are killed leave their temporary files: these are to go with ours.
        settings = {**build_environment(options, environ), "TMPDIR": name}
        _run(command, source, settings, log, stream)
        yield _only_wheel(wheels, log)
        log.unlink(missing_ok=True)


def build_environment(options: BuildOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that makes Horovod's setup.py build what `options` ask for.

    Args:
        options: What to build.
        environ: The environment to add to.
    """
    settings = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if options.mpi else "HOROVOD_WITHOUT_MPI": "1",
        # Without its symbols the library is 3 MB instead of 50.
        "LDFLAGS": f"{environ.get('LDFLAGS', '')} -s".strip(),
        "MAKEFLAGS": f"-j{options.jobs}",
        # The progress is read from what make prints.
        "CMAKE_GENERATOR": "Unix Makefiles",
        # CMake 4 refuses the policies of the bundled libraries otherwise.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
    }
    if options.gpu:
        settings["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return {**_without_build_settings(environ), **settings}


def error_lines(log: str) -> list[str]:
    """Returns the lines of a log that tell why a build failed.

    Args:
        log: The whole output of a build.

    Returns:
        The first error with what follows it, else the last lines.
    """
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if ERROR.search(line)), len(lines) - LINES_SHOWN)
    first = max(first, 0)
    return [line[:300] for line in lines[first : first + LINES_SHOWN]]


def _without_build_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Keeps the settings that a wheel's key knows of; others would make another wheel of the same name.

    The variables of a `make` around us name pipes that this build does not have.
    """
    dropped = ("HOROVOD_", "CMAKE_")
    make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    return {
        name: value
        for name, value in environ.items()
        if name in BUILD_VARIABLES or not (name.startswith(dropped) or name in make)
    }


def _run(command: Sequence[str], directory: Path, environ: Mapping[str, str], log: Path, stream: TextIO) -> None:
    with (
        open(log, "wb") as written,
        open(log, encoding="utf-8", errors="replace") as read,
        Progress(f"Building Horovod {HOROVOD_VERSION}", stream) as progress,
        _started(command, directory, environ, written.fileno()) as process,
    ):
        try:
            while (code := _wait(process)) is None:
                progress.update(read.read())
        except BaseException:
            log.unlink(missing_ok=True)  # interrupted: there is no failure to explain
            raise
    if code != 0:
        raise _failure(f"exit code {code}", log)


@contextlib.contextmanager
def _started(
    command: Sequence[str], directory: Path, environ: Mapping[str, str], output: int
) -> Iterator[subprocess.Popen[bytes]]:
    # A session of its own, so that the compilers can be ended with it.
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=POLL_INTERVAL_S)
    except subprocess.TimeoutExpired:
        return None


def _only_wheel(directory: Path, log: Path) -> Path:
    wheels = list(directory.glob("horovod-*.whl"))
    if len(wheels) != 1:
        raise _failure(f"{len(wheels)} wheels after a build without an error", log)
    return wheels[0]


def _failure(received: str, log: Path) -> HorovodBuildError:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [received, *error_lines(text), f"The whole log: {log}"]
    advice = "See the log. `keras-dist install-horovod` tries again."
    if OUT_OF_MEMORY.search(text):
        advice = "The machine ran out of memory: try again with --jobs 1."
    return HorovodBuildError("The build of Horovod failed.", "\n  ".join(lines), advice)
