"""Callbacks for `fit`, only what Keras lacks: `ChiefOnly`, `Commit`, `LearningRateWarmup`, `Timing`."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.errors import ConfigurationError
from keras_dist.logging import logger
from keras_dist.state.commits import Commits
from keras_dist.state.weights import Loss, loss_of
from keras_dist.step.optimizer import optimizers_of, variable_of
from keras_dist.step.step import Stopwatch

__all__ = ["ChiefOnly", "Commit", "LearningRateWarmup", "Timing"]


class ChiefOnly(keras.callbacks.Callback):
    """Runs another callback on the chief only, where it sees an ordinary model that is not distributed.

    Use it for callbacks that write files or talk to a server. If the callback calls `save`, `evaluate` or
    `predict`, only the chief does the work. A learning rate or `stop_training` that it sets in `fit` is sent to all
    ranks before the next step. So are the numbers that it adds to an epoch's logs, and its own attributes that are
    numbers or text, such as `ModelCheckpoint.best`. Weights that it sets are not sent: the ranks' weights then differ
    and training stops.

    `fit` itself wraps Keras's `ModelCheckpoint`, `BackupAndRestore`, `TensorBoard`, `CSVLogger`, `RemoteMonitor`,
    `OrbaxCheckpoint` and `ProgbarLogger`.

    Args:
        callback: A `keras.callbacks.Callback`.

    Example:

    ```python
    model.fit(..., callbacks=[kd.callbacks.ChiefOnly(UploadToMyServer())])
    ```
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        self.callback = callback
        # `fit` sets it. Its value lists the methods of the model that are called in it.
        self.local: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.is_active = True
        self.optimizers: Sequence[Any] = ()  # those whose learning rate is sent to all ranks
        self.has_set_a_rate = self.has_evaluated = False
        self.added_logs: dict[str, Any] = {}  # which are not sent yet
        # Define only the hooks that the callback defines: Keras skips a batch hook that no callback has.
        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_") and defines(callback, name):
                setattr(self, name, self._hook(name))

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params
        self.callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if self.is_active:
            with self.local():
                self.callback.set_model(model)

    def _hook(self, name: str) -> Any:
        def hook(*args: Any, **kwargs: Any) -> None:
            if not self.is_active:
                return
            before = rates_of(self.optimizers)
            with self.local() as called, self._noting_logs(name, kwargs.get("logs", args[-1] if args else None)):
                getattr(self.callback, name)(*args, **kwargs)
            self.has_evaluated |= "evaluate" in (called or ())
            self.has_set_a_rate |= rates_of(self.optimizers) != before

        return hook

    @contextlib.contextmanager
    def _noting_logs(self, hook: str, logs: Any) -> Iterator[None]:
        """Notes what is added to the logs of an epoch in this context: the history of all ranks has them."""
        if hook != "on_epoch_end" or not isinstance(logs, dict):
            yield
            return
        given = dict(logs)
        yield
        arrays = np.ndarray | tf.Tensor | tf.Variable | keras.Variable
        added = {name: log for name, log in logs.items() if log is not given.get(name)}
        added = {name: np.asarray(log)[()] if isinstance(log, arrays) else log for name, log in added.items()}
        added = {name: log for name, log in added.items() if isinstance(log, _PLAIN | np.ndarray)}
        logs.update(added)  # of a variable, the value that it has now: all ranks keep the same
        self.added_logs.update(added)


def attributes_of(callback: ChiefOnly) -> dict[str, Any]:
    """Returns the public attributes of a callback that are numbers or text."""
    public = {name: value for name, value in vars(callback.callback).items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if isinstance(value, _PLAIN)}


_PLAIN = bool | int | float | str | np.generic | None


def inner_of(callback: Any) -> Any:
    """Returns the callback in a `ChiefOnly`, any other one itself."""
    return callback.callback if isinstance(callback, ChiefOnly) else callback


