"""`keras-dist dry-run` and `kd.tpu_dry_run`: start the process that compiles, and show its progress.

The process has an environment that is made once: the TPU compiler and tensorflow-tpu can't share one. Imports no
TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from keras_dist import environment
from keras_dist.diagnostics.report import Report, target_of
from keras_dist.environment import installed_version
from keras_dist.errors import ConfigurationError, DistributionError, Stopped
from keras_dist.launcher.processes import on_stop_signals, running
from keras_dist.permissions import locked, refuse_if_others_can_write
from keras_dist.progress import ProgressLine

SEARCH_SECONDS = 300.0
_UPDATE_SECONDS = 0.5
# The user's packages (datasets, keras_dist) come after those of the compiler's environment.
_START = "import sys; sys.path += sys.argv[2:]; from keras_dist.diagnostics import check; check.main(int(sys.argv[1]))"
# libtpu looks for its TPU when it is loaded, which takes minutes on other machines than a TPU VM.
SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
}  # fmt: skip


def dry_run(
    target: str, stream: TextIO, search_seconds: float = SEARCH_SECONDS, cached: bool = True, trials: int = 6,
    **what: Any,
) -> Generator[Report, None, None]:  # fmt: skip
    """Compiles a script's model, or one from a file, for a TPU. Yields the report again whenever it has grown.

    Progress and the output of the script are shown on `stream`. The largest batch that fits is searched for as long as
    `search_seconds`, with as many compilations as `trials`. `what` has the `script` and its `arguments`, or the `model`
    in a file and the `specs` of a batch; and another `batch` size.
    """
    known = target_of(target)
    yield (report := Report(known.name, known.topology, known.chips, known.replicas))
    request = {"target": known, "answers": cache_folder() / "answers" if cached else None, "trials": trials, **what}
    python, search_end = python_of(stream), math.inf
    with ProgressLine(stream) as line, _compiling(python, request, stream) as (process, channel):
        line.start("starting TensorFlow")
        while report.missing:
            if time.monotonic() > search_end:
                yield dataclasses.replace(report, stopped=f"the search's time limit of {search_seconds:g} s")
                return
            if not channel.poll(_UPDATE_SECONDS):
                line.update()
                continue
            try:
                answer = channel.recv()
            except (EOFError, OSError) as error:
                raise DistributionError(
                    "The process that compiles ended without a result.", f"exit code {process.wait()}",
                    "With -9 the machine ran out of memory, with -15 somebody ended it. Any other code is a crash: its "
                    "output is above.",
                ) from error
            if isinstance(answer, DistributionError):
                raise answer
            if isinstance(answer, Report):
                report = answer
                if report.missing == ["largest_batch"]:
                    search_end = min(search_end, time.monotonic() + search_seconds)
                line.clear()
                yield report
            else:
                line.start(*answer)
        process.wait()


@contextlib.contextmanager
def _compiling(
    python: Path, request: dict[str, Any], stream: TextIO
) -> Iterator[tuple[subprocess.Popen[bytes], connection.Connection]]:
    channel, theirs = connection.Pipe()
    command = [str(python), "-c", _START, str(theirs.fileno()), *user_paths()]
    output = subprocess.DEVNULL
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file
        output = stream.fileno()
    # It is killed in the end, and would leave libtpu's logs and the files of TensorFlow's autograph behind.
    with tempfile.TemporaryDirectory(prefix="keras_dist-dry-run-") as folder:
        environ = {environment.TPU_LOG_DIR: folder, **environment.current(), "TMPDIR": folder, **SETTINGS}
        # In a session of its own, so that a signal to all processes of the command is not for the compiler, which would
        # print its stack.
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        with running(command, environ, pass_fds=(theirs.fileno(),), **options) as process, channel:
            theirs.close()
            with contextlib.suppress(OSError):  # it has ended; `dry_run` says so
                channel.send(request)
            yield process, channel


def user_paths() -> list[str]:
    """Returns the path of keras_dist, then those of this environment's packages, which the script may import."""
    package = str(Path(__file__).resolve().parents[2])
    return list(dict.fromkeys([package, *(path for path in sys.path if path), *site.getsitepackages()]))


# The extra `tpu-check` of setup.cfg. It uses private names of these packages, so the versions are narrow.
REQUIREMENTS = ("keras>=3.13,<3.16", "tensorflow-cpu>=2.21,<2.22", "jax[tpu]==0.10.2")
_COMPILER = REQUIREMENTS[-1:]  # enough if this environment has a suitable TensorFlow, which is used
_SECONDS = {REQUIREMENTS: 150.0, _COMPILER: 60.0}


def python_of(stream: TextIO) -> Path:
    """Returns the Python of the environment that has the compiler; makes it, for these pins, if there is none."""
    wanted = {"jax": "0.10.2", "libtpu": "0.", "tensorflow-cpu": "2.21."}  # of the extra `tpu-check`
    if all((installed_version(name) or "").startswith(version) for name, version in wanted.items()):
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
    return environment.cache_folder() / "tpu-check"


def _missing() -> tuple[str, ...]:
    """Returns what a new environment needs: only the compiler if this one has a suitable TensorFlow, not TPU's."""
    if environment.get(environment.TPU_CHECK) is not None or installed_version("tensorflow-tpu"):
        return REQUIREMENTS  # other environments may use the named folder, too
    found = map(installed_version, ("tensorflow", "tensorflow-cpu"))
    return _COMPILER if any(version and version.startswith("2.21.") for version in found) else REQUIREMENTS


