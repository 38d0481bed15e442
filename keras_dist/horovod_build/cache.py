"""What a build needs from the machine, what it changes in Horovod 0.28.1, and the wheels that were built before."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import platform
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.horovod_build import HorovodBuildError
from keras_dist.permissions import locked, make_private_folder, refuse_if_others_can_write


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """What to build, and how. Gloo is always built."""

    mpi: bool = False
    gpu: bool = False  # NCCL operations. Untested.
    jobs: int = 1  # compilers that run at once

    @property
    def flags(self) -> tuple[str, ...]:
        """Names of the operations that are built: part of a wheel's name."""
        return ("gloo", *(("mpi",) if self.mpi else ()), *(("gpu",) if self.gpu else ()))


# Each of them provides the package `tensorflow`. If several are installed, the first of them counts.
TENSORFLOW_DISTRIBUTIONS = (
    "tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-cpu-aws",
    "intel-tensorflow", "tf-nightly", "tf-nightly-cpu", "tf-nightly-tpu",
)  # fmt: skip

# What a build needs, the programs of which one is enough, and the packages of apt, dnf and conda that provide it.
COMPILER = "C++ compiler (g++, c++ or clang++ on PATH, or $CXX)"
TOOLS = {
    COMPILER: (("g++", "c++", "clang++"), ("g++", "gcc-c++", "cxx-compiler")),
    "make": (("make", "gmake"), ("make", "make", "make")),
    "MPI compiler (mpicxx), for --mpi": (
        ("mpicxx", "mpic++"), ("libopenmpi-dev openmpi-bin", "openmpi-devel", "openmpi"),
    ),
}  # fmt: skip


def installed_tensorflow() -> str | None:
    """Returns distribution and version of TensorFlow, read from its metadata, since importing it takes seconds."""
    for name in TENSORFLOW_DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return None


def check_requirements(options: BuildOptions, environ: Mapping[str, str]) -> str:
    """Returns the TensorFlow to build for, after checking that the machine has everything that a build needs.

    Names all that is missing, and how to install it.
    """
    missing, packages = [], []
    for tool, (programs, names) in TOOLS.items():
        wanted = environ.get("CXX", "").split()[:1] if tool == COMPILER else []
        is_there = any(shutil.which(program, path=environ.get("PATH", "")) for program in wanted or programs)
        if not is_there and (options.mpi or "--mpi" not in tool):
            missing.append(tool)
            packages.append(names)
    commands = ("sudo apt-get install -y", "sudo dnf install -y", "conda install -c conda-forge")
    of_managers = zip(*packages, strict=True)
    remedies = [" ".join([command, *names]) for command, names in zip(commands, of_managers, strict=False)]
    if (tensorflow := installed_tensorflow()) is None:
        missing.append("TensorFlow")
        remedies.append("python -m pip install 'keras_dist[cpu]'   (or [gpu], [tpu]; or any TensorFlow you prefer)")
    if importlib.util.find_spec("pip") is None:
        missing.append("pip")
        remedies.append("python -m ensurepip --upgrade")
    if missing or tensorflow is None:
        raise ConfigurationError(
            "Something is missing that is needed to compile Horovod for the installed TensorFlow.",
            "no " + "; no ".join(missing),
            "\n  ".join(["Install it, with the package manager that you have, and run this again:", *remedies]),
        )
    return tensorflow


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replacement in one file of the source."""

    path: str
    before: str  # must occur exactly once
    after: str
    why: str  # what goes wrong without it


MARK = "patched_by_keras_dist"  # of the package `horovod`

PATCHES: tuple[Patch, ...] = (
    Patch(
        path="horovod/tensorflow/xla_mpi_ops.cc",
        before="#if TENSORFLOW_VERSION >= 2006000000\n", after="#if TENSORFLOW_VERSION >= 2006000000 && HAVE_GPU\n",
        why="It includes XLA headers that TensorFlow 2.19 and later moved or no longer ship; "
        "all that needs them is for GPUs.",
    ),
    Patch(
        path="horovod/common/gloo/gloo_controller.cc",
        before="  global_ranks_.reserve(size_);\n", after="  global_ranks_.resize(size_);\n",
        why="The list of ranks stays empty, so with Gloo the stall inspector finds no missing rank: "
        "a job that waits for a lost rank hangs forever.",
    ),
    Patch(
        path="horovod/common/gloo/gloo_context.cc",
        before="  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n",
        after="  gloo_iface_ = global_context.gloo_iface_;\n  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n",
        why="The rings of a process set, also of the global one, forget HOROVOD_GLOO_IFACE and take the address of the "
        "host's name. Where /etc/hosts maps it to 127.0.1.1, as on Debian, several hosts can't connect.",
    ),
    Patch(
        path="horovod/__init__.py",
        before="__version__ = '0.28.1'\n", after=f"__version__ = '0.28.1'\n{MARK} = True\n",
        why="Tells that the rings heed HOROVOD_GLOO_IFACE, so that the name of the host needs no address.",
    ),
    Patch(
        path="setup.py", before="else 'RelWithDebInfo'\n", after="else 'Release'\n",
        why="The symbols, which the linker leaves out, take a fifth of the time.",
    ),
    Patch(
        path="setup.py",
        before="cmake_build_args = ['--config', config]\n",
        after="cmake_build_args = ['--config', config, '--target', 'tensorflow']\n",
        why="It compiles Gloo twice, once for other frameworks.",
    ),
    Patch(
        path="horovod/tensorflow/CMakeLists.txt",
        before='set_target_properties(${TF_TARGET_LIB} PROPERTIES PREFIX "")\n',
        after='set_target_properties(${TF_TARGET_LIB} PROPERTIES PREFIX "")\n'
        "if(NOT HAVE_CUDA AND NOT HAVE_ROCM)\n"  # nobody has tried this with them
        "  set_target_properties(${TF_TARGET_LIB} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)\nendif()\n",
        why="Its files share most headers: in two units they compile in two thirds of the time.",
    ),
)  # fmt: skip


def apply_patches(root: Path) -> None:
    for patch in PATCHES:
        file = root / patch.path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (count := text.count(patch.before)) != 1:
            raise HorovodBuildError(
                f"A patch does not fit this Horovod source: {patch.path} must contain the line "
                f"{patch.before.strip()!r} exactly once.",
                f"{count} times" if file.is_file() else "no such file",
                "This is a bug of keras_dist, or not the source of Horovod 0.28.1. Please report it.",
            )
        file.write_text(text.replace(patch.before, patch.after), encoding="utf-8")


HOROVOD_VERSION = "0.28.1"

# What the user may set for the compiler and for Horovod's build. Another value makes another wheel.
BUILD_VARIABLES = (
    "AR", "CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CUDA_HOME", "HOROVOD_DEBUG", "HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB", "HOROVOD_NCCL_LINK",
)  # fmt: skip


# Horovod compiles for those of these features that the build machine has. Machines may share a home directory.
_FEATURES = frozenset({"avx", "f16c", "fma"})


def wheel_name(tensorflow: str, options: BuildOptions, environ: Mapping[str, str]) -> str:
    """Returns the name of a wheel's directory, readable, and another one for each thing that the wheel depends on."""
    python = str(sysconfig.get_config_var("SOABI"))  # with its ABI flags, such as "cpython-311-x86_64-linux-gnu"
    flags, changes = "-".join(options.flags), [(patch.path, patch.before, patch.after) for patch in PATCHES]
    content = (
        tensorflow, python, sysconfig.get_platform(),
        " ".join(platform.libc_ver()),  # a wheel does not load with an older one
        " ".join(sorted(_FEATURES.intersection(environment.processor_features()))), flags,
        "; ".join(f"{name}={environ[name]}" for name in BUILD_VARIABLES if environ.get(name)),
        hashlib.sha256(repr(changes).encode()).hexdigest()[:8], HOROVOD_VERSION,
    )  # fmt: skip
    digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
    return f"{'_'.join([tensorflow, python, flags]).replace(' ', '-')}_{digest}"