def defines(callback: Any, hook: str) -> bool:
    """True if a callback defines a hook. A LambdaCallback has its hooks on the instance."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook)


def rates_of(optimizers: Sequence[Any]) -> list[float | None]:
    """Returns the learning rates of optimizers; `None` for a schedule, which cannot be set."""
    variables = map(variable_of, optimizers)
    return [None if variable is None else float(variable) for variable in variables]


def set_rates(optimizers: Sequence[Any], rates: Sequence[float | None]) -> None:
    for optimizer, rate in zip(optimizers, rates, strict=True):
        if rate is not None:
            optimizer.learning_rate = rate


class Commit(keras.callbacks.Callback):
    """Saves the whole state of `fit`, and lets the next start of the same script resume at the next batch.

    A commit has the weights, the optimizer, the random state, the metrics, the state of the other callbacks, the
    history, and the place in the data. Only the chief writes, in the background, and a commit is complete or not there.
    At the next start `fit` loads the newest commit that is whole. With the same number of ranks, the final weights are
    those of a run that was not interrupted, bit for bit.

    The data have to come in the same order again, so give `shuffle` a seed: call `keras.utils.set_random_seed(...)`, or
    pass `seed=...`. Where an order can't be made again, `fit` resumes at the beginning of the epoch, and says so.

    SIGTERM, which Slurm, Kubernetes and clouds send before they take a machine away, makes all ranks commit after the
    same step and exit with code 75: start the same command again. Another SIGTERM, two seconds later or more, ends
    them at once.

    Args:
        directory: str or path. The folder of the commits, on a disk that is still there at the next start.
        every: When to commit: a time in seconds, minutes or hours (`"300s"`, `"10min"`, `"1h"`), a number of batches,
            or `"epoch"`. The beginning and the end of training are always committed.
        keep: int. How many commits are kept.

    Raises:
        ConfigurationError: If `every` or `keep` is invalid, or the directory is not on a file system.

    Example:

    ```python
    keras.utils.set_random_seed(1)
    model = kd.distribute(build_model())
    model.compile("adam", "mse")
    model.fit(x, y, epochs=90, callbacks=[kd.callbacks.Commit("commits", every="300s")])
    ```
    """

    async_safe = True  # it has no batch hooks: `fit` adds its own

    def __init__(self, directory: str | os.PathLike[str], every: str | int = "300s", keep: int = 3) -> None:
        super().__init__()
        self.directory = os.fspath(directory)
        self.seconds, self.batches = _parse(every)
        self.commits = Commits(directory, keep)
        self.is_arranged = False  # `fit` of a distributed model sets it

    @property
    def at_epochs(self) -> bool:
        """True if it commits only at the end of an epoch."""
        return self.seconds is None and self.batches is None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.is_arranged:
            raise ConfigurationError(
                "Commit needs a model that keras_dist knows, also in one process.",
                f"a model {self.model.name!r} that was not passed to kd.distribute",
                "Add `model = kd.distribute(model)` before `model.compile`.",
            )


def _parse(every: Any) -> tuple[float | None, int | None]:
    """Returns the seconds or the batches between two commits; both `None` for epochs."""
    if every == "epoch":
        return None, None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return None, every
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|min|h)", every) if isinstance(every, str) else None
    if found is not None:
        return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2]], None
    raise ConfigurationError(
        "Unknown time between commits.", f"every={every!r}",
        'Pass a time ("300s", "10min", "1h"), a number of batches, or "epoch".',
    )


class Timing(keras.callbacks.Callback):
    """Adds the time of training steps to the logs of each epoch, for `TensorBoard`, `CSVLogger` and the history.

    Put it before those callbacks in the list, and on every rank: if one rank lacks it, `fit` raises an error. It
    logs these numbers, the same on all ranks:

    - `step_seconds`: seconds per step, averaged over steps and ranks;
    - `wait_seconds`: seconds per step in which a rank waits for slower ranks, averaged likewise. 0 in one process;
    - `examples_per_second`: summed over all ranks. It is missing if a custom `train_step` does not update Keras's
      loss metric, which counts the examples;
    - `staleness`, with asynchronous parameter servers: how many steps of others changed the weights between a step's
      reading of them and its own update, averaged over the steps. To count it takes two more messages in each step.

    It measures training steps, including reading their data and the callbacks between them, but neither validation
    nor callbacks at the end of an epoch. The first epoch includes tracing.

    A rank's working time runs from the end of one gradient reduction until its gradients are ready for the next.
    Its waiting time is the slowest rank's working time minus its own. The times are sent with the gradients, so this
    needs no extra communication and no synchronized clocks, and network time is not included. Waiting elsewhere in a
    step, for data (`data="chief"`) or for the denominator of a loss, is not measured.

    Args:
        log_dir: Where the chief writes, for TensorBoard, the numbers of each rank after each epoch: `step_seconds`,
            `wait_seconds`, and the `loss` and `examples_per_second` of its own shares. Each rank is a run of its
            own, `rank-0`, `rank-1`, ..., so each chart has a line for each rank. By default nothing is written. It
            may be the `log_dir` of `keras.callbacks.TensorBoard`.

    Attributes:
        by_rank: List with a dict of these numbers for each rank, from the last epoch. The rank with the least waiting
            is the slowest. It is also logged at level info. Without Keras's loss metric, `loss` and
            `examples_per_second` are missing.

    Example:

    ```python
    model.fit(x, y, callbacks=[kd.callbacks.Timing("logs"), keras.callbacks.TensorBoard("logs")])
    ```
    """

    async_safe = True  # its batch hooks only read the clock

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self.by_rank: list[dict[str, float]] = []
        self.backend: Backend | None = None  # a distributed `fit` sets this, and the next two
        self.stopwatch: Stopwatch | None = None
        self.loss_of_rank: Callable[[], Loss | None] | None = None
        self._log_dir = None if log_dir is None else os.fspath(log_dir)  # perhaps `gs://bucket/logs`, which is no Path
        self._writers: list[Any] = []
        self._began: float | None = None
        self._ended = 0.0
        self._steps = 0
        self._loss: Loss | None = None

    @property
    def event_folders(self) -> list[Path]:
        """Where the chief writes event files."""
        return [] if self._log_dir is None else sorted(Path(self._log_dir).glob("rank-*"))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.backend is not None:
            self.backend.all_gather_object("kd.callbacks.Timing")  # raises an error if another rank lacks the callback

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began, self._steps, self._loss = None, 0, None
        if self.stopwatch is not None and self.stopwatch.staleness is not None:
            self.stopwatch.staleness.reset_state()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        known = self.params.get("steps") or batch + 1  # the last execution may have fewer steps
        self._ended = time.monotonic()
        self._steps = min(batch + 1, known)

    def on_test_begin(self, logs: Any = None) -> None:
        if self._loss is None and self._steps:
            self._loss = loss_of(self.model)  # before validation resets the metrics

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._began is None:
            return
        seconds, loss = self._ended - self._began, loss_of(self.model) if self._loss is None else self._loss
        waited = 0.0 if self.stopwatch is None else self.stopwatch.waited()
        times = {"step_seconds": seconds / self._steps, "wait_seconds": waited / self._steps}
        own = loss if self.loss_of_rank is None else self.loss_of_rank()
        of_share = {} if own is None else {"loss": own.mean, "examples_per_second": own.examples / seconds}
        self.by_rank = [{**times, **of_share}]
        if self.backend is not None:
            self.by_rank = self.backend.all_gather_object("kd.callbacks.Timing", self.by_rank[0])
        means = {key: sum(each[key] for each in self.by_rank) / len(self.by_rank) for key in times}
        if loss is not None:
            means["examples_per_second"] = loss.examples / (means["step_seconds"] * self._steps)
        if self.stopwatch is not None and self.stopwatch.staleness is not None:
            means["staleness"] = float(self.stopwatch.staleness.result())
        if logs is not None:
            logs.update(means)
        described = "; ".join(
            f"rank {rank}: {each['step_seconds']:.3g} s per step, {each['wait_seconds']:.3g} s of it waiting"
            for rank, each in enumerate(self.by_rank)
        )
        logger().info("epoch %d: %s", epoch + 1, described)
        if self._log_dir is not None and (self.backend is None or self.backend.topology.is_chief):
            self._write(self._log_dir, epoch)

    def _write(self, log_dir: str, epoch: int) -> None:
        for rank, numbers in enumerate(self.by_rank):
            if rank == len(self._writers):
                self._writers.append(tf.summary.create_file_writer(os.path.join(log_dir, f"rank-{rank}")))
            with self._writers[rank].as_default(epoch):
                for name, number in numbers.items():
                    tf.summary.scalar(f"ranks/{name}", number)
            self._writers[rank].flush()

    def on_train_end(self, logs: Any = None) -> None:
        for writer in self._writers:
            writer.close()
        self._writers = []


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate linearly over the first epochs, step by step, to the optimizer's rate.

    A large global batch needs a large learning rate, with which the first steps often diverge. The warm-up starts
    with the rate for one process: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
    https://arxiv.org/abs/1706.02677, section 2.2.

    Step `k` (from 0) of the `n` steps in `epochs` epochs uses `start + (target - start) * k / n`. From step `n` on
    the rate is `target`, and the callback does nothing more. It starts to count at `initial_epoch`, or at the epoch
    where a resumed run ended, and continues over several calls of `fit` with the same callback object. With
    `steps_per_execution`, the rate is set once per execution.

    Args:
        epochs: float. Length of the warm-up, in epochs.
        start: float. The first rate. Default: `target / kd.num_replicas()`, so one replica has no warm-up.
        target: float. The last rate. Default: the rate that the optimizer was compiled with. Pass it if you load a
            model that was saved during a warm-up.
        steps_per_epoch: int. Steps in an epoch. Needed if `fit` gets a dataset of unknown length.

    Raises:
        ConfigurationError: If the learning rate is a schedule, or the number of steps is unknown.

    Example:

    ```python
    model = kd.distribute(model, batch="per_replica", scale_learning_rate="linear")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=256, epochs=90, callbacks=[kd.callbacks.LearningRateWarmup(epochs=5)])
    ```
    """

    def __init__(
        self, epochs: float = 5, start: float | None = None, target: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not epochs > 0:
            problem = "The length of a warm-up must be positive."
            raise ConfigurationError(problem, f"epochs={epochs!r}", "For example epochs=5.")
        self.epochs, self.start, self.target, self.steps_per_epoch = epochs, start, target, steps_per_epoch
        self.size = 1  # a distributed `fit` sets the number of replicas
        self._ramps: list[tuple[Any, float, float]] = []
        self._optimizers: list[Any] = []
        self._epochs_done: int | None = None
        self._is_warming = False

    def set_model(self, model: keras.Model) -> None:
        """Stores the rates, before another callback loads those of an interrupted run."""
        super().set_model(model)
        optimizers = optimizers_of(model)
        if [id(optimizer) for optimizer in optimizers] != [id(optimizer) for optimizer in self._optimizers]:
            self._optimizers = optimizers
            self._ramps = [self._ramp(optimizer) for optimizer in optimizers]
            self._epochs_done = None

    def _ramp(self, optimizer: Any) -> tuple[Any, float, float]:
        variable = variable_of(optimizer)
        if variable is None:
            raise ConfigurationError(
                "LearningRateWarmup cannot set this learning rate: it is not a number.",
                f"optimizer {optimizer.name!r} with a schedule",
                "Give the optimizer a number, or use a schedule with a warm-up: CosineDecay(..., warmup_target=..., "
                "warmup_steps=...).",
            )
        target = float(variable) if self.target is None else self.target
        return variable, target / self.size if self.start is None else self.start, target

    def on_train_begin(self, logs: Any = None) -> None:
        if self._steps() is None:
            raise ConfigurationError(
                "LearningRateWarmup needs the number of steps in an epoch.", "steps=None (a dataset of unknown length)",
                "Pass it: LearningRateWarmup(steps_per_epoch=...), or `steps_per_epoch` of `fit`.",
            )

    def _steps(self) -> int | None:
        return self.steps_per_epoch or self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._epochs_done is None:
            self._epochs_done = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        position = (self._epochs_done or 0) + batch / (self._steps() or 1)
        if position < self.epochs:
            self._is_warming = True
            self._set(position / self.epochs)
        elif self._is_warming or position == self.epochs:  # or a run was resumed just here
            self._is_warming = False
            self._set(1.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epochs_done = (self._epochs_done or 0) + 1

    def _set(self, fraction: float) -> None:
        for variable, start, target in self._ramps:
            if start != target:
                variable.assign(target if fraction == 1.0 else start + (target - start) * fraction)
