"""Fetches Horovod's source and the tools of its build with pip, and installs the wheel into this environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_dist.errors import ConfigurationError
from keras_dist.horovod_build import HorovodBuildError
from keras_dist.horovod_build.cache import HOROVOD_VERSION, apply_patches
from keras_dist.horovod_build.requirements import CMAKE, install_line

# Of the one source that our patches fit. pip compares it before any code of the source runs.
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# Versions and checksums of all that runs during a build. `make lock` writes them.
BUILD_TOOLS = Path(__file__).with_name("build-tools.txt")
CMAKE_WHEELS = Path(__file__).with_name("cmake.txt")

OLDEST_CMAKE = (3, 13)


def fetch_tools(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Installs the tools of the build, and CMake if it is missing, into a separate directory.

    They stay out of the user's environment, since its packages may conflict with these versions. Returns an environment
    that finds these tools.
    """
    packages, cmake = directory / "packages", directory / "cmake"
    _install(BUILD_TOOLS, packages, environ, "fetch the tools of the build")
    found = _with_packages(packages, environ)
    if has_cmake(environ):
        return found
    try:
        # In a separate directory: pip adds no program to an existing `bin`.
        _install(CMAKE_WHEELS, cmake, environ, "fetch CMake")
    except HorovodBuildError as error:
        raise ConfigurationError(
            f"CMake {OLDEST_CMAKE[0]}.{OLDEST_CMAKE[1]} or later is not on PATH, and pip could not fetch it.",
            error.received,
            install_line([CMAKE], environ),
        ) from error
    # pip's `cmake` is a Python program that imports a package of the same name.
    return {**_with_packages(cmake, found), "PATH": _prepended(cmake / "bin", environ.get("PATH"))}


def has_cmake(environ: Mapping[str, str]) -> bool:
    if (cmake := shutil.which("cmake", path=environ.get("PATH", ""))) is None:
        return False
    answer = subprocess.run([cmake, "--version"], env=dict(environ), capture_output=True, text=True, check=False)
    # "cmake version 3.25.1"; or the program does not work, for example because it belongs to another Python.
    version = answer.stdout.split()[2:3] if answer.returncode == 0 else []
    numbers = [int(number) for number in version[0].split(".")[:2] if number.isdigit()] if version else []
    return tuple(numbers) >= OLDEST_CMAKE


def fetch_source(directory: Path, environ: Mapping[str, str]) -> Path:
    """Fetches, unpacks and patches Horovod's source, and returns its directory."""
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
    done = subprocess.run(
        command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last_lines = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise HorovodBuildError(
            f"pip could not {purpose}.",
            "\n  ".join([f"exit code {done.returncode} from `pip {' '.join(arguments)}`", *last_lines]),
            "If the network or permissions are the cause, fix that and run this again.",
        )


def _install(pinned: Path, directory: Path, environ: Mapping[str, str], purpose: str) -> None:
    arguments = ["install", "--target", str(directory), "--no-deps", "--require-hashes", "--requirement", str(pinned)]
    run_pip(arguments, environ, purpose)


def _with_packages(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    return {**environ, "PYTHONPATH": _prepended(directory, environ.get("PYTHONPATH"))}


def _prepended(directory: Path, path: str | None) -> str:
    return f"{directory}:{path}" if path else str(directory)


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> bool:
    """Installs a wheel of Horovod and what Horovod imports. Returns `False` if this wheel is already installed."""
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if installed_sha256() == sha256:
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
    archive = json.loads(record or "{}").get("archive_info", {})
    kind, _, value = archive.get("hash", "").partition("=")
    return archive.get("hashes", {}).get("sha256") or (value if kind == "sha256" else None)