def _make(folder: Path, python: Path, stream: TextIO) -> None:
    stream.write(f"Making an environment for the TPU compiler, once (1 to 2 GB): {folder}\n")
    log, missing = folder.with_name(folder.name + ".log"), _missing()
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *missing]
    steps = {
        "making the environment": ([sys.executable, "-m", "venv", "--clear", str(folder)], 0.0),
        "installing the TPU compiler": (install, _SECONDS[missing]),
    }
    with open(log, "w") as output, ProgressLine(stream) as line:
        for step, (command, seconds) in steps.items():
            line.start(step, seconds)
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            with running(command, environment.current(), **options) as process:
                line.wait(process)
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


if TYPE_CHECKING:
    import keras


def tpu_dry_run(
    model: keras.Model, batch: Any, target: str = "v5e-8", trials: int = 6, stream: TextIO | None = None,
    search_seconds: float = SEARCH_SECONDS,
) -> Report:  # fmt: skip
    """Compiles a model's training step for a TPU with the real TPU compiler, without a TPU.

    The compiler runs in a separate process and a separate environment, which the first call makes (1 to 2 GB, some
    minutes). Its results are cached. `keras-dist dry-run train.py` does the same for a script.

    Args:
        model: A compiled model. Custom classes must be in a module that can be imported, registered with
            `@keras.saving.register_keras_serializable()`.
        batch: A batch as `fit` would get it from a dataset: `(x, y)`. Only shapes and dtypes matter.
        target: The TPU: `"v2-8"`, `"v3-8"`, `"v4-8"`, `"v5e-8"`, `"v5p-8"`, `"v6e-8"`, `"tpu7x-8"`, and larger ones.
        trials: Compilations to find the largest batch that fits; 0 for none.
        stream: Where progress is shown. Default: standard error.
        search_seconds: Time limit for the trials, 300 s by default. A report that it ends names what is `missing`.

    Returns:
        A report. `print` shows it as text; its attributes have the values: `compiles`, `fits`, `forbidden`, `memory`,
        `largest_batch`, `flops`, `bytes_accessed`, `gradient_reductions`.

    Raises:
        ConfigurationError: If the target is unknown, or the model isn't compiled or can't be loaded.

    Example:

    ```python
    report = kd.tpu_dry_run(model, (images, labels), target="v5e-8")
    print(report)
    assert report.ok
    ```
    """
    from keras_dist.diagnostics.captured import specs_of

    if not getattr(model, "compiled", False):
        received = f"the model {model.name!r}"
        raise ConfigurationError("Only a compiled model has a training step.", received, "Call model.compile(...).")
    with tempfile.TemporaryDirectory(prefix="keras_dist-dry-run-") as folder:
        model.save(path := f"{folder}/model.keras")
        what = {"trials": trials, "model": path, "specs": specs_of(batch)}
        *_, report = dry_run(target, stream or sys.stderr, search_seconds, **what)
        return report


DESCRIPTION = """\
Runs a script up to its first `fit`, and compiles the model's training step for a TPU with the real TPU compiler.
Needs no TPU and no cloud account. The first run installs the compiler (1 to 2 GB, some minutes); later runs need no
network.

Reports whether the step compiles, each operation that a TPU can't run, the memory that the step needs, the work per
step, and the largest batch that fits: each as soon as it is known. If you stop it, or the search takes too long, it
keeps what was found, and says what is missing. The exit code is 0 if the step compiles and fits, 1 if not."""
EXAMPLES = """\
examples:
  keras-dist dry-run train.py --target v5e-8
  keras-dist dry-run train.py --target v4-16 --batch 1024 --no-search
  keras-dist dry-run train.py --target v5e-8 --json -- --epochs 1     arguments after `--` go to the script"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.add_argument("script", help="the script, with or without the two lines of keras_dist")
    parser.add_argument("arguments", nargs="*", help="its arguments, after `--`")
    parser.add_argument("--target", required=True, metavar="TPU", help="the TPU: v2-8, v3-8, v4-8, v5e-8, v6e-1, ...")
    parser.add_argument("--batch", type=int, metavar="N", help="global batch size (default: that of the script)")
    trials = "compile at most N times to find the largest batch that fits (default: 6)"
    parser.add_argument("--trials", type=int, default=6, metavar="N", help=trials)
    limit = f"stop this search after S seconds (default: {SEARCH_SECONDS:g})"
    parser.add_argument("--search-seconds", type=float, default=SEARCH_SECONDS, metavar="S", help=limit)
    parser.add_argument("--no-search", dest="trials", action="store_const", const=0, help="skip the search")
    parser.add_argument("--no-cache", action="store_true", help="compile again what was compiled before")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    if not Path(args.script).is_file():
        raise ConfigurationError("The script was not found.", args.script, "Give the path of a Python file.")
    for name, least in (("batch", 1), ("trials", 0), ("search_seconds", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} must be at least {least}.", f"{option} {value:g}", "Leave it out.")
    reports = dry_run(
        args.target, sys.stderr, args.search_seconds, not args.no_cache, args.trials,
        script=args.script, arguments=args.arguments, batch=args.batch,
    )  # fmt: skip
    with on_stop_signals(), contextlib.closing(reports):
        return 0 if _show(reports, args.json).ok else 1


def _show(reports: Iterator[Report], as_json: bool) -> Report:
    """Prints each line of the report as soon as it is known, JSON at the end. Returns the last report."""
    shown = 0

    def show() -> None:
        nonlocal shown
        lines = [] if as_json else str(report).splitlines()[shown:]
        shown += len(lines)
        for line in lines:
            print(line, flush=True)

    report = next(reports)
    try:
        show()
        for report in reports:  # noqa: B007 - `show` does
            show()
    except (Stopped, DistributionError) as error:
        report = dataclasses.replace(report, stopped=str(error) if isinstance(error, Stopped) else "an error")
        raise
    finally:
        show()
        if as_json:
            print(json.dumps(report.as_json(), indent=1), flush=True)
    return report
