"""Compiles Horovod's source into a wheel, shows the progress, and keeps the log if it fails."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from keras_dist.horovod_build import HorovodBuildError
from keras_dist.horovod_build.cache import BUILD_VARIABLES, HOROVOD_VERSION
from keras_dist.horovod_build.requirements import BuildOptions
from keras_dist.horovod_build.source import fetch_source, fetch_tools
from keras_dist.launcher.processes import signal_session, start_process
from keras_dist.progress import ProgressLine

BUILD_SECONDS = 120.0  # on two cores
LINES_SHOWN = 12

# As make and CMake print it: "[ 57%] Building CXX object ...".
STEP = re.compile(r"^\s*\[\s*(\d+)%\]", re.MULTILINE)

ERROR = re.compile(r"\berror: |CMake Error|undefined reference|Killed signal|cannot allocate memory", re.I)
OUT_OF_MEMORY = re.compile(r"Killed signal|cannot allocate memory|virtual memory exhausted", re.I)


@contextlib.contextmanager
def built_wheel(options: BuildOptions, environ: Mapping[str, str], log: Path, stream: TextIO) -> Iterator[Path]:
    """Builds a wheel in a temporary directory, which is always removed at the end. Keeps the log if the build fails."""
    with tempfile.TemporaryDirectory(prefix="keras_dist-horovod-") as name:
        directory = Path(name)
        stream.write("Fetching the source of Horovod and its build tools\n")
        environ = fetch_tools(directory / "tools", environ)
        source = fetch_source(directory / "source", environ)
        wheels = directory / "wheels"
        command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(wheels)]
        stream.write(f"The output of the build goes to {log}\n")
        # Compilers that are killed leave temporary files, which are removed with this directory.
        settings = {**build_environment(options, environ), "TMPDIR": name}
        _run(command, source, settings, log, stream)
        built = list(wheels.glob("horovod-*.whl"))
        if len(built) != 1:
            raise _failure(f"{len(built)} wheels after a build without an error", log)
        yield built[0]
        log.unlink(missing_ok=True)


def build_environment(options: BuildOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment with which Horovod's setup.py builds what the options ask for.

    Keeps only the build settings that are part of a wheel's key; others would make another wheel of the same name.
    Variables of an outer `make` are dropped: they name pipes that this build does not have.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name in BUILD_VARIABLES
        or not (name.startswith(("HOROVOD_", "CMAKE_")) or name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"))
    }
    settings = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if options.mpi else "HOROVOD_WITHOUT_MPI": "1",
        # Without symbols the library has 3 MB instead of 50.
        "LDFLAGS": f"{environ.get('LDFLAGS', '')} -s".strip(),
        "MAKEFLAGS": f"-j{options.jobs}",
        # The progress is read from the output of make.
        "CMAKE_GENERATOR": "Unix Makefiles",
        # Otherwise CMake 4 refuses the policies of the bundled libraries.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
    }
    if options.gpu:
        settings["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return {**kept, **settings}


def error_lines(log: str) -> list[str]:
    """Returns the lines of a log that show why a build failed: the first error and the next lines, else the last."""
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if ERROR.search(line)), max(len(lines) - LINES_SHOWN, 0))
    return [line[:300] for line in lines[first : first + LINES_SHOWN]]


def _run(command: list[str], directory: Path, environ: Mapping[str, str], log: Path, stream: TextIO) -> None:
    steps = Steps()
    with (
        open(log, "wb") as written,
        open(log, encoding="utf-8", errors="replace") as read,
        ProgressLine(stream) as line,
    ):
        process = start_process(
            command, environ, cwd=directory, stdin=subprocess.DEVNULL, stdout=written.fileno(), stderr=subprocess.STDOUT
        )
        try:
            line.start(f"Building Horovod {HOROVOD_VERSION}", BUILD_SECONDS)
            line.wait(process, lambda: steps.read(read.read()))
        except BaseException:
            log.unlink(missing_ok=True)  # interrupted: there is no failure to explain
            raise
        finally:
            signal_session(process, signal.SIGKILL)  # also ends the compilers
            process.wait()
    if process.returncode != 0:
        raise _failure(f"exit code {process.returncode}", log)


class Steps:
    """Reads from the output of a build how much of it is done."""

    def __init__(self) -> None:
        self._percent = 0
        self._rest = ""

    def read(self, output: str) -> str:
        """Returns the progress, from the output since the last call, which may be empty or end within a line."""
        complete, newline, self._rest = (self._rest + output).rpartition("\n")
        # Two libraries are compiled at once, each with its own count: keep the larger.
        self._percent = max(self._percent, *map(int, STEP.findall(complete + newline)), 0)
        return f"{self._percent} %" if self._percent else "configuring"


def _failure(received: str, log: Path) -> HorovodBuildError:
    text = log.read_text(encoding="utf-8", errors="replace")
    advice = "See the log. `keras-dist install-horovod` tries again."
    if OUT_OF_MEMORY.search(text):
        advice = "The machine ran out of memory: try again with --jobs 1."
    return HorovodBuildError(
        "The build of Horovod failed.", "\n  ".join([received, *error_lines(text), f"The whole log: {log}"]), advice
    )