class WheelCache:
    """A directory that holds one wheel of one name.

    Several processes may use it at the same time. They see a complete wheel or none. A wheel is code that will run as
    this user: nobody else may be able to write to the directory, and the wheel's checksum is kept elsewhere, in
    `checksum_dir` in the user's home directory.
    """

    def __init__(self, wheel_dir: Path, name: str, checksum_dir: Path) -> None:
        self.directory = wheel_dir / name
        self.log = self.directory / "build.log"
        place = hashlib.sha256(str(self.directory.absolute()).encode()).hexdigest()[:12]
        self._checksum = checksum_dir / f"{name}-{place}.sha256"

    def find(self) -> Path | None:
        """Returns the wheel, or `None` if there is none, or it is damaged, or not the one that was built.

        Refuses one that other users could have written.
        """
        wheels = sorted(self.directory.glob("horovod-*.whl"))
        for path in (*wheels, self.directory, self._checksum):
            refuse_if_others_can_write(path, "installed from", "choose another folder with --wheel-dir")
        # If this user has never built one here, it came with the directory.
        known = self._checksum.read_text().strip() if self._checksum.exists() else None
        return next((wheel for wheel in wheels if _is_whole(wheel) and known in (None, sha256_of(wheel))), None)

    def find_or_build(
        self, build: Callable[[], contextlib.AbstractContextManager[Path]], force: bool, waiting: Callable[[], None]
    ) -> tuple[Path, bool]:
        """Returns the wheel, built in a temporary directory if necessary, and whether it was built.

        Calls `waiting` before it waits for another process that builds the same wheel.
        """
        remedy = "Choose another one with --wheel-dir or XDG_CACHE_HOME."
        with locked(self.directory / "lock", "The directory of wheels is not writable.", remedy, waiting):
            # Another process may have built it.
            if (wheel := self.find()) is not None and not force:
                return wheel, False
            with build() as built, tempfile.TemporaryDirectory(dir=self.directory) as part:
                make_private_folder(self._checksum.parent)
                self._checksum.write_text(sha256_of(built) + "\n")
                new = shutil.copyfile(built, Path(part, built.name))
                new.chmod(0o644)
                wheel = new.replace(self.directory / built.name)  # so that no other process sees half a wheel
            for other in self.directory.glob("horovod-*.whl"):
                if other != wheel:
                    other.unlink()
            return wheel, True


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            has_library = any(Path(name).name.startswith("mpi_lib.") for name in archive.namelist())
            return has_library and archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
