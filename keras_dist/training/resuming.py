"""Lets `fit` commit its state, and resume from the newest commit: what `kd.callbacks.Commit` asks for."""

import contextlib
import functools
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, MutableSet, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import environment
from keras_dist.callbacks import Commit, inner_of
from keras_dist.comm import processes
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, tf_data
from keras_dist.compat.keras_model import attach, attached
from keras_dist.data import pipeline
from keras_dist.data.shares import Shares
from keras_dist.errors import ConfigurationError, MismatchError
from keras_dist.logging import logger
from keras_dist.state import checkpoint, snapshot
from keras_dist.state.commits import Position
from keras_dist.training.call import Call, build, build_optimizers
from keras_dist.training.interrupts import interrupts_of
from keras_dist.training.options import Tuning
from keras_dist.training.synchronizer import CallbackStates, as_list

Optimizers = Callable[[], Sequence[Any]]  # returns those of the model
Distribute = Callable[[tf.data.Dataset], tf.data.Dataset]
_LARGEST_OF_SOURCE = 2**24  # larger arrays of a `PyDataset` are its data, not its state
STATE = "state"  # the array with everything but the variables
_complete: set[Path] = set()  # the folders of the calls of `fit` that have ended in this process


class Due:
    """Decides when to commit: after the same batch on all ranks.

    The chief's clock decides. The ranks don't ask it after each batch, but when it expects that it is time.
    """

    def __init__(self, settings: Commit, backend: Backend) -> None:
        self._seconds, self._batches = settings.seconds, settings.batches
        self._backend = backend
        self._asks_at = 0
        self.done(0)

    def done(self, step: int) -> None:
        self.step, self._time = step, time.monotonic()

    def now(self, step: int) -> bool:
        if self._batches is not None:
            return step // self._batches > self.step // self._batches
        if self._seconds is None or step < self._asks_at:
            return False
        passed = time.monotonic() - self._time
        left = self._seconds - passed
        # As fast as until now, and after at most as many steps again: the first steps are slow.
        done = step - self.step
        further = min(int(left / passed * done), done) if left > 0 else 0
        is_due, self._asks_at = self._backend.all_gather_object(
            "kd.callbacks.Commit (when)", (left <= 0, step + max(1, further))
        )[0]
        return bool(is_due)


