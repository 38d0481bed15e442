"""The training data of a `fit` with a `kd.callbacks.Commit`: their order, and the place in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, tf_data
from keras_dist.data import pipeline
from keras_dist.data.shares import Share, Shares
from keras_dist.errors import ConfigurationError, MismatchError
from keras_dist.logging import logger
from keras_dist.state import snapshot

Distribute = Callable[[tf.data.Dataset], tf.data.Dataset]
_LARGEST_OF_SOURCE = 2**24  # larger arrays of a `PyDataset` are its data, not its state


class TrainingData:

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
        if not isinstance(source, tf.data.Dataset) or isinstance(source.element_spec, Share | Shares):
            return source
        seeded = pipeline.with_seed(source, self._order_seed, self._backend.drawn_seed)
        if seeded is not source:
            logger().debug("the shuffles of the training data got the seed %d", self._order_seed)
        return seeded

    def watch(self, epoch_iterator: Any, dataset: tf.data.Dataset, distribute: Distribute | None) -> None:
        """Called with Keras's iterator before it is used. See `Fitting.watch`."""
        self.dataset, self._distribute = dataset, distribute
        self.seeds = pipeline.seeds_of_order(dataset, self._backend.drawn_seed)
        if self.seeds is None and self._backend.topology.is_chief:
            logger().warning(
                "the training data have another order in each run, as the script sets no seed. So a run that goes on "
                "begins at an epoch, and kd.callbacks.Commit commits only there. To go on at the next batch, call "
                "keras.utils.set_random_seed(1) at the top of the script."
            )
        self.reading = keras_fit.Reading(epoch_iterator, self._begin_iteration)
        self._source = self._attributes()

    def begin_epoch(self) -> None:
        if not self.reading.spans_epochs:
            self._at_beginning = self._python_state()

    def _begin_iteration(self) -> None:
        if self.reading.spans_epochs:
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
        """Continues at a place, after so many batches of the epoch. Called when the epoch begins."""
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
                "The training data come in another order than in the run that goes on here.",
                f"seeds of shuffles and random maps: {self.seeds}; in the commit: {place['seeds']}",
                "Call keras.utils.set_random_seed with the same seed as before at the top of the script, or pass "
                "another directory to kd.callbacks.Commit to begin anew.",
            )
        if batch % steps_per_execution:
            raise ConfigurationError(
                "Training can't go on inside of an execution.",
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
            # Python code that makes the data has to draw its numbers again, also if nothing of them is left.
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
