"""The distributed optimizer: a Keras optimizer whose `apply` first reduces the gradients over the ranks.

So clipping, the check for infinities and the update all see the gradient of the global batch, as in one process. A
rank's gradient is that of a mean over its share. It is weighted by `count / total`, so that the sum over the ranks is
the gradient of the mean over the global batch. `kd.all_reduce` does the same for a step that changes gradients itself.

Keras's Adam squares each row of a table's gradient (`tf.IndexedSlices`) before it adds rows of the same index, and
clipping by norm counts each row, so the rows must be those of one process. A lookup of the batch's own ids gives rows
for each example: the rows of all shares, concatenated, are the rows of the batch. A lookup that does not depend on the
share (positions in a transformer, the ids of the whole batch) gives the same rows in every share, so these are added.
So are the rows of an index that several shares look up, if the lookup itself has each index once.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, tf_compat, tf_graphs
from keras_dist.compat.keras_model import CLIP_GRADIENTS, accumulators, attach, plain_apply
from keras_dist.data.pipeline import fold
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.logging import announce_once, logger
from keras_dist.step import step as step_module
from keras_dist.step.dependence import StepProof
from keras_dist.step.step import Step, consistency_check_of

RULES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}
_SCALED_BY = "_keras_dist_scaled_by"
# The arguments of Keras's schedules that are rates. The value of a schedule is proportional to them.
_RATES = ("initial_learning_rate", "warmup_target", "values", "end_learning_rate")


def variable_of(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's learning rate, `None` if the rate is a schedule."""
    rate = getattr(optimizer, "learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def sum_of(optimizer: Any) -> Any:
    """Returns the learning rate of an optimizer, or the sum of those in a `MultiOptimizer`, which has none itself."""
    parts = getattr(optimizer, "optimizers", None)
    if parts is None:
        return optimizer.learning_rate
    return sum(keras.ops.cast(part.learning_rate, "float32") for part in parts)


def scale(optimizer: keras.optimizers.Optimizer, rule: str, size: int) -> None:
    """Scales the learning rate by the number of replicas, by one of `RULES`. A second call does nothing.

    An optimizer that has made steps keeps its rate: if it was loaded, the rate may have been scaled before it was
    saved, and a plain Keras file does not say so.
    """
    before = getattr(optimizer, _SCALED_BY, None)
    if before not in (None, rule):
        raise ConfigurationError(
            "The learning rate of this optimizer was already scaled by another rule.",
            f"scale_learning_rate={rule!r} after {before!r}",
            "Call kd.distribute with one rule, or compile with a new optimizer.",
        )
    if before is not None:
        return
    if (steps := int(optimizer.iterations.numpy())) > 0:
        logger().warning("the optimizer has already made %d steps: its learning rate is not scaled", steps)
    elif (variable := variable_of(optimizer)) is not None:
        variable.assign(variable * RULES[rule](size))
    else:
        optimizer.learning_rate = _scaled_schedule(optimizer, RULES[rule](size))
    attach(optimizer, _SCALED_BY, rule)


def _scaled_schedule(optimizer: Any, factor: float) -> Any:
    """Returns a schedule of the same class with scaled rates, so that saved files do not need keras_dist."""
    try:
        schedule = getattr(optimizer, "inner_optimizer", optimizer).get_config()["learning_rate"]
        is_kerass = schedule["module"] == "keras.optimizers.schedules"
    except (KeyError, TypeError, NotImplementedError):
        is_kerass = False
    if not is_kerass:
        raise NotSupportedError(
            "This learning rate cannot be scaled: it is neither a number nor one of Keras's schedules.",
            f"an optimizer {optimizer.name!r} with another schedule or function",
            "Leave `scale_learning_rate` out, and multiply by kd.num_replicas() inside your schedule.",
        )
    scaled = {
        name: keras.tree.map_structure(lambda rate: rate and rate * factor, value) if name in _RATES else value
        for name, value in schedule["config"].items()
    }
    return keras.optimizers.schedules.deserialize({**schedule, "config": scaled})


# Which output of an operation has each index once.
_UNIQUE = frozenset({
    ("Unique", 0), ("UniqueV2", 0),
    ("SparseSegmentSumGradV2", 1), ("SparseSegmentMeanGradV2", 1), ("SparseSegmentSqrtNGradV2", 1),
})  # fmt: skip


def add_rows(gradient: Any, shares: Any, lookup: Any, examples: Any = None) -> Any:
    """Adds the rows of all shares if the lookup does not depend on the share. Dense gradients stay as they are.

    The `gradient` has the rows of all `shares`, one share after the other. `lookup` is the gradient of one share, as
    the step computed it. `examples`, an int32 scalar, is the number of rows of that share; `None` if all graphs are
    for any number.
    """
    if (isinstance(shares, int) and shares == 1) or not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if _is_unique(lookup.indices):
        indices, places = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    # An eager tensor does not tell where it is from: the same ids in every share count as a lookup of positions.
    if hasattr(lookup.indices, "graph") and not StepProof([]).is_constant(lookup.indices):
        return gradient
    indices = gradient.indices
    is_eager, number = tf.executing_eagerly(), None if examples is None else tf.get_static_value(examples)
    if number == 1 and not is_eager and _has_rows(lookup.indices):
        _tell_positions("with one example on each replica")
    if not is_eager and (rows := indices.shape[0]) is not None:  # a TPU has one program for all, of fixed shapes
        own = tf_graphs.constant_of(lookup.indices)
        with tf.init_scope():
            is_tiled = own is not None and number is not None and bool(_is_tiled(tf.constant(own), number))
        parts: Any = shares if rows % shares == 0 and not is_tiled else 1
    else:
        is_tiled = _is_tiled(lookup.indices, 1 if examples is None else examples)
        parts = tf.where(_are_repeated(indices, shares) & ~is_tiled, shares, 1)
        if is_eager and parts > 1:
            _tell_positions("in a step that runs eagerly")
    values = tf.reshape(gradient.values, tf.concat([[parts, -1], tf.shape(gradient.values)[1:]], 0))
    values = tf.ensure_shape(tf.reduce_sum(values, 0), [None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, tf.reshape(indices, [parts, -1])[0], gradient.dense_shape)


def _has_rows(indices: Any) -> bool:
    """True if ids were looked up in one row, which may be that of an example."""
    ids = indices.op.inputs[0] if indices.op.type == "Reshape" else indices
    return ids.shape.rank is not None and ids.shape.rank > 1 and ids.shape[0] == 1


def _tell_positions(when: str) -> None:
    step = step_module.current()
    if step is None or step.applied is not None:  # a step that is tried out always runs eagerly
        return
    if isinstance(step.replica, int) and step.replica == 0:
        announce_once(
            "keras_dist: the same rows of a table were looked up on all replicas, so they count as looked up once for "
            f"the whole batch, as positions are. Nothing tells whether they are those of each example {when}."
        )


def _is_tiled(indices: Any, examples: Any) -> Any:
    """True if a lookup repeats the same indices for each example: a bool scalar, False for one example."""
    return tf.logical_and(tf.greater(examples, 1), _are_repeated(indices, examples))


def _are_repeated(indices: Any, times: Any) -> Any:
    """True if a vector is one part, repeated this many times: a bool scalar."""
    count = tf.size(indices)
    length = count // tf.maximum(times, 1)
    first = tf.gather(indices, tf.range(count) % tf.maximum(length, 1))
    return tf.logical_and(length * times == count, tf.reduce_all(indices == first))


def _is_unique(tensor: Any) -> bool:
    """True if a lookup has each index once, as `tf.nn.embedding_lookup_sparse` in layers with sparse inputs."""
    if not hasattr(tensor, "graph"):
        step = step_module.current()
        return step is not None and any(np.array_equal(np.sort(tensor), np.sort(ids)) for ids in step.looked_up)
    arguments: dict[int, Any] = {}  # of functions that XLA compiles
    while hasattr(tensor, "graph"):
        if (inside := tf_graphs.inside_call(tensor)) is not None:
            tensor, pairs = inside
            arguments.update({id(placeholder): argument for placeholder, argument in pairs})
        elif id(tensor) in arguments:
            tensor = arguments[id(tensor)]
        elif tensor.op.type in ("Identity", "Reshape", "Cast"):
            tensor = tensor.op.inputs[0]
        else:
            break
    return hasattr(tensor, "graph") and (tensor.op.type, tensor.value_index) in _UNIQUE


def all_reduce(backend: Backend, gradients: Any) -> Any:
    """See `kd.all_reduce`. Raises `ConfigurationError` if there are several replicas and no step runs.

    The optimizer reduces dense gradients once more, which changes nothing: the weights of the shares sum to 1. Sparse
    rows would be there twice, which changes the update of some optimizers, so it recognizes them by their indices.
    """
    if backend.num_replicas == 1:
        return gradients
    step = step_of("kd.all_reduce()")
    if step.is_plain:
        return gradients
    leaves = tf.nest.flatten(gradients)
    present = [index for index, leaf in enumerate(leaves) if leaf is not None]
    shares = [leaves[index] for index in present]
    if not backend.combines_means:
        if len(step.weighs_losses_of) > 1:
            raise NotSupportedError(
                "kd.all_reduce() can't tell whose gradients it gets: several LossScaleOptimizers have scaled a loss.",
                f"{len(step.weighs_losses_of)} optimizers with scaled losses",
                "Scale one loss in a step, or let the optimizers clip: clipnorm, clipvalue or global_clipnorm.",
            )
        is_loss_weighted = bool(step.weighs_losses_of)
        step.weighs_losses_of.clear()  # the optimizer weights the gradients from now on
        shares = step.weigh(shares, is_loss_weighted)
    # The row has no news: the optimizer's own reduction compares the ranks' data.
    sums, _ = backend.all_reduce(shares, tf.zeros([1]), step.next_name("all_reduce"))
    count = backend.num_replicas if step.shares is None else step.shares
    for index, total in zip(present, sums, strict=True):
        whole = add_rows(total, count, leaves[index], step.rows_of_share)
        # Replicas of one process get the same tensors. Each continues with its own, on its device.
        leaves[index] = tf.nest.map_structure(tf.identity, whole, expand_composites=True)
    step.reduced += tf.nest.flatten([leaves[index] for index in present], expand_composites=True)
    return tf.nest.pack_sequence_as(gradients, leaves)


def step_of(call: str) -> Step:
    """Returns the current step, or raises `ConfigurationError`: outside of one the replicas' shares are not known."""
    step = step_module.current()
    if step is None:
        raise outside_of_a_step(call)
    return step


def outside_of_a_step(call: str) -> ConfigurationError:
    """Returns the error for a loop of the script's own in which nothing is shared."""
    return ConfigurationError(
        "A reduction outside of a step: nothing says which part of the batch this replica has.",
        f"{call} outside of kd.run and `fit`",
        "Put it into the function of kd.run, and iterate over kd.shard(dataset): "
        "`for batch in kd.shard(dataset): kd.run(step, (batch,))`. Or use `fit` and `train_step`.",
    )


_ATTACHED = "_keras_dist_optimizer"


def distribute_optimizer(optimizer: keras.Optimizer, backend: Backend) -> None:
    """Makes an optimizer (the outermost, if nested) reduce its gradients over all ranks. A second call does nothing."""
    if getattr(optimizer, _ATTACHED, None) is not None:
        return
    # The replicas of one process share the accumulators, so their gradients are summed in each step.
    accumulates = optimizer.gradient_accumulation_steps and backend.topology.size > 1 and backend.replicas == 1
    reducer = (_AccumulatingReducer if accumulates else _Reducer)(optimizer, backend)
    attach(optimizer, _ATTACHED, reducer)
    reducer.attach()
    logger().debug("optimizer %s: its gradients are summed over the ranks", optimizer.name)


def accumulators_of(optimizers: Sequence[Any]) -> list[Any]:
    """Returns the variables in which each rank accumulates its own part of the gradients; none before a step."""
    accumulating = [each for each in optimizers if isinstance(getattr(each, _ATTACHED, None), _AccumulatingReducer)]
    return [variable for optimizer in accumulating for variable in accumulators(optimizer)]


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates an optimizer's variables as Keras does while it traces the first step: assignments have no effect there.

    So `ScheduleFreeAdamW` starts from zeros and not from the weights (Keras 3.15), and so does a script's Lookahead.
    """
    by_optimizer = tf_compat.patched(keras.Optimizer, assign=lambda optimizer, variable, value: None)
    named = keras.name_scope(optimizer.name, caller=optimizer)
    with keras_model.without_assignments(), by_optimizer, tf.init_scope(), keras_model.outside_stateless_scope(), named:
        optimizer.build(list(variables))


def build_at_once(optimizer: Any, variables: Sequence[Any] | None) -> bool:
    """Creates an optimizer's variables in the step that first calls it, next to the variables that it updates.

    `variables` is `None` if the caller does not say what it updates: then nothing is created. Nor is it where the
    variables are those of TPUStrategy, which makes one for each core. True if they were created.
    """
    if optimizer.built or variables is None:
        return False
    first = keras_model.backing(variables[0])
    if isinstance(first, tf.distribute.DistributedValues):
        return False
    with tf_compat.variables_made_by(), tf.device(first.device):
        build_optimizer(optimizer, variables)
    return True


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and the optimizers that it holds (`LossScaleOptimizer`, a script's Lookahead)."""
    yield optimizer
    for held in vars(optimizer).values():
        for part in held if isinstance(held, list | tuple) else [held]:
            if isinstance(part, keras.Optimizer):
                yield from parts_of(part)


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer and of the optimizers in it, and their generators' states.

    Keras does not count these states as variables of the optimizer.
    """
    found: list[Any] = []
    for part in parts_of(optimizer):
        seeds = [held.state for held in vars(part).values() if isinstance(held, keras.random.SeedGenerator)]
        found += [*part.variables, *seeds]
    return list({id(variable): variable for variable in found}.values())


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns every optimizer among a model's attributes, also in lists, tuples and dicts (GANs)."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    seen: set[int] = set()  # containers: one may contain itself

    def search(value: Any) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            found[id(value)] = value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            for item in value.values() if isinstance(value, dict) else value:
                search(item)

    for name, value in vars(model).items():
        if not name.startswith("_"):
            search(value)
    search(getattr(model, "optimizer", None))
    inner = {id(part) for optimizer in found.values() for part in parts_of(optimizer) if part is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def _with_changed(method: Callable[..., Any], change: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Returns a method of an optimizer that gets gradients as `change` returns them."""

    def wrapper(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        given = [] if trainable_variables is None else [list(trainable_variables)]  # they may come from a generator
        return method(change(grads, *given) if grads else grads, *given)

    return wrapper


FUSED_FROM = 2**20, 2**14  # weights: of all variables, and of each on average


def fused(optimizer: Any, update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an optimizer's update as one function that XLA compiles, where that pays.

    Keras writes an update as a dozen operations for each variable, each a pass over memory. Compiling takes seconds, so
    the update of a small model, or of small variables, is not compiled.
    """
    if own := [type(part).__name__ for part in parts_of(optimizer) if not keras_model.is_kerass(type(part))]:
        logger().debug("optimizer %s: its update is not fused, because %s is not Keras's", optimizer.name, own[0])
        return update

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        is_known = optimizer.built or trainable_variables is not None
        variables = keras_model.updated_variables(optimizer, trainable_variables) if is_known else []
        if tf.executing_eagerly() or not is_large(variables):
            return update(grads, trainable_variables)
        if reason := _why_not_fused(optimizer, grads, variables):
            logger().debug("optimizer %s: its update is not fused, because %s", optimizer.name, reason)
            return update(grads, trainable_variables)
        build_at_once(optimizer, variables)  # a compiled function can't create variables
        results: list[Any] = []

        @tf.function(jit_compile=True, autograph=False)
        def fused_update(grads: Sequence[Any]) -> None:
            results.append(update(grads, trainable_variables))

        logger().debug("optimizer %s: XLA compiles its update", optimizer.name)
        fused_update(list(grads))
        return results[0]

    return apply


def is_large(variables: Sequence[Any]) -> bool:
    weights = sum(math.prod(variable.shape) for variable in variables)
    return bool(variables) and weights >= max(FUSED_FROM[0], FUSED_FROM[1] * len(variables))


def _why_not_fused(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> str:
    if any(isinstance(gradient, tf.IndexedSlices) for gradient in grads):
        return "a gradient has rows of a table only"
    called = [keras_model.schedule_of(part) for part in parts_of(optimizer)]
    called += [getattr(variable, "constraint", None) for variable in variables]
    if own := [each for each in called if each is not None and not keras_model.is_kerass(each)]:
        return f"it calls the script's own {own[0]!r}"
    if len({keras_model.backing(variable).device for variable in variables}) > 1:
        return "its variables are on several devices"
    return ""


class _Reducer:
    def __init__(self, optimizer: Any, backend: Backend) -> None:
        self._optimizer = optimizer
        self._backend = backend
        self._consistency = consistency_check_of(backend.topology.size)

    def attach(self) -> None:
        # Not around `once`, in which other replicas continue with their steps.
        update = keras_model.unobserved()(plain_apply(self._optimizer))
        if self._backend.uses_xla:
            update = fused(self._optimizer, update)
        apply = functools.partial(self._backend.once, update)
        attach(self._optimizer, "apply", _with_changed(apply, self._weigh_and_reduce))

    def _weigh_and_reduce(self, gradients: list[Any], trainable_variables: Any = None) -> list[Any]:
        step = self._step()
        if not step.is_plain:
            shares = [None if step.is_reduced(gradient) else gradient for gradient in gradients]
            reduced = self._reduce(self._weigh(shares, step), step, step.fingerprint)
            pairs = zip(gradients, reduced, strict=True)
            gradients = [own if step.is_reduced(own) else total for own, total in pairs]
        if step.applied is not None:
            step.applied.append((self._optimizer, gradients, trainable_variables))
        are_new = build_at_once(self._optimizer, trainable_variables)  # Keras would initialize them after the trace
        if self._backend.mirrors:  # makes the variables that each device updates, before any of them changes
            self._backend.will_update(variables_of(self._optimizer), are_new=are_new)
        return gradients

    def _step(self) -> Step:
        return step_of(f"the update of the optimizer {self._optimizer.name!r}")

    def _weigh(self, gradients: Sequence[Any], step: Step) -> list[Any]:
        if self._backend.combines_means:
            return list(gradients)
        return step.weigh(gradients, id(self._optimizer) in step.weighs_losses_of)

    def _reduce(self, gradients: Sequence[Any], step: Step, fingerprint: Any) -> list[Any]:
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        summands = [gradients[index] for index in present]
        row = tf.stack([tf.cast(number, tf.float32) for number in (fingerprint, sum_of(self._optimizer))])
        worked = None if step.stopwatch is None else step.stopwatch.worked(after=summands)
        row = row if worked is None else tf.concat([row, worked[None]], 0)
        sums, table = self._backend.all_reduce(summands, row, step.next_name("gradients"))
        if step.stopwatch is not None:
            step.stopwatch.synchronized(worked, table[:, -1])
        if self._backend.topology.size > 1:
            sums = self._consistency.check(table[:, :2], sums)
        examples = step.rows_of_share if any(isinstance(total, tf.IndexedSlices) for total in sums) else None
        reduced = list(gradients)
        for index, total in zip(present, sums, strict=True):
            reduced[index] = add_rows(total, self._backend.num_replicas, gradients[index], examples)
        return reduced


class _AccumulatingReducer(_Reducer):
    """Accumulates gradients on each rank, and reduces them once per update.

    An update begins with clipping the accumulated gradients, so they are reduced there. Whatever is left at other times
    counts once, on whichever rank it is: `weights.synchronize` moves it to the chief, whose state is saved.
    """

    def __init__(self, optimizer: Any, backend: Backend) -> None:
        super().__init__(optimizer, backend)
        self._folded = tf_compat.host_variable(0, "folded", dtype=tf.int64)

    def attach(self) -> None:
        optimizer, clip = self._optimizer, getattr(self._optimizer, CLIP_GRADIENTS)
        update = keras_model.unobserved()(plain_apply(optimizer))
        attach(optimizer, "apply", _with_changed(update, self._weigh_and_fold))
        attach(optimizer, CLIP_GRADIENTS, _with_changed(clip, self._reduce_folded))

    def _weigh_and_fold(self, gradients: list[Any], trainable_variables: Any = None) -> list[Any]:
        """A step that only accumulates sends nothing. Its fingerprint is folded into that of the next update."""
        step = self._step()
        if not step.is_plain:
            fold(self._folded, step.fingerprint)
            gradients = self._weigh(gradients, step)
        if step.applied is not None:
            whole = gradients if step.is_plain else self._reduce(gradients, step, step.fingerprint)
            step.applied.append((self._optimizer, whole, trainable_variables))
        return gradients

    def _reduce_folded(self, gradients: list[Any]) -> list[Any]:
        step = self._step()
        return gradients if step.is_plain else self._reduce(gradients, step, tf.cast(self._folded, tf.float32))
