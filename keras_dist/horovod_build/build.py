"""`keras-dist install-horovod`: what a build needs and changes in the source, the wheels built before, a test."""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from keras_dist import environment
from keras_dist.errors import ConfigurationError, DistributionError
from keras_dist.launcher import descendants
from keras_dist.launcher.nodes import LOOPBACK
from keras_dist.launcher.processes import on_stop_signals, output_of, running
from keras_dist.permissions import locked, make_private_folder, refuse_if_others_can_write
from keras_dist.progress import ProgressLine


class HorovodBuildError(DistributionError):
    """Horovod could not be fetched, patched, compiled or installed, or its test failed."""


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
        if version := environment.installed_version(name):
            return f"{name} {version}"
    return None


def check_requirements(options: BuildOptions, environ: Mapping[str, str]) -> str:
    """Returns the TensorFlow to build for. Names all that a build needs and is missing, and how to install it."""
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
    path: str  # of a file of the source
    before: str  # what is replaced, which must occur exactly once
    after: str
    why: str  # what goes wrong without it


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
        before="__version__ = '0.28.1'\n", after="__version__ = '0.28.1'\npatched_by_keras_dist = True\n",
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
        stream.write(f"The output of the build goes to {log}\n")
        # Compilers that are killed leave temporary files, which are removed with this directory.
        _build(source, directory / "wheels", {**build_environment(options, environ), "TMPDIR": name}, log, stream)
        (built,) = (directory / "wheels").glob("horovod-*.whl")
        yield built
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


