"""The functions that workers run for a model, and what the coordinator does with their outputs.

What a step on a worker would do to variables is caught, so that the coordinator does it exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.backends.parameter_server.coordinator import Coordinator, beside, device_of
from keras_dist.backends.parameter_server.exchange import Known, Logs, Outputs, ShareStep, check_graph
from keras_dist.comm.replicas import explained_gradients
from keras_dist.compat import keras_model, keras_random, tf_compat
from keras_dist.compat.keras_model import announce_assignments, attach, updated_variables
from keras_dist.errors import NotSupportedError
from keras_dist.state import weights
from keras_dist.step import optimizer as optimizers
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Kind, Proof
from keras_dist.step.gathering import place
from keras_dist.step.metrics import counted_by_share
from keras_dist.step.step import Step
from keras_dist.step.whole_batch import compiled_layers, whole_batch
from keras_dist.training.distributed import DistributedModel

_PLAIN_APPLY = "_keras_dist_plain_apply"  # attribute of an optimizer


class Capture(keras.StatelessScope):
    """Catches what layers and metrics assign while it is entered.

    `given` are variables and their values in this step: metrics, random states. `direct` are ids of variables that are
    assigned where they are: in asynchronous training, what is trained. What an optimizer assigns is assigned there too,
    its counter of steps in one operation.
    """

    def __init__(self, given: list[tuple[Any, Any]], direct: frozenset[int] = frozenset()) -> None:
        super().__init__(given, collect_losses=True)
        self.updated: dict[int, Any] = {}
        self.counted: dict[int, Any] = {}  # by id of an optimizer's counter of steps what it was set to
        self.whole: set[int] = set()  # ids of what was assigned outside of a step on a share: of the whole batch
        self._graph = tf.compat.v1.get_default_graph()
        self._direct = direct

    def get_current_value(self, variable: Any) -> Any:  # regularizers ask the scope itself
        unassigned, value = self._read_unassigned(variable), super().get_current_value(variable)
        return unassigned if value is None else value

    def _read_unassigned(self, variable: Any) -> Any:
        """Notes that the step reads a variable. Returns its value if the step has not assigned it."""
        return keras_model.backing(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        optimizer, backing = keras_model.applying(), keras_model.backing(variable)
        parts = () if optimizer is None else optimizers.parts_of(optimizer)
        if any(variable is getattr(part, keras_model.STEP_COUNTER) for part in parts):
            self.counted[id(variable)] = backing.assign_add(tf.ones([], backing.dtype), read_value=True)
        elif optimizer is not None or id(variable) in self._direct:
            backing.assign(value)
        else:
            check_graph(self._graph, "assigns a variable", f"variable {variable.path!r}")
            self.updated[id(variable)] = variable
            (self.whole.add if step_module.current() is None else self.whole.discard)(id(variable))
            # No gradient flows through a variable that is assigned.
            super().add_update((variable, tf.stop_gradient(value)))


@dataclasses.dataclass
class Phase:
    """A phase of a training step: it ends where the step reads what it has applied gradients to."""

    # Optimizers, the gradients that they are given, and for which variables.
    applied: list[tuple[Any, Sequence[Any], Sequence[Any] | None]] = dataclasses.field(default_factory=list)
    # Variables that this phase has read and that its gradients change: later phases need the old values. `None` of the
    # last phase.
    kept: list[Any] | None = None


class Recorder(Capture):
    """Records the gradients that a step applies while it is entered.

    Shares can't wait for each other within a step. So a step that reads weights after it has applied gradients to them
    (a GAN's) is run once for each of its phases, from the start. The phases before this one find the weights as they
    were then: `values` has for each of them what it has kept.
    """

    def __init__(self, given: list[tuple[Any, Any]], phases: Sequence[Phase], values: Sequence[Any]) -> None:
        super().__init__(given)
        self.phase = Phase()
        # Variables, since the step may take gradients with respect to them.
        self._before = [
            {
                id(variable): tf_compat.temporary_variable(value, variable.trainable)
                for variable, value in zip(phase.kept or (), kept, strict=True)
            }
            for phase, kept in zip(phases, values, strict=True)
        ]
        self._index = 0  # of the phase in which the step is
        self._changed: dict[int, Any] = {}  # by this phase
        self._read: set[int] = set()
        self.assigned: list[tuple[Any, Any]] = []  # variables, and each value that they were assigned

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        if id(update[0]) in self.updated:
            self.assigned.append((update[0], keras.StatelessScope.get_current_value(self, update[0])))

    def record(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        check_graph(self._graph, "applies gradients", f"optimizer {optimizer.name!r}")
        targets = updated_variables(optimizer, variables)
        for variable in targets:
            if id(variable) in self.updated:
                raise NotSupportedError(
                    "The step assigns a weight and applies gradients to it afterwards. With parameter servers in "
                    "'sync' mode gradients are applied first.",
                    f"variable {variable.path!r}",
                    "Assign it after `apply`, or use kd.ParameterServer(mode='async').",
                )
        constant = optimizers.variable_of(optimizer)
        changed = [*targets, *optimizers.variables_of(optimizer)]
        self._changed.update({id(variable): variable for variable in changed if variable is not constant})
        if self._index == len(self._before):
            self.phase.applied.append((optimizer, gradients, variables))

    def _read_unassigned(self, variable: Any) -> Any:
        """Returns the value of a variable before this step changed it."""
        if id(variable) in self._changed:
            if self._index == len(self._before):
                self.phase.kept = [changed for key, changed in self._changed.items() if key in self._read]
            self._index += 1
            self._changed = {}
        self._read.add(id(variable))
        before = (values[id(variable)] for values in self._before[self._index :] if id(variable) in values)
        return next(before, keras_model.backing(variable))


def prepare_optimizer(optimizer: Any, backend: Coordinator) -> None:
    """Makes an optimizer give its gradients to a step's recorder, or sum them in a custom loop, if it doesn't yet."""
    if not hasattr(optimizer, _PLAIN_APPLY):
        attach(optimizer, _PLAIN_APPLY, keras_model.plain_apply(optimizer))
        _replace_apply(optimizer, backend)
    backend.place_optimizer(optimizer)


def _replace_apply(optimizer: Any, backend: Coordinator) -> None:
    is_sync = backend.mode == "sync"  # otherwise a step is on a whole batch
    if is_sync:
        optimizers.distribute_optimizer(optimizer, backend)
    unrecorded = optimizer.apply if is_sync else getattr(optimizer, _PLAIN_APPLY)

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        variables = None if trainable_variables is None else list(trainable_variables)
        scope = keras_model.stateless_scope()
        is_recorded = isinstance(scope, Recorder)
        if (is_recorded or not is_sync) and not optimizer.built and variables is not None:
            optimizers.build_optimizer(optimizer, variables)  # of a custom step with several optimizers
        if is_recorded:
            return scope.record(optimizer, list(grads), variables)
        if not (is_sync or isinstance(scope, Capture) or step_module.current() is not None):  # the coordinator alone
            raise optimizers.outside_of_a_step(f"the update of the optimizer {optimizer.name!r}")
        return unrecorded(grads, variables)

    attach(optimizer, "apply", apply)


class Functions:
    """What is traced for one built model, until something of it or of its optimizers changes."""

    def __init__(self, model: keras.Model, backend: Coordinator, distributed: DistributedModel, is_exact: bool) -> None:
        self._model = model
        self._backend = backend
        self._logs = distributed.logs
        self._distributed = distributed
        self.is_exact = is_exact or distributed.exact
        self._metrics = list(model.metrics_variables)
        self._seeds = [generator.state for generator in keras_random.seed_generators(model)]
        self.resets = [value for values in weights.metric_states(model)[1] for value in values]
        self._staleness: Any = _staleness_of(distributed) if backend.mode == "async" else None
        if self._staleness is not None:
            self._metrics += self._staleness.variables
            self.resets += [np.zeros_like(value) for value in weights.values_of(self._staleness.variables)]
        for variable in self._metrics:
            if variable.aggregation != "sum":
                raise weights.not_additive(variable.aggregation, variable.path)
        self._phases: list[Phase] = []
        self._statistics: list[Any] = []
        self._whole: set[int] = set()  # ids of those that were assigned what the whole batch gives
        traced = self._traced = _untraced if model.run_eagerly else tf_compat.often_traced  # by each model
        self.test_share = functools.partial(self._look_on_share, "test")
        self.predict_share = functools.partial(self._look_on_share, "predict")
        self.apply: Callable[..., None]  # with each trace of a step
        self._sums = traced(self._sums_of)
        self._count_metrics = traced(self._add_to_metrics)

    def _given(self, seeds: Sequence[Any], metrics: Sequence[Any] | None = None) -> list[tuple[Any, Any]]:
        states = self.resets if metrics is None else metrics
        return [*zip(self._metrics, states, strict=True), *zip(self._seeds, seeds, strict=True)]

    def train_share(self, data: Any, position: Any, seeds: Sequence[Any], known: Known) -> Outputs:
        """A training step on a share of a batch. Nothing is applied: it is run up to the end of a phase."""
        step, phase = self._step_on(data, position, known), len(known.kept)
        recorder = Recorder(self._given(seeds), self._phases[:phase], known.kept)
        with self._in_step(step, "train"), recorder:
            logs = self._logs_of("train", step.data)
        if step.looked_up:
            raise NotSupportedError(
                "With parameter servers a step that runs eagerly can't add what the workers compute of sparse inputs.",
                "run_eagerly=True, and a sparse tensor that a layer multiplies or looks up",
                "Leave run_eagerly=True out of `compile`, or pass dense inputs: tf.sparse.to_dense(x).",
            )
        self._refuse_reading(recorder, step)
        self._phases[phase:] = [recorder.phase]
        self.apply = self._traced(self._apply)  # as Keras does: the optimizer may have another schedule than before
        self._statistics, self._whole = self._assigned(recorder), recorder.whole
        outputs = self._outputs(recorder, logs)
        values = outputs.statistics
        weighed = step.weigh([tf.cast(v, tf.float64) if v.dtype.is_floating else v for v in values])
        statistics = []  # what this share counts in what the step has assigned; what it adds if changes are summed
        for by, value, counted in zip(self._statistics, values, weighed, strict=True):
            if id(by) in self._whole:
                counted = value
            elif by.aggregation == "sum":
                counted = value - keras_model.backing(by)
            statistics.append(counted)
        # Gradients go to the servers that apply them. They stay tensors: a share that is repeated counts once.
        gradients = []
        for by, own, given in recorder.phase.applied:
            weighed = step.weigh_once(own, id(by) in step.weighs_losses_of)
            gradients.append(_sent(weighed, updated_variables(by, given)))
        return outputs._replace(statistics=_sent(statistics, self._statistics), gradients=gradients, told=step.told)

    def _refuse_reading(self, recorder: Recorder, step: Step) -> None:
        """Raises `NotSupportedError` if a step computes with what it has assigned from its share."""
        of_share = [(variable, value) for variable, value in recorder.assigned if id(variable) in step.own]
        if tf.executing_eagerly() or not of_share:
            return
        proof = Proof([], dict.fromkeys((value.name for _, value in of_share), Kind.OTHER))
        gradients = [gradients for _, gradients, _ in recorder.phase.applied]
        metrics = [recorder.get_current_value(variable) for variable in self._metrics]
        results = tf.nest.flatten([gradients, metrics], expand_composites=True)
        tensors = [tf.convert_to_tensor(result) for result in results if result is not None]
        if not all(map(proof.is_constant, tensors)):
            raise NotSupportedError(
                "With parameter servers a step can't compute with what its layers have assigned from their share: the "
                "shares of a batch meet after the step.",
                ", ".join(dict.fromkeys(repr(variable.path) for variable, _ in of_share)),
                "Read such a variable before the step assigns it. Or use mirrored or central_storage, which combine "
                "what the shares have assigned at each update.",
            )

    def _look_on_share(self, kind: str, data: Any, position: Any, seeds: Sequence[Any], known: Known) -> Outputs:
        step = self._step_on(data, position, known)
        with self._in_step(step, kind):
            return self._look_on(kind, step.data, seeds)._replace(told=step.told)

    def _step_on(self, data: Any, position: Any, known: Known) -> ShareStep:
        """Returns the step on a share.

        `position` is an int32 vector: the number of examples in the share and in the batch, the replica whose share it
        is, the index of the share among those that are not empty, their number, and the share's first row.
        """
        count, total, replica, index, shares, start = tf.unstack(position)
        step = ShareStep(
            count, total, tf.constant(0.0), replica=replica, shares=shares if known.gathered else 1, data=data,
            index=index, gathered=known.gathered,
        )  # fmt: skip
        if self.is_exact:
            place(step, start, data)
        return step

    @contextlib.contextmanager
    def _in_step(self, step: Step, kind: str) -> Iterator[None]:
        if (rows := self._distributed.first_rows.get(kind)) is not None:
            rows.note_graph()
        whole = whole_batch(self._backend, self._distributed.prepare_found, self._model, exact=self.is_exact)
        with step_module.entered(step), whole, self._distributed.noting_draws(kind):
            yield

    def train_whole(self, data: Any, seeds: Sequence[Any], metrics: Sequence[Any] | None = None) -> Outputs:
        """A training step on a whole batch. What is trained is changed at once. Metrics start from these."""
        capture = Capture(self._given(seeds, metrics), frozenset(map(id, self._model.trainable_variables)))
        found = keras_model.found_optimizers(self._distributed.prepare_found)
        optimizer = None if self._staleness is None else getattr(self._model, "optimizer", None)
        counter = None if optimizer is None else optimizer.iterations
        before = None if counter is None else keras_model.backing(counter).read_value()
        with found, capture, counted_by_share(self._backend, self._model), compiled_layers(self._model, is_chief=True):
            logs = self._logs_of("train", data)
            if id(counter) in capture.counted:
                self._staleness.update_state(tf.cast(capture.counted[id(counter)] - 1 - before, tf.float32))
        outputs = self._outputs(capture, logs)
        for variable, value in zip(self._assigned(capture), outputs.statistics, strict=True):
            backing = keras_model.backing(variable)
            value = tf.cast(value, backing.dtype)
            if backing.dtype.is_integer:  # counts of several workers are added; of averages the last one stays
                backing.assign_add(value - backing.read_value())
            else:
                backing.assign(value)
        return outputs._replace(statistics=())

    def test_whole(self, data: Any, seeds: Sequence[Any], metrics: Sequence[Any] | None = None) -> Outputs:
        """An evaluation step on a whole batch. Metrics start from these."""
        counted = counted_by_share(self._backend, self._model)  # the states of several batches are summed too
        with step_module.entered(None), counted, compiled_layers(self._model, is_chief=True):
            return self._look_on("test", data, seeds, metrics)

    def _look_on(self, kind: str, data: Any, seeds: Sequence[Any], metrics: Sequence[Any] | None = None) -> Outputs:
        """A step that changes nothing: an evaluation, or a prediction, whose logs are the predictions."""
        capture = Capture(self._given(seeds, metrics))
        with capture:
            logs = _untraced(self._model.predict_step)(data) if kind == "predict" else self._logs_of(kind, data)
        if assigned := self._assigned(capture):
            raise NotSupportedError(
                "With parameter servers a layer can't change its state in `evaluate` and `predict`: each worker has "
                "another batch.",
                ", ".join(repr(variable.path) for variable in assigned[:3]),
                "Assign it only if `training` is true. Or use another backend: horovod, multi_worker, mirrored.",
            )
        return self._outputs(capture, logs)

    def _logs_of(self, kind: str, data: Any) -> Logs:
        """Runs a step. Returns its logs, except for those that the coordinator computes from the metrics."""
        weights = functools.partial(self._weight_paths, len(self._model.trainable_variables))
        with self._logs.recording(), explained_gradients(weights):
            logs = self._logs.note(kind, _untraced(getattr(self._model, f"{kind}_step"))(data))
        if not isinstance(logs, dict):
            return {}
        return {name: tf.convert_to_tensor(log) for name, log in logs.items() if not self._logs.is_known(kind, name)}

    def _weight_paths(self, known: int) -> list[str]:
        """Returns the weights that a step may have assigned. Refuses those that it has made: none is a variable yet.

        `known` are those that were there before it.
        """
        paths = [variable.path for variable in self._model.trainable_variables]
        if made := paths[known:]:
            raise NotSupportedError(
                "With parameter servers a step cannot take the gradient of weights that it has made itself.",
                ", ".join(made[:5]),
                "Build all parts of the model before `fit`: call each once with a batch, or give it an `Input`.",
            )
        return paths

    def _outputs(self, capture: Capture, logs: Logs) -> Outputs:
        values = [
            [tf.convert_to_tensor(capture.get_current_value(variable)) for variable in variables]
            for variables in (self._metrics, self._seeds, self._assigned(capture))
        ]
        return Outputs(logs, *values)

    def _assigned(self, capture: Capture) -> list[Any]:
        known = {id(variable) for variable in (*self._metrics, *self._seeds)}
        return [variable for key, variable in capture.updated.items() if key not in known]

    # --- On the coordinator and the servers ---

    def kept(self, phase: int) -> list[Any] | None:
        """Returns the values that the step needs again when it is run after this phase; `None` if it ends with it."""
        variables = self._phases[phase].kept
        return None if variables is None else [keras_model.backing(variable).read_value() for variable in variables]

    def _apply(self, phase: int, gradients: Sequence[Any], statistics: Sequence[Any]) -> None:
        """Applies the sums of the shares' gradients, and after the last phase assigns the means of their statistics."""
        calls = zip(self._phases[phase].applied, self._sums_of(phase, gradients), strict=True)
        for (optimizer, _, variables), sums in calls:
            with tf.device(self._backend.variable_devices()[0]):  # what belongs to no variable: a norm, a learning rate
                getattr(optimizer, _PLAIN_APPLY)(sums, *([] if variables is None else [variables]))
        shares = [_received(share, self._statistics) for share in statistics]
        for index, variable in enumerate(self._statistics if statistics else ()):
            values = [share[index] for share in shares]
            backing, is_whole = keras_model.backing(variable), id(variable) in self._whole
            is_sum = variable.aggregation == "sum" and not is_whole
            is_mean = values[0].dtype.is_floating and not is_whole
            with tf.device(device_of(variable)):
                total = tf.cast(tf.add_n(values) if is_sum or is_mean else values[0], backing.dtype)
                backing.assign(backing + total if is_sum else total)

    def _sums_of(self, phase: int, gradients: Sequence[Any]) -> list[list[Any]]:
        sums, calls = [], zip(*gradients, strict=True)
        for (optimizer, traced, given), shares in zip(self._phases[phase].applied, calls, strict=True):
            variables = updated_variables(optimizer, given)
            values = [_received(share, variables) for share in shares]
            sums.append([*map(_sum, zip(*values, strict=True), traced, variables)])
        return sums

    def updates(self, phase: int, gradients: Sequence[Any]) -> list[Any]:
        """Returns what a phase applies, as `Step.applied`, before it does."""
        applied = self._phases[phase].applied
        for optimizer, _, given in applied:
            announce_assignments([*updated_variables(optimizer, given), *optimizers.variables_of(optimizer)])
        announce_assignments(self._statistics)
        sums = self._sums(phase, gradients)
        return [(optimizer, total, given) for (optimizer, _, given), total in zip(applied, sums, strict=True)]

    def count(self, kind: str, outputs: Sequence[Outputs], counts: Sequence[int] = (1,)) -> Logs:
        """Adds what a step has counted to the metrics; returns its logs. `counts` are the shares' examples."""
        announce_assignments(self._metrics)
        results: Logs = self._count_metrics([output.metrics for output in outputs], kind)
        others = {name: _mean([output.logs[name] for output in outputs], counts) for name in outputs[0].logs}
        return {**others, **results}

    def _add_to_metrics(self, states: Sequence[Sequence[Any]], kind: str) -> Any:
        """The rule of `weights.combine_states`, but in the graph: it is applied after each step, to what is here."""
        for index, (variable, reset) in enumerate(zip(self._metrics, self.resets, strict=True)):
            wide = tf.float64 if variable.value.dtype.is_floating else variable.value.dtype
            base = tf.cast(reset, wide)
            summands = [tf.cast(values[index], wide) - base for values in states]
            total = tf.add_n([tf.cast(tf.convert_to_tensor(variable.value), wide), *summands])
            variable.assign(tf.cast(total, variable.value.dtype))
        return self._logs.results(kind)

    def seeds(self) -> list[Any]:
        return [tf.convert_to_tensor(seed.value) for seed in self._seeds]

    def set_seeds(self, values: Sequence[Any]) -> None:
        for seed, value in zip(self._seeds, values, strict=True):
            seed.assign(value)


def _staleness_of(distributed: DistributedModel) -> Any:
    """Returns the metric of a model's staleness, `None` if no callback asks for it."""
    if (watch := distributed.stopwatch) is not None and watch.staleness is None:
        watch.staleness = keras.metrics.Mean()
    return None if watch is None else watch.staleness


def shifted_seeds(seeds: Sequence[Any], stream: int) -> list[Any]:
    """Returns the random states of another stream, always the same one for a number."""
    return [seed + keras_random.stream_offset(stream, seed.dtype) for seed in seeds]


def _untraced(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step without the `tf.function` that it may be: it is traced as a part of another one."""
    return getattr(step, "python_function", step)


def _mean(values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Returns the mean of numbers by the number of examples, the first of other values."""
    if not (values[0].dtype.is_floating or values[0].dtype.is_integer):
        return values[0]
    wide = [tf.cast(value, tf.float64) * count for value, count in zip(values, counts, strict=True)]
    return tf.add_n(wide) / sum(counts)


_SMALL = 2**15  # numbers, which are copied in less time than a tensor that stays on a server takes


def _sent(values: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], dict[tuple[int, ...], Any]]:
    """Puts values beside their variables. Small ones of one type, for one server, are one vector.

    Returns those that are alone, `None` in place of the others, and the vectors, by the indices of what is in them.
    A value whose shape is not known stays alone.
    """
    together: dict[Any, list[int]] = {}
    for index, (value, variable) in enumerate(zip(values, variables, strict=True)):
        has_shape = isinstance(value, tf.Tensor) and value.shape == tuple(variable.shape)
        if has_shape and value.shape.num_elements() <= _SMALL:
            together.setdefault((device_of(variable), value.dtype), []).append(index)
    alone, vectors = list(values), {}
    for indices in together.values():
        if len(indices) > 1:
            vector = tf.concat([tf.reshape(values[index], [-1]) for index in indices], 0)
            vectors[tuple(indices)] = beside(vector, variables[indices[0]])
            for index in indices:
                alone[index] = None
    return [beside(*pair) for pair in zip(alone, variables, strict=True)], vectors


def _received(sent: tuple[Sequence[Any], dict[tuple[int, ...], Any]], variables: Sequence[Any]) -> list[Any]:
    """Returns the values that were sent, on the servers of their variables."""
    values, vectors = list(sent[0]), sent[1]
    for indices, vector in vectors.items():
        shapes = [list(variables[index].shape) for index in indices]
        with tf.device(device_of(variables[indices[0]])):
            parts = tf.split(vector, [*map(math.prod, shapes)])
            for index, part, shape in zip(indices, parts, shapes, strict=True):
                values[index] = tf.reshape(part, shape)
    return values


def _sum(gradients: Sequence[Any], traced: Any, variable: Any) -> Any:
    """Returns the sum of the shares' gradients on the server of their variable. One is `traced` as the step made it."""
    first = gradients[0]
    if first is None or (len(gradients) == 1 and not isinstance(first, tf.IndexedSlices)):
        return first
    with tf.device(device_of(variable)):
        if not isinstance(first, tf.IndexedSlices):
            return tf.add_n(list(gradients))
        values, indices = [g.values for g in gradients], [g.indices for g in gradients]
        rows = tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), first.dense_shape)
        return optimizers.add_rows(rows, len(gradients), traced)
