"""The functions that workers run for a model, and what the coordinator does with what they return."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.backends.parameter_server.capture import Capture, Part, Recorder, current, recording
from keras_dist.compat import keras_losses, keras_model, keras_placement, keras_random
from keras_dist.compat.keras_model import attach
from keras_dist.errors import NotSupportedError
from keras_dist.state import metrics
from keras_dist.step import losses
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import build_optimizer, optimizers_of, parts_of
from keras_dist.step.step import Step

_ATTACHED = "_keras_dist_recorded"
Outputs = dict[str, Any]


@dataclasses.dataclass
class _Denominators:
    """Stands for the backend in the loss rule: shares can't talk to each other, so the coordinator adds up for them.

    Args:
        sums: What the shares' denominators add up to, one after another; empty if that is to be found out.
    """

    sums: Sequence[Any]
    own: list[Any] = dataclasses.field(default_factory=list)

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        self.own.append(numbers)
        return self.sums[len(self.own) - 1] if self.sums else numbers


class Functions:
    """What is traced for one model, until something of it changes.

    Args:
        model: Built, with its optimizers built.
        plain_apply: The optimizers' own `apply`, by id.
    """

    def __init__(self, model: keras.Model, plain_apply: dict[int, Callable[..., Any]]) -> None:
        self._model = model
        self._plain_apply = plain_apply
        self.metrics = list(model.metrics_variables)
        self.seeds = [generator.state for generator in keras_random.seed_generators(model)]
        self._resets = _reset_values(model)
        self._check_metrics()
        self._parts: list[Part] = []
        self._statistics: list[Any] = []
        eager = bool(model.run_eagerly)
        self.share = _function(self._share, eager)
        self.whole = _function(self._whole, eager)
        self.test = _function(self._test, eager)
        self.test_share = _function(self._test_share, eager)
        self.predict = _function(self._predict, eager)
        self.apply = _function(self._apply, eager)
        self.count = _function(self._count, eager)

    def _check_metrics(self) -> None:
        for variable in self.metrics:
            if variable.aggregation != "sum":
                metrics.combine_states([np.zeros([])], np.zeros([]), "none", variable.path)  # raises

    # --- On a worker ---

    def _given(self, seeds: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [*zip(self.metrics, self._resets, strict=True), *zip(self.seeds, seeds, strict=True)]

    def _share(
        self,
        data: Any,
        count: Any,
        total: Any,
        seeds: Sequence[Any],
        sums: Sequence[Any],
        before: Sequence[Sequence[Any]],
    ) -> Outputs:
        """A training step on a share of a batch, without its effect: as far as the first thing that has to be applied.

        Args:
            data: The share.
            count: Number of examples in it.
            total: Number of examples in the batch.
            seeds: Of the random streams.
            sums: See `_Denominators`.
            before: What `kept` has returned for each part of this step that was applied already.
        """
        model, place = self._model, len(before)
        recorder, denominators = Recorder(model.trainable_variables, self._parts[:place], before), _Denominators(sums)
        capture = Capture(self._given(seeds), recorder=recorder)
        with self._in_share(count, total, denominators), capture, recording(recorder):
            logs = _plain(model.train_step)(data)
            logs = self._own_logs(logs)
        weight = tf.cast(count, tf.float64) / tf.cast(total, tf.float64)
        self._parts[place:] = [recorder.part]
        gradients = [
            [None if gradient is None else _weighed(gradient, weight) for gradient in given]
            for _, given, _ in recorder.part.applied
        ]
        outputs = self._state(capture, logs)
        statistics = [_weighed(_wide(value), weight) for value in outputs.pop("statistics")]
        return {"gradients": gradients, "denominators": denominators.own, "statistics": statistics, **outputs}

    def is_last(self, place: int) -> bool:
        """True if nothing of a step is left after a part of it."""
        return self._parts[place].is_last

    def kept(self, place: int) -> list[Any]:
        """Returns what the step has to find again when it is run once more, after a part of it was applied."""
        return [keras_placement.backing(variable).read_value() for variable in self._parts[place].kept]

    @contextlib.contextmanager
    def _in_share(self, count: Any, total: Any, denominators: _Denominators) -> Iterator[None]:
        step = Step(count, total, tf.constant(0.0))
        rescale = functools.partial(losses.rescale, denominators)  # type: ignore[arg-type]
        with (
            step_module.entered(step),
            keras_losses.loss_denominators(rescale),
            keras_losses.output_losses_count(self._model, lambda: step.part),
            keras_losses.batch_statistics(_refuse_batch_statistics),
        ):
            yield

    def _whole(self, data: Any, seeds: Sequence[Any]) -> Outputs:
        """A training step on a whole batch; what is trained is changed at once."""
        optimizers = [part for optimizer in optimizers_of(self._model) for part in parts_of(optimizer)]
        counters = [getattr(optimizer, keras_placement.STEP_COUNTER) for optimizer in optimizers]
        direct = [*self._model.trainable_variables, *(v for optimizer in optimizers for v in optimizer.variables)]
        capture = Capture(self._given(seeds), frozenset(map(id, direct)), frozenset(map(id, counters)))
        with capture:
            logs = self._own_logs(_plain(self._model.train_step)(data))
        outputs = self._state(capture, logs)
        for variable, value in zip(self._statistics, outputs.pop("statistics"), strict=True):
            _assign_beside_others(keras_placement.backing(variable), value)
        return {**outputs, "statistics": []}

    def _test(self, data: Any, seeds: Sequence[Any]) -> Outputs:
        capture = Capture(self._given(seeds))
        with capture:
            logs = self._own_logs(_plain(self._model.test_step)(data))
        return self._state(capture, logs)

    def _test_share(self, data: Any, count: Any, total: Any, seeds: Sequence[Any], sums: Sequence[Any]) -> Outputs:
        """An evaluation step on a share of a batch."""
        denominators = _Denominators(sums)
        with self._in_share(count, total, denominators):
            outputs = self._test(data, seeds)
        return {"denominators": denominators.own, **outputs}

    def _predict(self, data: Any, seeds: Sequence[Any]) -> Any:
        with Capture(self._given(seeds)):
            return _plain(self._model.predict_step)(data)

    def _own_logs(self, logs: Any) -> dict[str, Any]:
        """Returns what a step returned, if it is something else than the model's metrics."""
        if not isinstance(logs, dict) or keras_model.logs_are_metrics(self._model, logs):
            return {}
        return {key: tf.cast(tf.convert_to_tensor(value), tf.float64) for key, value in logs.items()}

    def _state(self, capture: Capture, logs: dict[str, Any]) -> Outputs:
        known = {id(variable) for variable in (*self.metrics, *self.seeds)}
        self._statistics = [variable for key, variable in capture.updated.items() if key not in known]
        return {
            "logs": logs,
            "metrics": [_now(capture, variable) for variable in self.metrics],
            "seeds": [_now(capture, variable) for variable in self.seeds],
            "statistics": [_now(capture, variable) for variable in self._statistics],
        }

    # --- On the coordinator and the servers ---

    def _apply(self, place: int, gradients: Sequence[Any], statistics: Sequence[Any]) -> None:
        """Applies what the shares' gradients add up to, and the mean of what they have collected.

        Args:
            place: Of the part of the step.
            gradients: Of each share.
            statistics: Of each share; empty while the step goes on.
        """
        for call, (optimizer, _, variables) in enumerate(self._parts[place].applied):
            sums = [_sum(gradients) for gradients in zip(*[share[call] for share in gradients], strict=True)]
            self._plain_apply[id(optimizer)](sums, *([] if variables is None else [variables]))
        for index, variable in enumerate(self._statistics if statistics else ()):
            values = [share[index] for share in statistics]
            mean = tf.add_n(values) if values[0].dtype.is_floating else values[0]
            backing = keras_placement.backing(variable)
            backing.assign(tf.cast(mean, backing.dtype))

    def _count(self, states: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Adds what workers have counted to the metrics."""
        for place, (variable, reset) in enumerate(zip(self.metrics, self._resets, strict=True)):
            wide = tf.float64 if variable.value.dtype.is_floating else variable.value.dtype
            base = tf.cast(reset, wide)
            summands = [tf.cast(values[place], wide) - base for values in states]
            total = tf.add_n([tf.cast(tf.convert_to_tensor(variable.value), wide), *summands])
            variable.assign(tf.cast(total, variable.value.dtype))
        result: dict[str, Any] = self._model.get_metrics_result()
        return result


def _plain(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step without the `tf.function` that it may be: it is traced as a part of another one."""
    plain: Callable[..., Any] = getattr(step, "python_function", step)
    return plain


def _refuse_batch_statistics(sums: Any) -> Any:
    raise NotSupportedError(
        "Workers can't put the statistics of a batch together within a step.",
        "BatchNormalization(synchronized=True) with kd.ParameterServer(mode='sync')",
        "Leave synchronized=True out, or use a backend that reduces in the step: horovod, multi_worker, mirrored.",
    )


def attach_recorder(optimizer: Any) -> Callable[..., Any]:
    """Lets an optimizer hand its gradients to the recorder of a step; returns its own `apply`.

    Twice is the same as once.
    """
    plain: Callable[..., Any] | None = getattr(optimizer, _ATTACHED, None)
    if plain is not None:
        return plain
    own: Callable[..., Any] = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        recorder = current()
        if not optimizer.built and trainable_variables is not None:  # a step with optimizers of its own
            build_optimizer(optimizer, trainable_variables)
        if recorder is None:
            return own(grads, trainable_variables)
        return recorder.record(
            optimizer, list(grads), None if trainable_variables is None else list(trainable_variables)
        )

    attach(optimizer, _ATTACHED, own)
    attach(optimizer, "apply", apply)
    return own


def check_async(optimizers: Sequence[Any]) -> None:
    """Raises `NotSupportedError` for what workers can't do side by side."""
    for optimizer in optimizers:
        for part in parts_of(optimizer):
            if part.gradient_accumulation_steps:
                raise NotSupportedError(
                    "Workers that don't wait for each other can't accumulate gradients in one place.",
                    f"gradient_accumulation_steps={part.gradient_accumulation_steps} in mode='async'",
                    "Leave it out, or use kd.ParameterServer(mode='sync').",
                )


def _function(function: Callable[..., Any], eager: bool) -> Any:
    return function if eager else tf.function(function, autograph=False, reduce_retracing=True)


def _reset_values(model: keras.Model) -> list[np.ndarray]:
    """Returns what metrics are after a reset: only what was counted since adds up."""
    resets = []
    for metric in model.metrics:
        before = [np.array(variable.value) for variable in metric.variables]
        metric.reset_state()
        resets += [np.array(variable.value) for variable in metric.variables]
        for variable, value in zip(metric.variables, before, strict=True):
            variable.assign(value)
    return resets


def _now(capture: Capture, variable: Any) -> Any:
    return tf.convert_to_tensor(capture.get_current_value(variable))


def _assign_beside_others(backing: tf.Variable, value: Any) -> None:
    """Counts of several workers add up; of averages the last one stays."""
    if backing.dtype.is_integer:
        backing.assign_add(tf.cast(value, backing.dtype) - backing.read_value())
    else:
        backing.assign(tf.cast(value, backing.dtype))


def _wide(value: Any) -> Any:
    return tf.cast(value, tf.float64) if value.dtype.is_floating else value


def _weighed(gradient: Any, weight: Any) -> Any:
    """What a share counts in a mean over the whole batch. Whole numbers are those of one share."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_weighed(gradient.values, weight), gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    return gradient * tf.cast(weight, gradient.dtype) if gradient.dtype.is_floating else gradient


def _sum(gradients: Sequence[Any]) -> Any:
    if gradients[0] is None:
        return None
    if isinstance(gradients[0], tf.IndexedSlices):
        values, indices = [g.values for g in gradients], [g.indices for g in gradients]
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradients[0].dense_shape)
    return gradients[0] if len(gradients) == 1 else tf.add_n(list(gradients))