def _build(source: Path, wheels: Path, environ: Mapping[str, str], log: Path, stream: TextIO) -> None:
    def done() -> str:
        # Two libraries are compiled at once, each with its own count: the larger one.
        percent = max(map(int, STEP.findall(log.read_text(encoding="utf-8", errors="replace"))), default=0)
        return f"{percent} %" if percent else "configuring"

    command = [sys.executable, "setup.py", "bdist_wheel", "--dist-dir", str(wheels)]
    try:
        with (
            open(log, "wb") as output, ProgressLine(stream) as line,
            running(command, environ, cwd=source, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process,
        ):  # fmt: skip
            line.start(f"Building Horovod {HOROVOD_VERSION}", BUILD_SECONDS)
            line.wait(process, done)
    except BaseException:
        log.unlink(missing_ok=True)  # interrupted: there is no failure to explain
        raise
    if process.returncode == 0:
        return
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    # The first error and the next lines, else the last ones.
    first = next((i for i, line in enumerate(lines) if ERROR.search(line)), max(len(lines) - LINES_SHOWN, 0))
    shown = [line[:300] for line in lines[first : first + LINES_SHOWN]]
    advice = "See the log. `keras-dist install-horovod` tries again."
    if OUT_OF_MEMORY.search(text):
        advice = "The machine ran out of memory: try again with --jobs 1."
    received = [f"exit code {process.returncode}", *shown, f"The whole log: {log}"]
    raise HorovodBuildError("The build of Horovod failed.", "\n  ".join(received), advice)


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
        """Returns the wheel, if it is whole and the one that was built. Refuses one that others could have written."""
        wheels = sorted(self.directory.glob("horovod-*.whl"))
        for path in (*wheels, self.directory, self._checksum):
            refuse_if_others_can_write(path, "installed from", "choose another folder with --wheel-dir")
        # If this user has never built one here, it came with the directory.
        known = self._checksum.read_text().strip() if self._checksum.exists() else None
        return next((wheel for wheel in wheels if _is_whole(wheel) and known in (None, sha256_of(wheel))), None)

    def find_or_build(
        self, build: Callable[[], contextlib.AbstractContextManager[Path]], force: bool, waiting: Callable[[], None]
    ) -> tuple[Path, bool]:
        """Returns the wheel and whether it was built. Calls `waiting` if another process builds the same."""
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


# --- `keras-dist install-horovod` ---

SIZE = 2

# Rank r sends [r + 1, 10 r + 1, 100 r + 1]; the sum is neither a rank's own numbers nor their double.
RANK_PROGRAM = """
import sys
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
sent = tf.constant([1.0, 10.0, 100.0]) * hvd.rank() + 1.0
received = hvd.allreduce(sent, op=hvd.Sum, name="keras_dist_smoke_test").numpy().tolist()
if received != [3.0, 12.0, 102.0]:
    sys.exit(f"Rank {hvd.rank()} received {received}, expected [3.0, 12.0, 102.0].")
hvd.shutdown()
"""


def smoke_test(environ: Mapping[str, str], time_limit_s: float = 180.0, *, mpi: bool = False) -> float:
    """All-reduces on two new processes, which see what pip has just installed. Returns the seconds that it took."""
    start, job = time.monotonic(), secrets.token_hex(8)
    launcher = [sys.executable, "-m", "keras_dist", "run", "--backend", "horovod", "-np", str(SIZE), "--output", "all"]
    if mpi:
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        launcher = ["mpirun", *as_root, "--host", f"{LOOPBACK}:{SIZE}", "-np", str(SIZE)]
    command = [*launcher, "--", sys.executable, "-c", RANK_PROGRAM]
    environ = {"TF_CPP_MIN_LOG_LEVEL": "2", **environ, descendants.JOB: job}
    with descendants.ended(job):  # also of a launcher that takes too long
        output, failure = output_of(command, environ, time_limit_s, start_new_session=True)
    if failure:
        raise HorovodBuildError(
            f"Horovod is installed, but its test failed: {SIZE} processes could not all-reduce.",
            "\n  ".join([failure, *output.strip().splitlines()[-20:]]),
            "Build it again with `keras-dist install-horovod --force`; if that fails too, please report it.",
        )
    return time.monotonic() - start


DESCRIPTION = f"""\
Builds Horovod {HOROVOD_VERSION} for the installed TensorFlow (about 2 minutes on two cores), installs it into
this Python's environment, and tests it with an all-reduce of 2 processes. It keeps the wheel, so the next run
takes seconds. You need a C++ compiler and make; for --mpi also MPI's compiler."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--mpi", action="store_true", help="build the MPI operations too (needs Open MPI)")
    parser.add_argument("--gpu", action="store_true", help="build the NCCL operations (UNTESTED; needs CUDA and NCCL)")
    parser.add_argument("--wheel-dir", type=Path, metavar="DIR", help="keep wheels in DIR instead of the user's cache")
    parser.add_argument("--force", action="store_true", help="build even if such a wheel exists")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers that run at once (default: one per core)")


def main(args: argparse.Namespace) -> int:
    try:
        with on_stop_signals():
            _install_horovod(args)
    except KeyboardInterrupt:
        _print("Interrupted. Partial builds were removed.")
        raise
    except HorovodBuildError as error:
        _print(str(error))
        return 1
    return 0


def _install_horovod(args: argparse.Namespace) -> None:
    environ = environment.current()
    # Each compiler needs up to 0.6 GB; Horovod itself never starts more than 8.
    jobs = min(environment.cores(), 8) if args.jobs is None else args.jobs
    if jobs < 1:
        raise ConfigurationError("A build needs at least one job.", f"--jobs {jobs}", "Use --jobs 1 or more.")
    options = BuildOptions(args.mpi, args.gpu, jobs)
    if options.gpu:
        _print(
            "WARNING: --gpu is untested: it builds Horovod's NCCL operations, which do not compile with TensorFlow "
            "2.19 and later without further changes. Without --gpu, GPUs work too, but Horovod reduces on the CPU."
        )
    tensorflow = installed_tensorflow() or check_requirements(options, environ)
    wheel_dir = args.wheel_dir.expanduser().absolute() if args.wheel_dir else environment.cache_folder() / "horovod"
    checksum_dir = environment.state_folder() / "horovod"  # not beside the wheels
    cache = WheelCache(wheel_dir, wheel_name(tensorflow, options, environ), checksum_dir)
    wheel, built = None if args.force else cache.find(), False
    if wheel is None:  # else no compiler is needed
        check_requirements(options, environ)
        _print(f"For {tensorflow}, Python {sys.version.split()[0]}, with {', '.join(options.flags)}")
        wheel, built = cache.find_or_build(
            build=lambda: built_wheel(options, environ, cache.log, sys.stderr),
            force=args.force,
            waiting=lambda: _print(f"Waiting for another process that builds the same wheel ({cache.log})"),
        )
    _print(f"Horovod {HOROVOD_VERSION}: {'built' if built else 'taken from the cache'}, {wheel}")
    installed = install_wheel(wheel, environ)
    _print(f"{'Installed' if installed else 'Already installed'}: {sys.prefix}")
    # Whatever the user has set: what was built is tested.
    seconds = smoke_test({**environ, environment.HOROVOD_CONTROLLER: "mpi" if options.mpi else "gloo"}, mpi=options.mpi)
    over = " over MPI" if options.mpi else ""
    _print(f"Tested: an all-reduce of 2 processes{over} gave the right sum ({seconds:.0f} s)")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
