"""`kd.distribute(verify=True)`: the first steps are also computed on the whole batch in one place, and compared.

Two trial steps run from the same state: one on the shares, one as plain Keras on the whole batch. What they assign is
undone, then the step itself runs. So verification changes no number. On the shares, BatchNormalization is synchronized
and random layers draw for the whole batch (`exact=True`). If something still differs, it should not, and the likely
cause is read from the graph.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, keras_random, tf_graphs
from keras_dist.compat.keras_model import CLIP_GRADIENTS, attached
from keras_dist.compat.tf_compat import host_variable
from keras_dist.data.shares import row_count
from keras_dist.errors import MismatchError
from keras_dist.logging import announce
from keras_dist.state.weights import values_of
from keras_dist.step import step as step_module
from keras_dist.step.optimizer import optimizers_of
from keras_dist.step.step import Step
from keras_dist.training.trial import (
    Applied,
    Difference,
    Quantity,
    Trial,
    differences_in,
    epsilon,
    precisions_of_float32,
    table_of,
)

_RANDOM = "^(Stateful|Stateless)?(Random|Multinomial|TruncatedNormal|ParameterizedTruncatedNormal)(?!GetAlg|GetKey)"
_CLIPPING = "clip_by_global_norm|clip_by_norm|global_norm"


class Suspects(NamedTuple):
    """Operations that the script itself calls in a step, as pairs of type and line."""

    random: Sequence[tuple[str, str]] = ()
    clipping: Sequence[tuple[str, str]] = ()  # by a norm
    attributes: Sequence[str] = ()  # to which an eager step gives a value that depends on the share
    begins_with_them: bool = False  # nothing but the values of these attributes differs


def suspects_in(graph: Any) -> Suspects:
    """Returns the suspects in the graph of a step, none if it is `None`: the step runs eagerly."""
    if graph is None:
        return Suspects()
    return Suspects(tf_graphs.script_operations(graph, _RANDOM), tf_graphs.script_operations(graph, _CLIPPING))


def likely_cause(wrong: Sequence[Difference], backend: Backend, suspects: Suspects, differs_by_rank: bool) -> str:
    gradients = [difference for difference in wrong if difference.group.startswith("update")]
    if suspects.attributes and (differs_by_rank or suspects.begins_with_them):
        return (
            f"Likely cause: a step computes {', '.join(suspects.attributes[:3])} from its share, in Python, and the "
            "next one uses it. Compute it from kd.gather(...), or in a variable with aggregation='mean' or 'sum'."
        )
    if differs_by_rank:
        return (
            "Likely cause: the ranks compute with different constants or weights: random numbers without a seed, the "
            "order of a Python `set`, what depends on kd.rank(). Make them the same on every rank (a seed, "
            "`sorted(...)`, kd.broadcast). Or the step keeps something of its share in a tf.Variable: to accumulate "
            "gradients, an optimizer has `gradient_accumulation_steps`."
        )
    if suspects.random:
        kind, line = suspects.random[0]
        return (
            f"Likely cause: a random layer, {kind} at {line}, draws other numbers for a share than for the whole "
            "batch. Draw by `keras.random` with a SeedGenerator: kd.distribute(model, exact=True) then takes the "
            "share's rows of what one process draws."
        )
    if suspects.clipping and gradients:
        return (
            f"Likely cause: the step clips the gradients of a share, at {suspects.clipping[0][1]}. Call "
            "kd.all_reduce(gradients) before, or let the optimizer clip: clipnorm, clipvalue, global_clipnorm."
        )
    factors = [difference.factor for difference in gradients or wrong]
    if any(np.allclose(factors, expected, rtol=0.3) for expected in (backend.num_replicas, 1 / backend.num_replicas)):
        return (
            "Likely cause: a sum over the examples where a mean is expected, in a loss or metric that the step "
            "computes itself: a share's loss counts as a mean. Divide by the number of examples (`tf.reduce_mean`), "
            "pass it to `add_loss` or compile, or compute it from kd.gather(predictions)."
        )
    if all(difference.group == "variables" for difference in wrong):
        return (
            "Likely cause: state that is collected from a share, as in BatchNormalization. Assign it in the `call` of "
            "a layer, or create it with aggregation='sum' or 'mean', by `add_weight`: of a tf.Variable Keras and "
            "keras_dist know nothing. To accumulate gradients, an optimizer has `gradient_accumulation_steps`."
        )
    if all(difference.group.startswith("metric ") for difference in wrong):
        return (
            "Likely cause: a metric of the script's own whose counts of two shares don't make that of the batch. Let "
            "its `update_state` add to variables, or compute it from `model.predict`."
        )
    if all(difference.group.startswith("predictions") for difference in wrong):
        return (
            "Likely cause: a layer that mixes the examples of a batch when it predicts. Compute it from kd.gather, "
            "or predict on one rank with a copy of the model that is not distributed."
        )
    return (
        "Likely cause: something that depends on all examples of the batch but sees a share only: a loss that compares "
        "examples or divides by their number (kd.losses.WholeBatch, kd.gather), a normalization by the statistics of "
        "the batch (BatchNormalization with exact=True), gradients that the step clips or scales itself "
        "(kd.all_reduce before) or accumulates in a tf.Variable (an optimizer has `gradient_accumulation_steps`), or "
        "data that differ by rank."
    )


def _values_of(variables: Sequence[Any]) -> list[Quantity]:
    return [Quantity(f"the variable {variable.path!r}", "variables", value_of(variable)) for variable in variables]


def _state(model: keras.Model, updated: set[int], state: Callable[[Any], Any]) -> list[Quantity]:
    quantities: list[Quantity] = []
    counted = set[int]()
    for metric in reversed(keras_model.flat_metrics(model)):  # those in another one first
        for variable in metric.variables:
            if id(variable) not in counted:
                counted.add(id(variable))
                name = f"the metric {metric.name!r} ({variable.name})"
                quantities.append(Quantity(name, f"metric {metric.name}", state(variable)))
    ignored = updated | counted | {id(generator.state) for generator in keras_random.seed_generators(model)}
    return quantities + _values_of([variable for variable in model.variables if id(variable) not in ignored])


def value_of(variable: Any) -> Any:
    return tf.convert_to_tensor(variable.value)


def common(expected: Sequence[Quantity], actual: Sequence[Quantity]) -> tuple[list[Quantity], list[Quantity]]:
    """Returns the quantities of two steps without those that may be in one of them only.

    Not every variable that replicas assign in a loop can be seen, and TPU cores reduce dense gradients.
    """
    names = {quantity.name for quantity in expected} & {quantity.name for quantity in actual}
    compared = [
        [each for each in quantities if each.name in names or not each.group.startswith(("variables", "rows"))]
        for quantities in (expected, actual)
    ]
    return compared[0], compared[1]


CALLS = {"train": "fit", "test": "evaluate", "predict": "predict"}  # which run steps of a kind
_Context = contextlib.AbstractContextManager[None]
_Function = Callable[..., Any]
_Quantities = Sequence[Quantity]
_ROUNDINGS = 3  # how often the effect of rounding is measured
_OF_ROUNDING = 0.05  # the part of a number that rounding may change, and random numbers would not
STEPS = 2  # of each kind that are verified, beside the first smaller batch


class Verified:
    """Something that can be verified: the steps of a model, or of a custom loop."""

    exact: bool | None = False  # see `kd.distribute`
    _applied: list[Any] | None = None  # while a step is tried out: see `Step.applied`

    @contextlib.contextmanager
    def _trying_out(self, applied: list[Any]) -> Iterator[None]:
        """In this context steps have exact noise and statistics, and append to `applied`."""
        with attached(self, "exact", True), attached(self, "_applied", applied):
            yield

    def prepare_found(self, optimizer: Any) -> None:
        """Distributes an optimizer that a step applies, if it is not yet distributed."""
        raise NotImplementedError

    def whole(self, batch: Any) -> Any:
        """Returns the whole batch, on every rank."""
        raise NotImplementedError

    def distributed(self, function: _Function, batch: Any, applied: list[Any]) -> Any:
        """Runs a step on the shares, with exact noise and statistics. Appends to `applied` as `Step.applied`."""
        raise NotImplementedError

    def plain(self, function: _Function, whole: Any) -> Any:
        """Runs a step of plain Keras on the whole batch. Both return the logs that no metric knows, or predictions."""
        raise NotImplementedError

    def state_of_all(self, variable: Any) -> Any:
        """Returns a metric's variable over all ranks. If it is a sum, it began at 0."""
        return value_of(variable)


