"""`kd.launch`: a function of a notebook on several ranks. Functions, results and errors travel pickled."""

import importlib.machinery
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_dist import environment
from keras_dist.errors import ConfigurationError, WorkerError
from keras_dist.launcher.job import Job, Outcome, make_cluster
from keras_dist.launcher.output import CellConsole
from keras_dist.launcher.processes import LocalRanks, Received, on_stop_signals
from keras_dist.permissions import write_whole


def cloudpickle_module() -> Any:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            "keras_dist needs cloudpickle to send functions to the ranks.", f"ImportError: {error}",
            "Install it: pip install cloudpickle.",
        ) from error
    return cloudpickle


def dumps_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickles a function and its arguments: by reference what the ranks can import, and the rest by value."""
    cloudpickle, value = cloudpickle_module(), (function, args)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    top = module.__name__.partition(".")[0] if module else ""
    # Not so a module that was loaded from a file outside of `sys.path`, as pytest may do.
    if not top or top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top) is not None:
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def dumps_failure(error: BaseException, own_file: str) -> bytes:
    """Pickles an error, if it can be, and its traceback without the first frames in `own_file`."""
    cloudpickle, trace = cloudpickle_module(), error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == own_file and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(error.with_traceback(trace)))
    try:
        failure = cloudpickle.dumps((error, text))
        pickle.loads(failure)
    except Exception:
        failure = cloudpickle.dumps((None, text))
    return bytes(failure)


_CALL, _RESULT, _ERROR = "call", "result", "error-{}"  # the files of a call


def launch(function: Callable[..., Any], args: Sequence[Any] = (), *, np: int, backend: str = "auto") -> Any:
    """Runs a function on several ranks on this machine, from a notebook, and returns what rank 0 returns.

    The ranks are new processes, as `keras-dist run` starts them. The function is that of a script: it calls
    `kd.init()` first, then makes data and model, and also runs with `python` or in one process. It is sent to the
    ranks with what it uses of the notebook: a function, a class or an array of another cell. A `tf.data.Dataset`
    cannot be sent: make it in the function.

    The cell shows what rank 0 prints. If you stop the cell, all ranks are interrupted, have 5 s to save, and end.

    It does not matter if TensorFlow was imported or used in the notebook, but for GPUs: TensorFlow takes all memory
    of each GPU that a process uses. Don't run operations in the notebook before, or restart its kernel.

    Args:
        function: What each rank runs.
        args: Its arguments.
        np: Number of ranks.
        backend: `"horovod"` or `"multi_worker"`; `"auto"` is Horovod. `kd.init()` in the function finds it.

    Returns:
        What the function returned on rank 0, `None` if rank 0 ended by `sys.exit(0)`. It must be possible to pickle
        it: weights, a history, a Keras model.

    Raises:
        WorkerError: If a rank was killed, or its error cannot be sent. Otherwise the error of the rank that failed
            first is raised as it is, with the traceback of the rank as its cause.
        KeyboardInterrupt: If the cell was stopped.
        ConfigurationError: If the function cannot be sent, or the backend has no ranks.

    Example:

    ```python
    def train(epochs):
        kd.init()
        model = kd.distribute(build_model())
        model.compile("adam", "sparse_categorical_crossentropy")
        return model.fit(x, y, batch_size=64, epochs=epochs).history

    history = kd.launch(train, (4,), np=2)
    ```
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "kd.launch can only be called in the main thread: it has to see that the cell is stopped.",
            f"thread {threading.current_thread().name!r}", "Call it in a cell, or at the top of the script.",
        )
    cloudpickle_module()
    try:
        call = dumps_call(function, tuple(args))
    except Exception as error:  # pickle raises several kinds
        raise ConfigurationError(
            "The function can't be sent to the ranks: it uses something that can't be pickled.",
            f"{type(error).__name__}: {error}", "Make it in the function: a tf.data.Dataset, an open file, a lock.",
        ) from error
    with tempfile.TemporaryDirectory(prefix="keras_dist-launch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / _CALL).write_bytes(call)
        outcome = _run(folder, np, backend)
        if outcome.stopped_by is not None:
            signal.raise_signal(outcome.stopped_by)  # of SIGINT, Python makes a KeyboardInterrupt
        if outcome.code:
            raise _failure(folder, outcome)
        result = folder / _RESULT
        return pickle.loads(result.read_bytes()) if result.exists() else None


def _run(folder: Path, size: int, backend: str) -> Outcome:
    paths = [os.path.abspath(path) for path in sys.path]
    run_call = f"from keras_dist.launcher.function import run_call; run_call({str(folder)!r})"
    program = f"import sys; sys.path[:] = {paths}; {run_call}"
    here = LocalRanks([sys.executable, "-c", program], environment.current(), console=CellConsole(), folder=folder)
    with (
        on_stop_signals(lambda signum: here.events.put(Received(signum))),
        make_cluster(backend, size, here.environ) as cluster,
    ):
        if cluster.only_chief_runs:
            raise ConfigurationError(
                "kd.launch starts ranks, and this backend has none.", f"backend={backend!r}",
                "Connect the notebook to a standing cluster: `keras-dist run --workers 2 --ps 1 --serve`.",
            )
        return Job(cluster, here).run()


def _failure(folder: Path, outcome: Outcome) -> BaseException:
    """Returns the error of the rank that failed first. Its cause has the traceback of the rank."""
    rank = outcome.rank or 0
    file = folder / _ERROR.format(rank)
    if not file.exists():
        return WorkerError(rank, f"Rank {rank} ended without an error of Python.", outcome.cause)
    error, text = pickle.loads(file.read_bytes())
    failure = WorkerError(rank, f"Rank {rank} raised.", text, error)
    if error is None:
        return failure
    error.__cause__ = failure
    return error


def run_call(folder: str) -> None:
    """The program of a rank: runs the function that lies in a folder, and leaves there what it returns or raises."""
    launch = environment.detect_launch()
    rank = launch.topology.rank if launch else 0
    try:
        function, args = pickle.loads(Path(folder, _CALL).read_bytes())
        result = function(*args)
        if rank == 0:
            try:
                data = bytes(cloudpickle_module().dumps(result))
            except Exception as error:  # pickle raises several kinds
                raise ConfigurationError(
                    "What the function has returned can't be sent to the notebook.",
                    f"{type(result).__module__}.{type(result).__name__} ({type(error).__name__}: {error})",
                    "Return what can be pickled: numbers, arrays, `history.history`, a Keras model; or save it to a "
                    "file.",
                ) from error
            write_whole(Path(folder, _RESULT), data)
    except BaseException as error:
        write_whole(Path(folder, _ERROR.format(rank)), dumps_failure(error, __file__))
        raise
