"""What the logs of a step are: results of metrics, numbers computed from such results, or other numbers.

In a step a metric has counted the shares of one replica, so its result there is not that of all. Logs that depend on
results only are computed again from the metrics of all replicas. All other logs are averages over the replicas, by the
number of examples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.compat import keras_model, tf_graphs
from keras_dist.logging import logger


class Logs:
    """Traces from which metrics the logs of a model's steps come. The chief reports logs that come from no metric."""

    def __init__(self, model: keras.Model, is_chief: bool) -> None:
        self._model = model
        self._is_chief = is_chief
        # How to compute logs again, of each kind of step; `None` of logs that Keras itself takes from the metrics.
        self._known: dict[str, dict[str, Callable[[], Any] | None]] = {"train": {}, "test": {}}
        self._results: list[tuple[Any, Callable[[], Any]]] = []  # tensors, and how to compute them again
        self._reported: set[str] = set()
        self._is_frozen = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the results of the model's metrics. A step is run in this context."""
        self._results = []
        with contextlib.ExitStack() as stack:
            for metric in keras_model.flat_metrics(self._model):
                stack.enter_context(keras_model.attached(metric, "result", self._recorded(metric.result)))
            yield
        self._results = []

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """In this context what the logs are stays as it was noted."""
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False

    def _recorded(self, plain: Callable[[], Any]) -> Callable[[], Any]:
        def part_of(key: str | None) -> Any:
            value = plain()
            return value if key is None else value[key]

        def result() -> Any:
            value = plain()
            parts = value if isinstance(value, dict) else {None: value}
            self._results += [(part, functools.partial(part_of, key)) for key, part in parts.items()]
            return value

        return result

    def note(self, kind: str, logs: Any) -> Any:
        """Notes what the logs of a `"train"` or `"test"` step are, while it is recorded. Returns one flat dict."""
        if not isinstance(logs, dict):
            return logs
        if self._is_frozen:
            return {name: _tensor(value) for name, value in flat(logs).items()}
        are_metrics = keras_model.logs_are_metrics(self._model, logs)
        logs = flat(logs)
        if are_metrics:  # then Keras shows the metrics, whatever the logs are
            self._known[kind] = dict.fromkeys(logs)
            return logs
        sources = {name: self._source(value) for name, value in logs.items()}
        self._known[kind] = {name: source for name, source in sources.items() if source is not None}
        unknown = [name for name, value in logs.items() if sources[name] is None and tf.is_tensor(value)]
        new = [name for name in unknown if name not in self._reported]
        self._reported.update(new)
        if new and self._is_chief:
            logger().warning(
                "%s of %s_step %s not computed from results of metrics alone: averaged over the shares of the last "
                "batch, by the number of examples.",
                ", ".join(f"logs[{name!r}]" for name in new), kind, "is" if len(new) == 1 else "are",
            )  # fmt: skip
        return {name: _tensor(value) for name, value in logs.items()}

    def _source(self, value: Any) -> Callable[[], Any] | None:
        if isinstance(value, keras.Variable):  # such as a learning rate
            return lambda: _tensor(value)
        for result, source in self._results:
            if value is result:
                return source
        results = [(result, source) for result, source in self._results if tf.is_tensor(result)]
        found = tf_graphs.function_of(value, [result for result, _ in results])
        if found is None:
            return None
        function, indices = found
        return lambda: function(*[results[index][1]() for index in indices])

    def is_known(self, kind: str, name: str) -> bool:
        """True if a log depends on results of metrics only."""
        return name in self._known[kind]

    def results(self, kind: str) -> dict[str, Any]:
        """Returns the logs that depend on results of metrics only, computed from what the metrics have counted now."""
        known = self._known[kind]
        by_name = self._model.get_metrics_result() if None in known.values() else {}
        return {name: by_name[name] if source is None else source() for name, source in known.items()}

    def exact(self, kind: str, logs: Any) -> Any:
        """Returns logs of a step with the current results of the metrics."""
        if not isinstance(logs, dict):
            return logs
        logs = flat(logs)
        return {**logs, **{name: value for name, value in self.results(kind).items() if name in logs}}


def flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs without nested dicts, as Keras passes them to callbacks."""
    result: dict[str, Any] = {}
    for key, value in sorted(logs.items()):
        result.update(flat(value) if isinstance(value, dict) else {key: value})
    return result


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value.value) if isinstance(value, keras.Variable) else value


def as_number(log: Any) -> Any:
    """Returns a log as a float, or as an array for a metric of several numbers."""
    array = np.asarray(log)
    return array if array.ndim else float(array)