class Verification:
    """Verifies the first steps of one kind: `"fit"`, `"evaluate"`, `"predict"`, `"kd.run"` (without a model)."""

    def __init__(self, backend: Backend, verified: Verified, name: str, model: keras.Model | None) -> None:
        self._backend = backend
        self._verified = verified
        self._name = name
        self._model: Any = model
        self._others: dict[str, tf.Variable] = {}  # what is compared too and Keras doesn't know, by name
        self._has_rows = True  # the rows of a sparse gradient are compared too, beside their sums
        self._suspects = Suspects()  # in the last step in one place
        self._remedy = ""  # beside the likely cause
        self._begins_with: list[tuple[Any, Any]] = []  # variables and values
        self.error: MismatchError | None = None
        self._outputs: list[Any] = []  # of the last step
        self.steps = 0
        self.compared = 0
        self.largest = 0.0  # relative difference
        self._begun = host_variable(0, "verified_steps")
        self._size = host_variable(0, "verified_size")
        self._has_smaller = host_variable(False, "verified_smaller")

    def run(self, function: _Function, batch: Any, total: Any, step: Callable[[], Any]) -> Any:
        """Runs a step, and verifies it before if it is one of the first. Every rank must call it.

        `function` takes a batch, as `Verified` does; `total` is the number of its examples, int32; `step` runs the step
        itself, and returns its outputs.
        """
        # In this order, which nothing else enforces: the collectives of both steps have the same names.
        with tf.control_dependencies(_in_this_graph(self._outputs)):
            looked = self.look(function, batch, total)
        with tf.control_dependencies([looked]):
            outputs = step()
        self._outputs = [leaf for leaf in tf.nest.flatten(outputs, True) if tf.is_tensor(leaf)]
        return outputs

    def look(self, function: _Function, batch: Any, total: Any) -> Any:
        """Verifies a step if it is one of the first. Returns a tensor for which the step itself must wait."""
        begun, is_smaller = tf.identity(self._begun), total < self._size
        is_due = (begun < STEPS) | (is_smaller & ~self._has_smaller)
        with tf.control_dependencies([is_due]):
            self._begun.assign_add(1)
            self._size.assign(tf.maximum(self._size, total))
            self._has_smaller.assign(self._has_smaller | is_smaller)
        compare = functools.partial(self._compare, function, batch, total)
        if tf.executing_eagerly():
            return compare() if is_due else tf.constant(True)
        return tf.cond(is_due, compare, lambda: tf.constant(True))

    def _compare(self, function: _Function, batch: Any, total: Any) -> Any:
        trial, whole = Trial(), self._verified.whole(batch)
        # The whole batch is there first: an error of the step must not stop what gathers it, on some ranks only.
        with tf.control_dependencies(_in_this_graph(tf.nest.flatten(whole, True))):
            actual = self._on_shares(trial, function, batch)
        wanted, tables = self._tables(self._in_one_place(trial, function, whole), actual)
        # TensorFlow never forgets the functions that its graphs call, so this one holds neither the model nor tensors.
        wanted = [quantity._replace(value=tf.TensorSpec(None, quantity.value.dtype)) for quantity in wanted]
        suspects, this = self._suspects, weakref.ref(self)

        def judge(tables: np.ndarray, total: np.ndarray) -> np.bool_:
            if (verification := this()) is not None:
                verification.judge(wanted, tables, int(total), suspects)
            return np.bool_(True)

        if tf.executing_eagerly():
            return tf.constant(judge(tables.numpy(), total.numpy()))
        return tf.reshape(tf.numpy_function(judge, [tables, total], tf.bool), [])

    def check(self, function: _Function, batch: Any, trial: Trial, graph: Any, which: str) -> bool:
        """Verifies an eager step on a few rows, the same on all ranks. Every rank must call it. False if it could not.

        `trial` undoes it; `graph` is of the step as it was traced, `None` if steps run eagerly; errors name it `which`.
        """

        def in_one_place(begin: Any = None, context: _Context | None = None) -> list[Quantity] | None:
            found, error = [], ""
            try:  # no rank waits for another one here, so an error must not stop some of them only
                with trial.beginning_with(begin), keras_random.drawn_alike():
                    found = self._in_one_place(trial, function, batch, context)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            if errors := [text for text in self._gathered(error) if text]:
                self._note_unchecked(f"on {total} rows a step raises {' '.join(errors[0].split())}")
            return None if errors else found

        def judge(wanted: _Quantities, tables: Any, suspects: Suspects, disturbed: Any = None) -> None:
            self.judge(wanted, tables, total, suspects, disturbed, which)

        self._remedy = " If this is meant to be, turn the check off: kd.distribute(model, verify=False)."
        total = int(row_count(batch))
        # Which rows replicas put together is read from the graph of the step.
        self._others, self._has_rows = trial.attributes.variables(), graph is None
        # Between epochs each rank has statistics of its own, as of BatchNormalization.
        statistics = keras_model.float_statistics(self._model)
        of_chief = self._backend.broadcast_arrays(values_of(statistics))
        self._begins_with = list(zip(statistics, of_chief, strict=True))
        if (expected := in_one_place()) is None:
            return False
        left = trial.left
        with keras_random.drawn_alike():
            actual = self._on_shares(trial, function, batch)
        wanted, tables = self._tables(expected, actual)
        tables, left_on_shares = tables.numpy(), trial.left
        # A change in Python shows in the next step, unless the ranks differ already.
        changed = trial.attributes.different(left, left_on_shares) if graph is None else []
        try:
            judge(wanted, tables, Suspects())
        except MismatchError:
            suspects = suspects_in(graph)
            random = [(kind, line) for kind, line in suspects.random if kind not in keras_random.DRAWN_ALIKE]
            if random:
                lines = ", ".join(dict.fromkeys(line for _, line in random))
                self._note_unchecked(f"a step draws other random numbers for a share, at {lines}")
                return False
            suspects = suspects._replace(random=[], attributes=changed)
            if not self._is_rounding(expected, in_one_place, functools.partial(judge, wanted, tables, suspects)):
                return False
        if any(self._gathered(bool(changed))):
            following, other = in_one_place(left), in_one_place(left_on_shares)
            if following is not None and other is not None:
                wanted, tables = self._tables(following, other)
                judge(wanted, tables.numpy(), Suspects(attributes=changed, begins_with_them=True))
        return True

    def _is_rounding(
        self, expected: _Quantities, in_one_place: Callable[..., _Quantities | None], judge: Callable[[Any], None]
    ) -> bool:
        """True if rounding explains all differences, False if that can't be told. Otherwise `judge` raises.

        Rounding may by chance change little once, so its effect is measured up to three times.
        """
        rounded: list[np.ndarray] = []
        for number in range(_ROUNDINGS):
            if (disturbed := in_one_place(context=_rounded_again(self._model, number))) is None:
                return False
            plain, other = common(expected, disturbed)
            # Of all ranks, so that they judge alike.
            rounded += self._gathered(table_of(plain, other).numpy())
            largest = np.max(rounded, 0)
            # Random numbers change more than rounding does.
            changes = [found.relative for found in differences_in(plain, largest, 0.0)]
            if number == 0 and max(changes, default=0.0) > _OF_ROUNDING:
                if (again := in_one_place()) is None:
                    return False
                pairs = zip(expected, again, strict=False)
                is_other = any(not np.array_equal(one.value.numpy(), other.value.numpy()) for one, other in pairs)
                if any(self._gathered(is_other)):
                    self._note_unchecked("a step draws other random numbers for a share")
                    return False
            with contextlib.nullcontext() if number + 1 == _ROUNDINGS else contextlib.suppress(MismatchError):
                judge(largest)
                break
        return True

    def _note_unchecked(self, reason: str) -> None:
        if self._backend.topology.is_chief:
            announce(f"keras_dist: the script's own code in {self._name} was not compared with one process: {reason}")

    def _gathered(self, value: Any) -> list[Any]:
        return self._backend.all_gather_object(f"the check of {self._name}", value)

    def _on_shares(self, trial: Trial, function: _Function, batch: Any) -> list[Quantity]:
        def step(applied: list[Any], assigned: dict[int, Any]) -> list[Quantity]:
            outputs = self._verified.distributed(function, batch, applied)
            return self._computed(applied, outputs, assigned, self._verified.state_of_all)

        return self._tried(trial, step)

    def _in_one_place(
        self, trial: Trial, function: _Function, whole: Any, context: _Context | None = None
    ) -> list[Quantity]:
        """Runs a trial step on the whole batch, and returns what it computes. Notes likely causes of differences."""

        def step(applied: list[Any], assigned: dict[int, Any]) -> list[Quantity]:
            found_optimizers = keras_model.found_optimizers(self._verified.prepare_found)
            one, none = tf.constant(1), tf.constant(0.0)
            plain = step_module.entered(Step(one, one, none, data=whole, is_plain=True, applied=applied))
            with context or contextlib.nullcontext(), plain, found_optimizers:
                outputs = self._verified.plain(function, whole)
            self._suspects = suspects_in(tf_graphs.current())
            return self._computed(applied, outputs, assigned, value_of)

        return self._tried(trial, step, in_one_place=True)

    def _tried(
        self, trial: Trial, step: Callable[[list[Any], dict[int, Any]], list[Quantity]], in_one_place: bool = False
    ) -> list[Quantity]:
        found: list[Quantity] = []

        def run() -> list[Any]:
            assigned: dict[int, Any] = {}
            for variable, value in self._begins_with:
                variable.assign(value)
            # So what a step adds to a sum shows even where the sum is already large, or infinite.
            for metric in [] if self._model is None else keras_model.flat_metrics(self._model):
                for variable in metric.variables:
                    if variable.aggregation == "sum":
                        variable.assign(tf.zeros_like(variable.value))
            with keras_model.observed(lambda variable: assigned.update({id(variable): variable})):
                found[:] = step(Applied(trial), assigned)
            return [quantity.value for quantity in found]

        # As Keras runs a step: in a graph, also where its steps are run from outside of one.
        in_graph = in_one_place and tf.executing_eagerly() and self._model is not None and not self._model.run_eagerly
        values = tf.function(lambda: trial.run(run), autograph=False)() if in_graph else trial.run(run)
        return [quantity._replace(value=value) for quantity, value in zip(found, values, strict=True)]

    def _computed(
        self, applied: Sequence[Any], outputs: Any, assigned: dict[int, Any], state: Callable[[Any], Any]
    ) -> list[Quantity]:
        """Returns what a step has computed. `outputs` are its predictions, or its logs that no metric knows."""
        updated: set[int] = set()
        quantities: list[Quantity] = []
        for number, (optimizer, gradients, given) in enumerate(applied, start=1):
            variables = keras_model.updated_variables(optimizer, given)
            updated.update(map(id, variables))
            of_update = f" in update {number}" if len(applied) > 1 else ""
            for variable, gradient in zip(variables, gradients, strict=False):
                if gradient is None:
                    continue
                path = f"{variable.path!r}{of_update}"
                dense = tf.convert_to_tensor(gradient)
                quantities.append(Quantity(f"the gradient of {path}", f"update {number}", dense))
                if self._has_rows and isinstance(gradient, tf.IndexedSlices):
                    # Adam squares each row, before it adds the rows of one index.
                    squares = tf.IndexedSlices(gradient.values**2, gradient.indices, gradient.dense_shape)
                    name = f"the sum of squared rows in the gradient of {path}"
                    quantities.append(Quantity(name, f"rows {number}", tf.convert_to_tensor(squares)))
        if self._model is None:  # what the step of a loop has assigned, other than by optimizers
            others = [v for v in assigned.values() if id(v) not in updated and not keras_random.is_seed(v)]
            return quantities + _values_of(sorted(others, key=lambda variable: variable.path))
        quantities += [Quantity(f"the tf.Variable {name}", "variables", v.value()) for name, v in self._others.items()]
        quantities += _state(self._model, updated, state)
        if self._name == "predict":
            leaves = tf.nest.flatten(outputs, expand_composites=True)
            quantities += [Quantity("a prediction", f"predictions {n}", leaf) for n, leaf in enumerate(leaves)]
        elif isinstance(outputs, dict):
            logs = [(name, outputs[name]) for name in sorted(outputs) if tf.is_tensor(outputs[name])]
            quantities += [Quantity(f"logs[{name!r}]", f"log {name}", tf.convert_to_tensor(log)) for name, log in logs]
        return quantities

    def _tables(self, expected: _Quantities, actual: _Quantities) -> tuple[list[Quantity], Any]:
        """Returns what is compared, and the tables of all ranks, see `table_of`."""
        wanted, others = common(expected, actual)
        if [quantity.name for quantity in wanted] != [quantity.name for quantity in others]:
            whole, shares = ({quantity.name for quantity in quantities} for quantities in (wanted, others))
            raise MismatchError(
                f"verify: a step of {self._name} computes other things on shares than on the whole batch.",
                f"only on the whole batch: {sorted(whole - shares)}; only on shares: {sorted(shares - whole)}",
                f"The step may depend on the number of examples, or have state of its own in Python.{self._remedy}",
            )
        table = table_of(wanted, others)[None]
        is_alone = self._backend.topology.size == 1
        return wanted, table if is_alone else self._backend.all_gather(table, "keras_dist_verified_table")

    def judge(
        self, expected: _Quantities, tables: np.ndarray, total: int, suspects: Suspects,
        disturbed: np.ndarray | None = None, which: str = "",
    ) -> None:  # fmt: skip
        """Raises the same error on every rank if something differs on one of them."""
        self.steps += 1
        self.compared = len(expected)
        precision = self._precision(expected)
        by_rank = [differences_in(expected, table, precision, disturbed) for table in tables]
        self.largest = max([self.largest, *(found.relative for found in by_rank[0])])
        worst = max(by_rank, key=lambda found: sum(difference.is_wrong for difference in found))
        if wrong := [difference for difference in worst if difference.is_wrong]:
            # Not of state: what each replica collects from its share may be averaged later.
            sizes = tables[:, [quantity.group != "variables" for quantity in expected], 1]
            differs_by_rank = bool(np.any(np.abs(sizes - sizes[0]) > precision * (np.abs(sizes[0]) + 1e-30)))
            shown = "; ".join(
                f"{each.name} is off by {each.error:.2g} of {each.size:.2g}"
                + ("" if np.isnan(each.factor) else f", about {each.factor:.2g} times that of one process")
                for each in wrong[:3]
            )
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            step = which or f"step {self.steps}"
            self.error = MismatchError(
                f"verify: {step} of {self._name} does not compute what one process would.",

                f"a batch of {total} examples on {self._backend.num_replicas} replicas: {shown}{more}",
                likely_cause(wrong, self._backend, suspects, differs_by_rank) + self._remedy,
            )
            raise self.error
        if self._model is None and self.steps == STEPS:
            self.report()

    def _precision(self, compared: _Quantities) -> float:
        """Returns the root of the machine precision of the least precise numbers."""
        dtypes = {quantity.value.dtype for quantity in compared if quantity.value.dtype.is_floating}
        names = {dtype.name for dtype in dtypes} | {keras.config.dtype_policy().compute_dtype}
        if self._model is not None:
            names |= {layer.compute_dtype for layer in keras_model.flatten_layers(self._model)}
        if "float32" in names:
            names |= precisions_of_float32()
        wires = {"fp16": "float16", "bf16": "bfloat16"}
        names |= {wires[name] for name in [self._backend.options().get("compression")] if name in wires}
        return max(map(epsilon, names)) ** 0.5

    def report(self) -> None:
        if self.steps and self._backend.topology.is_chief:
            steps = f"{self.steps} step" + ("s" if self.steps > 1 else "")
            announce(
                f"keras_dist: verified {steps} of {self._name}: {self.compared} quantities are those of one process, "
                f"within {self.largest:.0e}."
            )