class TrainingData:
    """The training data of one call of `fit`: their order, and the place in them."""

    reading: keras_fit.Reading  # since `watch`, which is called before the training begins

    def __init__(self, backend: Backend, order_seed: int) -> None:
        self._backend = backend
        self._order_seed = order_seed  # of shuffles to which the script gives no seed; the same in the run before
        self._source: dict[str, Any] = {}  # what a `PyDataset` had when `fit` began
        self._at_beginning: dict[str, Any] = {}  # Python's state when the current iteration over the data began
        self._distribute: Distribute | None = None
        self.dataset: Any = None
        self.seeds: Any = None  # which decide the order; `None` if another run has another order

    def ordered(self, source: Any) -> Any:
        """Returns the script's data with an order that can be made again. Called before Keras gets them."""
        if not isinstance(source, tf.data.Dataset) or isinstance(source.element_spec, Shares):
            return source
        seeded = pipeline.with_seed(source, self._order_seed, self._backend.drawn_seed)
        if seeded is not source:
            logger().debug("the shuffles of the training data got the seed %d", self._order_seed)
        return seeded

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset, distribute: Distribute | None) -> None:
        """Called with Keras's iterator before it is used. See `FitExtensions.watch`."""
        self.dataset, self._distribute = dataset, distribute
        self.seeds = pipeline.seeds_of_order(dataset, self._backend.drawn_seed)
        if self.seeds is None and self._backend.topology.is_chief:
            logger().warning(
                "the training data have another order in each run, as the script sets no seed. So a run that resumes "
                "begins at an epoch, and kd.callbacks.Commit commits only there. To resume at the next batch, call "
                "keras.utils.set_random_seed(1) at the top of the script."
            )
        self.reading = keras_fit.Reading(epoch_iterator, functools.partial(self.begin, False))
        self._source = self._attributes()

    def begin(self, is_epoch: bool) -> None:
        """Called when an epoch begins, and when an iteration over the data begins, which may last for several."""
        if is_epoch != self.reading.spans_epochs:
            self._at_beginning = self._python_state()

    def place(self) -> dict[str, Any]:
        return {
            "iterations": self.reading.iterations,
            "batches": self.reading.batches,
            "num_batches": self.reading.num_batches,
            "seeds": self.seeds,
            "order_seed": self._order_seed,
            "python": self._python_state(),
            "at_beginning": self._at_beginning,
            "draws_nothing": self._draws_nothing(),
        }

    def restore(self, place: dict[str, Any], batch: int, steps_per_execution: int) -> None:
        """Continues at a place, after this many batches of the epoch. Called when the epoch begins."""
        # Python code that makes the data draws again what it has drawn since its iteration began.
        begins_again = batch > 0 or place["batches"] > 0
        is_by_python = begins_again and tf_data.is_made_by_python(self.dataset)
        python = place["at_beginning"] if is_by_python else place["python"]
        self._at_beginning = place["at_beginning"] if begins_again else python
        snapshot.set_states(python["random"])
        if self.reading.source is not None:
            snapshot.restore(self.reading.source, python["source"])
        if place["iterations"] == 0:
            return
        if place["seeds"] != self.seeds:
            raise MismatchError(
                "The training data come in another order than in the run that resumes here.",
                f"seeds of shuffles and random maps: {self.seeds}; in the commit: {place['seeds']}",
                "Call keras.utils.set_random_seed with the same seed as before at the top of the script, or pass "
                "another directory to kd.callbacks.Commit to begin again.",
            )
        if batch % steps_per_execution:
            raise ConfigurationError(
                "Training can't resume inside of an execution.",
                f"a commit after {batch} batches of the epoch, steps_per_execution={steps_per_execution}",
                "Compile the model with the same steps_per_execution as before, or with 1.",
            )
        reading, iterations, batches = self.reading, place["iterations"], place["batches"]
        reading.num_batches = place["num_batches"]
        if batch == 0 and not reading.spans_epochs:  # the epoch begins an iteration
            pipeline.advance(self.dataset, iterations)
            reading.iterations = iterations
            return
        pipeline.advance(self.dataset, iterations - 1)
        if self._distribute is not None and not tf_data.is_made_by_python(self.dataset):
            rest = iter(self._distribute(pipeline.after(self.dataset, batches)))
        else:
            # Python code that makes the data must draw its numbers again, even if no data are left.
            if place["draws_nothing"]:
                reading.skip(batches)
            rest = iter(reading.dataset)
            for _ in range(batches):
                next(rest)
        reading.begin_at(rest, iterations, batches, batch)

    def _attributes(self) -> dict[str, Any]:
        source = self.reading.source
        return {} if source is None else snapshot.attributes_of(source, _LARGEST_OF_SOURCE)

    def _python_state(self) -> dict[str, Any]:
        return {"random": snapshot.states(), "source": snapshot.changed(self._source, self._attributes())}

    def _draws_nothing(self) -> bool:
        """True if a `PyDataset` makes a batch by its index only: nothing has changed since the iteration began."""
        if self.reading.source is None or not self._at_beginning:
            return False
        before, now = self._at_beginning, self._python_state()
        python = self.reading.after_shuffle(before["random"]["python"])
        expected = {**before, "random": {**before["random"], "python": python}}
        return snapshot.are_equal(expected, now)


