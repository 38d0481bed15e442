"""Fetches Horovod's source with pip, compiles it into a wheel, shows the progress, and installs the wheel."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from keras_dist.horovod_build import HorovodBuildError
from keras_dist.horovod_build.cache import BUILD_VARIABLES, HOROVOD_VERSION, BuildOptions, apply_patches, sha256_of
from keras_dist.launcher.processes import output_of, running
from keras_dist.progress import ProgressLine

# Of the one source that our patches fit. pip compares it before any code of the source runs.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# Versions and checksums of all that runs during a build. `make lock` writes them.
BUILD_TOOLS = Path(__file__).with_name("build-tools.txt")


def fetch_tools(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Installs the tools of the build into a separate directory, and returns an environment that finds them.

    They stay out of the user's environment, since its packages may conflict with these versions.
    """
    arguments = ["install", "--target", str(directory), "--no-deps", "--require-hashes", "--requirement"]
    run_pip([*arguments, str(BUILD_TOOLS)], environ, "fetch the tools of the build")
    # pip's `cmake` is a Python program that imports a package of the same name.
    places = {"PATH": directory / "bin", "PYTHONPATH": directory}
    before = {name: f":{environ[name]}" if environ.get(name) else "" for name in places}
    return {**environ, **{name: f"{place}{before[name]}" for name, place in places.items()}}


def fetch_source(directory: Path, environ: Mapping[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    requirement = directory / "requirement.txt"
    requirement.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SOURCE_SHA256}\n")
    arguments = ["download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    run_pip([*arguments, "--dest", str(directory), "--requirement", str(requirement)], environ, "fetch Horovod")
    shutil.unpack_archive(directory / f"horovod-{HOROVOD_VERSION}.tar.gz", directory)
    source = directory / f"horovod-{HOROVOD_VERSION}"
    apply_patches(source)
    return source


def run_pip(arguments: Sequence[str], environ: Mapping[str, str], purpose: str) -> None:
    """Runs pip of the running interpreter; `purpose` completes the sentence "pip could not ..."."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    output, failure = output_of(command, environ)
    if failure:
        raise HorovodBuildError(
            f"pip could not {purpose}.",
            "\n  ".join([f"{failure} from `pip {' '.join(arguments)}`", *output.strip().splitlines()[-12:]]),
            "If the network or permissions are the cause, fix that and run this again.",
        )


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> bool:
    """Installs a wheel of Horovod and what Horovod imports. Returns `False` if this wheel is already installed."""
    if installed_sha256() == (sha256 := sha256_of(wheel)):
        return False
    requirements = ["cloudpickle", "packaging", "psutil", "pyyaml"]
    if sys.version_info >= (3, 12):
        requirements.append("setuptools")  # has distutils, which Horovod's launcher imports and Python 3.12 lacks
    run_pip(["install", *requirements], environ, "install what Horovod imports")
    # The same version may be installed, built for another TensorFlow; only Horovod is reinstalled. The URL has the
    # checksum, since pip before 23.1 (Debian 12) does not record that of a file.
    url = f"{wheel.absolute().as_uri()}#sha256={sha256}"
    run_pip(["install", "--force-reinstall", "--no-deps", url], environ, f"install {wheel.name}")
    return True


def installed_sha256() -> str | None:
    """Returns the checksum of the wheel that Horovod was installed from, `None` if it is unknown."""
    try:
        record = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    kind, _, value = json.loads(record or "{}").get("archive_info", {}).get("hash", "").partition("=")
    return value if kind == "sha256" else None


BUILD_SECONDS = 90.0  # on two cores
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


def _run(command: list[str], directory: Path, environ: Mapping[str, str], log: Path, stream: TextIO) -> None:
    def done() -> str:
        # Two libraries are compiled at once, each with its own count: the larger one.
        percent = max(map(int, STEP.findall(log.read_text(encoding="utf-8", errors="replace"))), default=0)
        return f"{percent} %" if percent else "configuring"

    try:
        with (
            open(log, "wb") as output, ProgressLine(stream) as line,
            running(command, environ, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process,
        ):  # fmt: skip
            line.start(f"Building Horovod {HOROVOD_VERSION}", BUILD_SECONDS)
            line.wait(process, done)
    except BaseException:
        log.unlink(missing_ok=True)  # interrupted: there is no failure to explain
        raise
    if process.returncode != 0:
        raise _failure(f"exit code {process.returncode}", log)


def _failure(received: str, log: Path) -> HorovodBuildError:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    # The first error and the next lines, else the last ones.
    first = next((i for i, line in enumerate(lines) if ERROR.search(line)), max(len(lines) - LINES_SHOWN, 0))
    shown = [line[:300] for line in lines[first : first + LINES_SHOWN]]
    advice = "See the log. `keras-dist install-horovod` tries again."
    if OUT_OF_MEMORY.search(text):
        advice = "The machine ran out of memory: try again with --jobs 1."
    return HorovodBuildError(
        "The build of Horovod failed.", "\n  ".join([received, *shown, f"The whole log: {log}"]), advice
    )