def _in_this_graph(outputs: Sequence[Any]) -> list[Any]:
    graph = tf_graphs.current()
    return [leaf for leaf in outputs if graph is not None and getattr(leaf, "graph", None) is graph]


@contextlib.contextmanager
def _rounded_again(model: keras.Model, seed: int) -> Iterator[None]:
    """In this context weights and the gradients that optimizers get are changed as by rounding."""
    generator = np.random.default_rng(seed)

    def clip(plain: Callable[..., Any], gradients: Sequence[Any]) -> Any:
        dense = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor) and tf.size(gradient) > 0]
        size = max([float(tf.reduce_max(tf.abs(gradient))) for gradient in dense], default=0.0)
        return plain([_rounded(gradient, size, generator) for gradient in gradients])

    with contextlib.ExitStack() as stack:
        for variable in model.trainable_variables:
            value = value_of(variable)
            variable.assign(_rounded(value, tf.abs(value), generator))
        for optimizer in optimizers_of(model):
            plain = getattr(optimizer, CLIP_GRADIENTS)
            stack.enter_context(attached(optimizer, CLIP_GRADIENTS, functools.partial(clip, plain)))
        yield


def _rounded(values: Any, size: Any, generator: np.random.Generator) -> Any:
    """Returns dense floats that are off by two units of the rounding of numbers of a size."""
    if not (isinstance(values, tf.Tensor) and values.dtype.is_floating):
        return values
    signs = tf.cast(generator.integers(0, 2, values.shape, np.int8) * 4 - 2, values.dtype)
    return values + tf.cast(size, values.dtype) * epsilon(values.dtype) * signs