class CommittedRun(keras.callbacks.Callback):
    """One call of `fit`, as the last callback in its list."""

    def __init__(
        self, model: keras.Model, backend: Backend, optimizers: Optimizers, settings: Commit, callbacks: Sequence[Any]
    ) -> None:
        super().__init__()
        self.directory = settings.commits.directory
        self._settings = settings
        self.interrupts = interrupts_of(backend)
        self._callbacks = [inner_of(callback) for callback in callbacks if not isinstance(callback, Commit)]
        self._model = model  # Keras sets `model` later
        self._backend = backend
        self._optimizers = optimizers
        self._commits = settings.commits
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None  # the last commit
        state: Any = None
        self._found: dict[str, np.ndarray] = {}  # the arrays of the newest commit, on the chief, until they are loaded
        if backend.topology.is_chief:
            if (commit := self._commits.newest()) is not None:
                self._found = {**commit.arrays}
                state = processes.decode(self._found.pop(STATE).tobytes())
                # What callbacks have written after it.
                checkpoint.cut(self._callbacks, state["files"], state["time"], self.directory)
            checkpoint.note_writer(self.directory)
        # The state of the commit from which this run resumes, until it is restored. All ranks do what the chief does.
        own = state, secrets.randbits(31)
        self._state, seed = backend.all_gather_object("kd.callbacks.Commit (start)", own)[0]
        self.data = TrainingData(backend, seed if self._state is None else self._state["data"]["order_seed"])
        self._variables: dict[str, np.ndarray] = {}  # until the callbacks have begun the epoch
        self._states = CallbackStates(self._callbacks)
        self._due = Due(settings, backend)
        self._watched: MutableSet[Any] = weakref.WeakSet()
        self._validation: keras_fit.Reading | None = None
        self._validated = 0  # iterations over the validation data before this run
        self.step, self.epoch, self.batch = 0, 0, 0

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset, distribute: Distribute | None) -> None:
        """Called with the iterator over the training data, later with others; among these is that of validation."""
        if epoch_iterator in self._watched:
            return
        self._watched.add(epoch_iterator)
        if self.data.dataset is None:
            self.data.watch(epoch_iterator, dataset, distribute)
            return

        def begins() -> None:
            if self._validation is None and epoch_iterator is getattr(self._model, keras_fit.EVALUATE_ITERATOR, None):
                pipeline.advance(dataset, self._validated)
                self._validation, reading.iterations = reading, self._validated

        reading = keras_fit.Reading(epoch_iterator, begins)

    # --- Resuming ---

    def load(self) -> None:
        """Loads the newest commit. On all ranks, before any other callback begins."""
        arrays, self._found = self._found, {}
        # All do what the chief does: ranks that read data of their own may have other seeds.
        self.data.seeds = self._backend.all_gather_object("kd.callbacks.Commit (order)", self.data.seeds)[0]
        # Keras builds a plain model in its first step only.
        spec = self.data.dataset.element_spec
        build(self._model, self._model.train_step, spec, None)
        build_optimizers(self._model, self._optimizers(), spec)
        if self._state is None:
            return
        if arrays:
            snapshot.put(arrays, self._model, self._optimizers())
        self.step, self.epoch, self.batch = self._state["place"]
        self._due.done(self.step)
        attach(self._model, keras_fit.INITIAL_EPOCH, self._epochs() if self._state["stopped"] else self.epoch)
        for callback in self._callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                keras_fit.begin_without_loading(callback)
        if self._backend.topology.is_chief:
            logger().warning(
                "resumes after step %d (epoch %d, batch %d), from a commit in %s",
                self.step, self.epoch + 1, self.batch, self._settings.directory,
            )  # fmt: skip

    def _epochs(self) -> int:
        return int(self._settings.params["epochs"])

    def on_train_begin(self, logs: Any = None) -> None:
        self._states.begin()
        if self._state is not None:
            self._states.restore(self._state["callbacks"])
        else:  # with what the files of callbacks had before, so that those of this run can be cut
            self.commit(0, 0, {})

    def begin_epoch(self, epoch: int) -> None:
        """Called when an epoch begins, and Keras has reset the metrics, before the other callbacks."""
        self.epoch = epoch
        if self._state is None:
            self.data.begin(is_epoch=True)
        elif self.batch == 0:
            self._restore()
        else:
            self._variables = snapshot.take(self._model, self._optimizers())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # After the other callbacks: what they do when an epoch begins, they did before it was interrupted.
        if self._state is not None and self.batch > 0:
            variables, self._variables = self._variables, {}
            snapshot.put(variables, self._model, self._optimizers())
            self._states.restore(self._state["callbacks"])
            self._restore()
        self._state = None

    def _restore(self) -> None:
        state = self._state
        snapshot.restore(self._model.history, state["history"])
        is_within_epoch, topology = self.batch > 0, self._backend.topology
        snapshot.put_own(state["ranks"], self._model, self._optimizers(), topology, is_within_epoch)
        self._validated = state["validations"]
        self.data.restore(state["data"], self.batch, self._model.steps_per_execution)
        keras_fit.set_last_logs(self._model, state["logs"])

    # --- Committing ---

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = batch + 1 - self.batch
        self.step, self.batch = self.step + done, batch + 1
        self.data.reading.batches += done
        if self.data.seeds is not None and self._due.now(self.step):
            self.commit(self.epoch, self.batch, logs)
        self._exit_if_terminated(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        is_last = self.epoch >= self._epochs() or self._model.stop_training
        if is_last or self.data.seeds is None or self._settings.at_epochs or self._due.now(self.step):
            self.commit(self.epoch, 0, logs)
        self._exit_if_terminated(logs)

    def commit(self, epoch: int, batch: int, logs: Any) -> None:
        """Takes a snapshot of the state, which a thread writes. On all ranks, after the same step."""
        self.data.reading.wait()  # until what was read has been learned: by asynchronous parameter servers, too
        optimizers = self._optimizers()
        own = snapshot.take_own(self._model, optimizers)
        ranks = self._backend.all_gather_object("kd.callbacks.Commit", own)
        self._due.done(self.step)
        if not self._backend.topology.is_chief:
            return
        history = snapshot.attributes_of(self._model.history)
        history.pop("params", None)
        if logs and not batch:  # an epoch has ended: a `History` gets its logs last
            history["epoch"] = [*history["epoch"], epoch - 1]
            history["history"] = {name: [*history["history"].get(name, []), log] for name, log in logs.items()}
        state = {
            "place": (self.step, epoch, batch),
            "stopped": bool(self._model.stop_training),
            "ranks": ranks,
            "data": self.data.place(),
            "validations": self._validated if self._validation is None else self._validation.iterations,
            "callbacks": self._states.take(),
            "files": checkpoint.sizes(self._callbacks),
            "time": time.time(),
            "history": history,
            "logs": {name: np.asarray(log) for name, log in (logs or {}).items()} if batch else {},
        }
        self._finish_writing()
        place, arrays = Position(self.step, epoch, batch), snapshot.take(self._model, optimizers)
        self._writing = self._writer.submit(self._write, place, arrays, state)

    def _write(self, place: Position, arrays: dict[str, np.ndarray], state: Any) -> None:
        """Writes a commit, in a thread. Nobody may change `state` meanwhile."""
        encoded = np.frombuffer(processes.encode(state), np.uint8)
        self._commits.write(place, {**arrays, STATE: encoded})
        environment.note_commit(place.step)

    def _finish_writing(self) -> None:
        """Waits until the last commit is written, and raises its error."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _exit_if_terminated(self, logs: Any) -> None:
        """Commits and ends all ranks, if one of them has received SIGTERM."""
        if not self.interrupts.is_terminated():
            return
        if self._due.step != self.step and (self.data.seeds is not None or self.batch == 0):
            self.commit(self.epoch, self.batch, logs)
        self._finish_writing()
        self._backend.all_gather_object("kd.callbacks.Commit (end)")
        if self._backend.topology.is_chief:
            logger().warning(
                "stopped by SIGTERM after step %d. The same command resumes from the commit in %s of step %d.",
                self.step, self._settings.directory, self._due.step,
            )  # fmt: skip
        raise SystemExit(environment.COMMITTED_EXIT_CODE)

    def on_train_end(self, logs: Any = None) -> None:
        if self._state is not None:
            snapshot.restore(self._model.history, self._state["history"])
        self._finish_writing()
        _complete.add(self.directory)

    def close(self) -> None:
        """Called at the end of `fit`, also after an error."""
        attach(self._model, keras_fit.INITIAL_EPOCH, None)
        self._writer.shutdown()
        self._commits.close()


class FitExtensions:
    """What is around each call of `fit` of one model: a `Commit` in its callbacks, and the tuning of steps."""

    def __init__(self, model: keras.Model, backend: Backend, optimizers: Optimizers, tuning: Tuning | None) -> None:
        self._new_run = functools.partial(CommittedRun, model, backend, optimizers)
        self._run: CommittedRun | None = None  # if there is a `Commit`
        self._of_fit = contextlib.ExitStack()
        self._tuning = tuning

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        with contextlib.ExitStack() as self._of_fit:
            if self._tuning is not None:
                self._of_fit.enter_context(self._tuning.fit())
            yield

    def arrange(self, call: Call, arranged: Any) -> Any:
        """Returns the callbacks of a call of `fit`, with those that are needed here, and gives them to it.

        `arranged` are the script's callbacks and those that synchronize the ranks. The training data get an order that
        can be made again.
        """
        callbacks = as_list(given := call.get("callbacks"))
        found = next((callback for callback in callbacks if isinstance(callback, Commit)), None)
        if found is not None:
            if found.commits.directory in _complete:
                raise ConfigurationError(
                    "A call of `fit` with these commits has ended in this process, so another one would find nothing "
                    "to do.",
                    f"directory={found.directory!r}",
                    "Give each call of `fit` a directory of its own, such as Commit('commits/warmup') and "
                    "Commit('commits/finetune'). To train from the start, delete the folder and start again.",
                )
            run = self._new_run(found, callbacks)
            self._of_fit.callback(run.close)
            self._of_fit.enter_context(attached(self, "_run", run))
            self._of_fit.enter_context(attached(found, "is_arranged", True))
            self._of_fit.enter_context(run.interrupts.terminable())
            before = keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: run.load(), on_epoch_begin=lambda epoch, logs: run.begin_epoch(epoch)
            )
            arranged = [before, *as_list(arranged), run]
            call.change("x", run.data.ordered)
        if self._tuning is not None:
            arranged = self._tuning.arrange(given, arranged)
        if arranged is not given:
            call.set("callbacks", arranged)
        return arranged

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset, distribute: Distribute | None) -> None:
        """Called with each iterator over data of the model, before it is used. The training data come first.

        `dataset` is what Keras has made of the script's data, before it was distributed. `distribute` distributes
        another dataset as this one was; `None` if that can't be done.
        """
        if self._run is not None:
            self._run.watch(epoch_iterator, dataset, distribute)
        if self._tuning is not None:
            self._tuning.watch(epoch_iterator)
