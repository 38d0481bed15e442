"""One call of `fit` with a `kd.callbacks.Commit`: what it commits when, and where it goes on."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, MutableSet, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import environment
from keras_dist.callbacks.chief_only import inner_of
from keras_dist.callbacks.commit import Commit
from keras_dist.comm import objects
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_backups, keras_fit, tf_compat
from keras_dist.compat.keras_model import attach
from keras_dist.data import position
from keras_dist.errors import ConfigurationError, MismatchError
from keras_dist.logging import logger
from keras_dist.state import attributes, outputs, snapshot
from keras_dist.state import random as random_state
from keras_dist.state.commits import Place
from keras_dist.training import building
from keras_dist.training.callback_states import CallbackStates, history_with
from keras_dist.training.committing import Due, Writer
from keras_dist.training.interrupts import interrupts_of

_STATE = "state"  # the array with everything but the variables


class CommittedRun:
    """One call of `fit`.

    Args:
        model: The model.
        backend: The backend.
        optimizers: Returns the model's optimizers.
        is_plain: Whether Keras iterates over the script's dataset itself.
        settings: The script's `Commit`.
        callbacks: All callbacks of the script.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        optimizers: Callable[[], Sequence[Any]],
        is_plain: bool,
        settings: Commit,
        callbacks: Sequence[Any],
    ) -> None:
        self.directory = settings.commits.directory
        self._settings = settings
        self._interrupts = interrupts_of(backend)
        self._callbacks = [inner_of(callback) for callback in callbacks if not isinstance(callback, Commit)]
        self._model = model
        self._backend = backend
        self._optimizers = optimizers
        self._is_plain = is_plain
        self._commits = settings.commits
        self._writer = Writer(self._commits)
        self._found = self._newest()
        self._state: dict[str, Any] | None = None  # of the commit that this run goes on from, until it is restored
        self._variables: dict[str, np.ndarray] = {}  # until the callbacks have begun the epoch
        self._states = CallbackStates(self._callbacks)
        self._at_beginning: dict[str, Any] = {}  # Python's state when the current iteration over the data began
        self._seeds: Any = None
        self._due = Due(settings, backend)
        self.reading: keras_fit.Reading | None = None
        self._watched: MutableSet[Any] = weakref.WeakSet()
        self._validation: keras_fit.Reading | None = None
        self._validated = 0  # iterations over the validation data before this run
        self.step, self.epoch, self.batch = 0, 0, 0

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset) -> None:
        """Called with the iterator over the training data, later with others; among these is that of validation."""
        if epoch_iterator in self._watched:
            return
        self._watched.add(epoch_iterator)
        if self.reading is None:
            self._read(epoch_iterator, dataset)
            return

        def begins() -> None:
            if self._validation is None and epoch_iterator is getattr(self._model, keras_fit.EVALUATE_ITERATOR, None):
                position.advance(dataset, self._validated)
                self._validation, reading.iterations = reading, self._validated

        reading = keras_fit.Reading(epoch_iterator, begins)

    def _read(self, epoch_iterator: Any, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._seeds = self._seeds_of_order()
        self.reading = keras_fit.Reading(epoch_iterator, self._begin_iteration)
        source = self.reading.source
        self._source = {} if source is None else attributes.attributes_of(source)

    def _seeds_of_order(self) -> Any:
        """Returns the seeds that decide the order of the data, `None` if another run has another order."""
        seeds = position.seeds_of_order(self._dataset)
        if seeds and any(seed == self._backend.drawn_seed for seed, _ in seeds):
            seeds = None
        if seeds is None and self._backend.topology.is_chief:
            logger().warning(
                "the training data have another order in each run, as the script sets no seed. So a run that goes on "
                "begins at an epoch, and kd.callbacks.Commit commits only there. To go on at the next batch, call "
                "keras.utils.set_random_seed(1) at the top of the script."
            )
        return seeds

    # --- Going on ---

    def _newest(self) -> dict[str, np.ndarray]:
        """Returns the arrays of the newest commit on the chief, and cuts what callbacks have written after it."""
        if not self._backend.topology.is_chief or (commit := self._commits.newest()) is None:
            return {}
        state = _decoded(commit.arrays)
        outputs.cut(self._callbacks, state["files"], state["time"], state["writer"])
        return {**commit.arrays}

    def load(self) -> None:
        """Loads the newest commit. On all ranks, before any other callback begins."""
        arrays, self._found = self._found, {}
        # Ranks that read data of their own may have other seeds. All do what the chief does.
        own = _decoded(arrays), self._seeds
        self._state, self._seeds = self._backend.all_gather_object("kd.callbacks.Commit (start)", own)[0]
        # Keras builds a plain model in its first step only.
        spec = self._dataset.element_spec
        building.build(self._model, self._backend.num_replicas, self._model.train_step, spec, None)
        building.build_optimizers(self._model, self._backend.num_replicas, self._optimizers(), spec)
        if self._state is None:
            return
        if arrays:
            arrays.pop(_STATE)
            snapshot.put(arrays, self._model, self._optimizers())
        place = self._state["place"]
        self.step, self.epoch, self.batch = place
        self._due.done(self.step)
        is_over = self._state["stopped"]
        attach(self._model, keras_fit.INITIAL_EPOCH, self._epochs() if is_over else self.epoch)
        for callback in self._callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                keras_backups.begin_without_loading(callback)
        if self._backend.topology.is_chief:
            logger().warning(
                "goes on after step %d (epoch %d, batch %d), from a commit in %s",
                self.step, self.epoch + 1, self.batch, self._settings.directory,
            )  # fmt: skip

    def _epochs(self) -> int:
        return int(self._settings.params["epochs"])

    def begin(self) -> None:
        """Called when all callbacks have begun."""
        self._states.begin()
        if self._state is not None:
            self._states.restore(self._state["callbacks"])
        else:  # with what the files of callbacks had before, so that those of this run can be cut
            self.commit(0, 0, {})

    def begin_epoch(self, epoch: int) -> None:
        """Called when an epoch begins, and Keras has reset the metrics, before the other callbacks."""
        self.epoch = epoch
        if self._state is not None:
            if self.batch == 0:
                self._restore(self._state)
            else:
                self._variables = snapshot.take(self._model, self._optimizers())
        elif self.reading is not None and not self.reading.spans_epochs:
            self._at_beginning = self._python_state()

    def epoch_has_begun(self) -> None:
        """Called after the other callbacks. What they do when an epoch begins, they did before it was interrupted."""
        if self._state is not None and self.batch > 0:
            variables, self._variables = self._variables, {}
            snapshot.put(variables, self._model, self._optimizers())
            self._states.restore(self._state["callbacks"])
            self._restore(self._state)
        self._state = None

    def _begin_iteration(self) -> None:
        if self.reading is not None and self.reading.spans_epochs:
            self._at_beginning = self._python_state()

    def _python_state(self) -> dict[str, Any]:
        source = None if self.reading is None else self.reading.source
        return {
            "random": random_state.states(),
            "source": None if source is None else attributes.changed(self._source, attributes.attributes_of(source)),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.restore_history(state)
        own_state = snapshot.OwnState(self._model, self._optimizers(), self._backend)
        own_state.put(state["ranks"], is_within_epoch=self.batch > 0)
        # Python code that makes the data draws again what it has drawn since its iteration began.
        begins_again = self.batch > 0 or state["batches"] > 0
        is_by_python = begins_again and tf_compat.is_made_by_python(self._dataset)
        python = state["at_beginning"] if is_by_python else state["python"]
        self._at_beginning = state["at_beginning"] if begins_again else python
        self._validated = state["validations"]
        random_state.set_states(python["random"])
        if python["source"] is not None and self.reading is not None:
            attributes.restore(self.reading.source, python["source"])
        self._restore_reading(state)
        keras_fit.set_last_logs(self._model, state["logs"])

    def restore_history(self, state: dict[str, Any] | None = None) -> None:
        state = state or self._state
        if state is not None:
            attributes.restore(self._model.history, state["history"])

    def _restore_reading(self, state: dict[str, Any]) -> None:
        reading, iterations, batches = self.reading, state["iterations"], state["batches"]
        if reading is None or iterations == 0:
            return
        if state["seeds"] != self._seeds:
            raise MismatchError(
                "The training data come in another order than in the run that goes on here.",
                f"seeds of shuffles and random maps: {self._seeds}; in the commit: {state['seeds']}",
                "Call keras.utils.set_random_seed with the same seed as before at the top of the script, or pass "
                "another directory to kd.callbacks.Commit to begin anew.",
            )
        if self.batch % (executed := self._model.steps_per_execution):
            raise ConfigurationError(
                "Training can't go on inside of an execution.",
                f"a commit after {self.batch} batches of the epoch, steps_per_execution={executed}",
                "Compile the model with the same steps_per_execution as before, or with 1.",
            )
        reading.num_batches = state["num_batches"]
        if self.batch == 0 and not reading.spans_epochs:  # the epoch begins an iteration
            position.advance(self._dataset, iterations)
            reading.iterations = iterations
            return
        position.advance(self._dataset, iterations - 1)
        # Python code that makes the data has to draw its numbers again, also if nothing of them is left.
        if self._is_plain and not tf_compat.is_made_by_python(self._dataset):
            rest = iter(position.after(self._dataset, batches))
        else:
            rest = iter(reading.dataset)
            for _ in range(batches):
                next(rest)
        reading.begin_at(rest, iterations, batches, self.batch)

    # --- Committing ---

    def end_batches(self, batch: int, logs: Any) -> None:
        """Counts batches, and commits if it is time."""
        done = batch + 1 - self.batch
        self.step, self.batch = self.step + done, batch + 1
        if self.reading is not None:
            self.reading.batches += done
        if self._seeds is not None and self._due.now(self.step):
            self.commit(self.epoch, self.batch, logs)

    def end_epoch(self, logs: Any) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        is_last = self.epoch >= self._epochs() or self._model.stop_training
        if is_last or self._seeds is None or self._settings.at_epochs or self._due.now(self.step):
            self.commit(self.epoch, 0, logs)

    def commit(self, epoch: int, batch: int, logs: Any) -> None:
        """Takes a copy of the state, which a thread writes. On all ranks, after the same step."""
        optimizers = self._optimizers()
        own = snapshot.OwnState(self._model, optimizers, self._backend).take()
        ranks = self._backend.all_gather_object("kd.callbacks.Commit", own)
        self._due.done(self.step)
        if not self._backend.topology.is_chief:
            return
        reading = self.reading
        state = {
            "place": (self.step, epoch, batch),
            "stopped": bool(self._model.stop_training),
            "ranks": ranks,
            "python": self._python_state(),
            "at_beginning": self._at_beginning,
            "iterations": 0 if reading is None else reading.iterations,
            "batches": 0 if reading is None else reading.batches,
            "num_batches": None if reading is None else reading.num_batches,
            "validations": self._validated if self._validation is None else self._validation.iterations,
            "seeds": self._seeds,
            "callbacks": self._states.take(),
            "files": outputs.sizes(self._callbacks),
            "time": time.time(),
            "writer": outputs.writer(),
            "history": history_with(self._model.history, epoch - 1, {} if batch else logs),
            "logs": {name: np.asarray(log) for name, log in (logs or {}).items()} if batch else {},
        }
        arrays = snapshot.take(self._model, optimizers)
        arrays[_STATE] = np.frombuffer(objects.encode(state), np.uint8)
        self._writer.write(Place(self.step, epoch, batch), arrays)

    def exit_if_terminated(self, logs: Any = None) -> None:
        """Commits and ends all ranks, if one of them has received SIGTERM. Called after each batch and epoch."""
        if not self._interrupts.is_terminated():
            return
        if self._due.step != self.step and (self._seeds is not None or self.batch == 0):
            self.commit(self.epoch, self.batch, logs)
        self._writer.finish()
        self._backend.all_gather_object("kd.callbacks.Commit (end)")
        if self._backend.topology.is_chief:
            logger().warning(
                "stopped by SIGTERM after step %d. The same command goes on from the commit in %s of step %d.",
                self.step, self._settings.directory, self._due.step,
            )  # fmt: skip
        raise SystemExit(environment.COMMITTED_EXIT_CODE)

    def end(self) -> None:
        self.restore_history()
        self._writer.finish()

    def close(self) -> None:
        """Called at the end of `fit`, also after an error."""
        attach(self._model, keras_fit.INITIAL_EPOCH, None)
        self._writer.close()
        self._commits.close()


def _decoded(arrays: Mapping[str, np.ndarray]) -> Any:
    return objects.decode(arrays[_STATE].tobytes()) if arrays else None
