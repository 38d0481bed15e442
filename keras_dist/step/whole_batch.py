"""What makes a step on a share a part of the step on the whole batch.

The denominators of its losses and the statistics of its layers are those of the whole batch, and each share draws its
own random numbers. What a step assigns to variables by hand is combined over the shares:

- A value that does not depend on the share (a moving average of weights, a count of steps) is the same on all replicas.
- A value from the share is combined by the variable's `aggregation`: the changes are summed, or averaged by examples.
- Without an `aggregation` nobody can know how, and it is refused. Keras's own normalizations are averaged.

A layer of the user's own that collects state, or adds a loss that is not a mean over its examples (a codebook, a queue,
a running mean), gets the inputs of all shares. So every replica computes what one process would, and returns the
outputs for its own share. What a layer does is read from the graph of its `call`, which is traced once more for this.

Keras compiles a whole step, but XLA cannot compile an operation that waits for other processes. So here the outermost
layer that a step calls, usually the model, is one compiled function, and so is its gradient. Whatever communicates with
other replicas stays outside. A layer that communicates in its own forward pass (synchronized BatchNormalization,
`kd.gather`) runs without XLA, and the layers inside it are compiled instead. One log line names it.
"""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_layers, keras_losses, keras_model, keras_random, keras_strategy, tf_graphs
from keras_dist.compat.keras_layers import Outside
from keras_dist.compat.keras_model import attached, attached_to
from keras_dist.compat.keras_random import layers_that_mix_examples
from keras_dist.compat.tf_compat import context_value, noted_lookups, observed_clipping
from keras_dist.data.shares import static_length
from keras_dist.errors import NotSupportedError
from keras_dist.logging import announce_once, logger, warn_once
from keras_dist.step import losses
from keras_dist.step import step as step_module
from keras_dist.step.dependence import Arguments, Kind, Proof, has_rows, same_length, traced
from keras_dist.step.gathering import gather, take_rows, whole_draws
from keras_dist.step.metrics import counted_by_share
from keras_dist.step.step import Step, check_condition


def explain_compilation(error: BaseException) -> BaseException:
    """Returns the error for an operation that XLA doesn't have, or `error` itself."""
    is_of_tensorflow = isinstance(error, tf.errors.OpError)
    found = re.search(r"unsupported operations when .* on XLA_\w+: (.*)", str(error)) if is_of_tensorflow else None
    if found is None:
        return error
    return NotSupportedError(
        "XLA cannot compile an operation of the model, in one process neither.",
        f"jit_compile=True, and {found[1]}",
        "Leave `jit_compile` out of `compile`, or use another operation. A layer that XLA can't compile should set "
        "`supports_jit = False`: Keras then turns XLA off for the model.",
    )


def compiled_layers(model: keras.Model, is_chief: bool) -> contextlib.AbstractContextManager[None]:
    """Compiles the layers that a step calls, in this context, if the model was compiled with XLA."""
    outside = 0  # layers that are not compiled

    def call(layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal outside
        if isinstance(tf_graphs.REFUSAL.get(), Outside) or tf.executing_eagerly() or keras_layers.is_symbolic():
            return plain(*args, **kwargs)
        try:
            return _compiled_call(layer, plain, (args, kwargs))
        except Outside as error:
            before, reason = outside, str(error)
        outputs = plain(*args, **kwargs)
        if outside == before:  # not only because of a layer inside it
            outside += 1
            step = step_module.current()
            # Not in a step that is only compared with the one on the ranks, where a layer may have another reason.
            if is_chief and (step is None or not step.is_plain):
                warn_once(
                    "jit_compile: XLA cannot compile the layer %r, which %s. It runs without XLA; the others are "
                    "compiled.", layer.name, reason,
                )  # fmt: skip
        return outputs

    parts = {id(layer): layer for layer in keras_model.flatten_layers(model)} if keras_layers.is_compiled(model) else {}
    return attached_to(parts.values(), "call", lambda layer, plain: functools.partial(call, layer, plain))


def _compiled_call(layer: Any, plain: Callable[..., Any], arguments: Any) -> Any:
    """Calls a layer as a pure function of its arguments and variables, which XLA compiles.

    So it does not matter where the variables are, and the side effects of the layer are made by the step itself.
    """
    leaves, variables = keras.tree.flatten(arguments), keras_layers.variables_of(layer)
    places = [index for index, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
    tensors = [leaves[index] for index in places]
    traced: list[Any] = []  # what the layer returns, which layers add its losses, and the variables that it assigns

    def pure(tensors: Sequence[Any], masks: Mapping[int, Any], values: Sequence[Any]) -> Any:
        """Returns the outputs, their masks, the losses, and what is assigned."""
        keras_layers.set_masks(tensors, masks)
        for index, tensor in zip(places, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = keras.tree.pack_sequence_as(arguments, leaves)
        scope = keras_layers.PureScope(layer, variables, values)
        refusal = Outside("exchanges numbers with the other replicas")
        with keras_strategy.initialized_at_once(), context_value(tf_graphs.REFUSAL, refusal), scope:
            returned = plain(*args, **kwargs)
            losses, owners = scope.take_losses()
        traced[:] = returned, owners, list(scope.assigned.values())
        outputs = [leaf for leaf in keras.tree.flatten(returned) if tf.is_tensor(leaf)]
        assigned = [scope.get_current_value(variable) for variable in traced[2]]
        return outputs, keras_layers.masks_of(outputs), losses, assigned

    inputs = [tensors, keras_layers.masks_of(tensors), list(map(keras_layers.current_value, variables))]
    compiled = tf.function(pure, jit_compile=True, autograph=False)
    graph = compiled.get_concrete_function(*inputs).graph
    results = _with_loops(compiled, graph, inputs) if keras_layers.has_loop(graph) else compiled(*inputs)
    outputs, masks, losses, values = results
    returned, owners, assigned = traced
    # What the layer has done, in the step itself.
    keras_layers.set_masks(outputs, masks)
    for variable, value in zip(assigned, values, strict=True):
        variable.assign(value)
    for owner, loss in zip(owners, losses, strict=True):
        owner.add_loss(loss)
    following = iter(outputs)
    return keras.tree.map_structure(lambda leaf: next(following) if tf.is_tensor(leaf) else leaf, returned)


def _with_loops(function: Callable[..., Any], graph: Any, inputs: Any) -> Any:
    """Calls a compiled function with loops. Its gradient is one compiled function too, which computes it once more.

    XLA does not return what a loop keeps of each iteration for its gradient.
    """
    captured = [outer for outer, _ in graph.captures if outer.dtype.is_floating]
    if captured:
        raise Outside(f"has a loop that uses {captured[0].name!r}, which is no argument of the layer")
    structure: list[Any] = []

    def called(tensors: Sequence[Any]) -> list[Any]:
        structure[:] = [function(*tf.nest.pack_sequence_as(inputs, tensors, expand_composites=True))]
        return tf.nest.flatten(structure, expand_composites=True)

    @tf.function(jit_compile=True, autograph=False)
    def gradients(tensors: Sequence[Any], upstream: Sequence[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(floats := [tensor for tensor in tensors if tensor.dtype.is_floating])
            outputs = called(tensors)
        pairs = [pair for pair in zip(outputs, upstream, strict=True) if pair[0].dtype.is_floating]
        targets, given = zip(*pairs, strict=True)
        found = iter(tape.gradient(list(targets), floats, list(given)))
        return [next(found) if tensor.dtype.is_floating else None for tensor in tensors]

    @tf.custom_gradient
    def pure(*tensors: Any) -> Any:
        return called(tensors), lambda *upstream: gradients(tensors, upstream)

    results = pure(*tf.nest.flatten(inputs, expand_composites=True))
    return tf.nest.pack_sequence_as(structure, results, expand_composites=True)[0]


COMBINED = ("sum", "mean")


def _assign(variable: Any, plain: Callable[[Any], Any], value: Any) -> Any:
    value, step = plain(value), step_module.current()
    if step is None:
        return value
    is_unknown = tf.executing_eagerly() or step.data is None
    if variable.aggregation in COMBINED:  # a static number of examples is a constant: it does not show in the graph
        step.own[id(variable)] = variable
    elif not is_unknown and not _depends_on(step, value) and not _counts(step, value):
        step.whole[id(variable)] = variable
    elif variable.aggregation == "none" and not is_unknown:
        raise NotSupportedError(
            "A step assigns a variable what it computes from its share of the batch. How the values of all shares make "
            "that of the whole batch can't be seen.",
            f"variable {variable.path!r} with aggregation='none'",
            "Assign it in the `call` of a layer, which then sees the whole batch; or create it with aggregation='sum' "
            "if the changes of the shares add up (a count), 'mean' if their mean over the examples is right.",
        )
    return value


def _depends_on(step: Step, value: Any) -> bool:
    """True if a value depends on the examples of the share, or it can't be seen in the step's own graph."""
    leaves = [leaf for leaf in tf.nest.flatten(step.data, expand_composites=True) if tf.is_tensor(leaf)]
    return any(leaf.graph is not value.graph for leaf in leaves) or not _proof(step).is_constant(value)


def _proof(step: Step, others: Sequence[tuple[Any, Kind]] = ()) -> Proof:
    given = tf.nest.flatten([step.data, step.examples], expand_composites=True)
    known = [*((tensor, Kind.CONSTANT) for tensor in step.reduced), *others]
    return Proof(filter(tf.is_tensor, given), {tensor.name: kind for tensor, kind in known if tf.is_tensor(tensor)})


def _counts(step: Step, value: Any) -> bool:
    """True if a value is another one plus the number of examples in the share, which is a constant if it is static.

    If the share has one example, more likely steps are counted.
    """
    length = static_length(step.data)
    if length in (None, 1) or value.op.type not in ("Add", "AddV2"):
        return False
    return any(tf_graphs.constant_of(part) == length for part in value.op.inputs if part.shape.rank == 0)


@contextlib.contextmanager
def combined_assignments(exchange: Backend, model: keras.Model, step: Step) -> Iterator[None]:
    """Combines what the replicas assign to variables with an `aggregation`, at the end of this context."""
    variables = [variable for variable in keras_layers.own_state(model) if variable.aggregation in COMBINED]
    before = [(variable, tf.identity(variable.value)) for variable in variables]
    yield
    assigned = [pair for pair in before if id(pair[0]) in step.own]
    combine(exchange, step, assigned)
    step.whole.update({id(variable): variable for variable, _ in assigned})


def combine(exchange: Backend, step: Step, before: Sequence[tuple[Any, Any]]) -> None:
    """Combines, in one reduction, what the replicas have assigned to variables: pairs with what they had before.

    A replica's change counts in full if the variable's aggregation is "sum", otherwise by its number of examples. Where
    that would be a mean of integers that the script has not asked for, the first replica's change counts.
    """
    if not before:
        return
    changes = []
    for variable, old in before:
        new = tf.identity(keras_model.backing(variable))
        change = tf.cast(new, step.dtype) - tf.cast(old, step.dtype)
        change = tf.where(new == old, tf.zeros_like(change), change)  # both may be infinite
        has_mean = variable.aggregation == "mean" or keras_strategy.is_float(variable)
        if variable.aggregation == "sum":
            weight = tf.cast(step.count > 0, step.dtype)
        elif variable.aggregation == "only_first_replica" or not has_mean:
            weight = tf.cast(tf.equal(step.replica, 0), step.dtype)
        else:
            weight = step.part
        # Not 0 × NaN: an empty share may have computed NaN.
        changes.append(tf.reshape(tf.math.multiply_no_nan(change, weight), [-1]))
    total = exchange.all_reduce_exact(tf.concat(changes, 0), step.next_name("assigned"))
    sums = tf.split(total, [tf.size(change) for change in changes], num=len(changes))
    for (variable, old), change in zip(before, sums, strict=True):
        # Summed in float64, then rounded once.
        wide = tf.cast(old, step.dtype) + tf.reshape(change, tf.shape(old))
        value = tf.cast(tf.round(wide) if old.dtype.is_integer else wide, old.dtype)
        keras_model.backing(variable).assign(value)


# Layers that need their share only, and the arguments, such as `training`, with which this was found.
_Known = MutableMapping[keras.layers.Layer, set[Any]]
_known_eagerly: _Known = weakref.WeakKeyDictionary()  # kept so that eager steps need not find it out each time


def _call(
    exchange: Backend, layer: Any, plain: Any, effects_of: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    step = step_module.current()
    arguments = Arguments((args, kwargs))
    if step is None or not arguments.rows:
        return plain(*args, **kwargs)
    effects = effects_of(arguments)
    if effects is None or effects is _UNTRACED:
        adds = contextlib.nullcontext() if effects is None else attached(layer, "add_loss", _adds_loss)
        with contextlib.suppress(_AddsLoss), adds:
            return plain(*args, **kwargs)
        effects = _UNKNOWN
    logger().debug("the layer %r computes on the whole batch", layer.name)
    gathered = [gather(exchange, step, rows) for rows in arguments.rows]
    step.whole.update({id(variable): variable for variable in effects.assigned})
    whole_args, whole_kwargs = arguments.with_rows([whole for whole, _ in gathered])
    with step_module.entered(None):
        outputs = plain(*whole_args, **whole_kwargs)
    leaves = keras.tree.flatten(outputs)
    have_rows = effects.have_rows or [tf.is_tensor(leaf) and same_length(leaf, gathered[0].rows) for leaf in leaves]
    for index, (leaf, is_of_rows) in enumerate(zip(leaves, have_rows, strict=True)):
        if is_of_rows:  # for all examples, each one equally many
            each = tf.shape(leaf)[0] // tf.maximum(tf.shape(gathered[0].rows)[0], 1)
            leaves[index] = take_rows(leaf, gathered[0].start * each, tf.shape(arguments.rows[0])[0] * each)
    return keras.tree.pack_sequence_as(outputs, leaves)


class _Effects(NamedTuple):
    """Why a layer must see the whole batch."""

    assigned: list[Any]  # variables that it assigns
    have_rows: list[bool] | None  # whether each of its outputs has rows for the examples; `None` if it can't be traced
    are_shared: bool  # what it assigns and adds is the same for all shares, or a mean


_UNKNOWN = _Effects([], None, False)
_UNTRACED = _Effects([], None, False)  # unknown, but it has no state: it matters only if it adds a loss


class _AddsLoss(Exception):
    """A layer that could not be traced adds a loss: it is called again, on the whole batch."""


def _adds_loss(loss: Any) -> None:
    raise _AddsLoss


def _effects(known: _Known, layer: Any, plain: Any, has_state: bool, arguments: Arguments) -> _Effects | None:
    """Returns what a layer does, `None` if it need not see the whole batch."""
    if not has_state and arguments.settings in known.get(layer, ()):
        return None
    adds = False

    def inspect(rows: Sequence[Any]) -> _Effects:
        nonlocal adds
        args, kwargs = arguments.with_rows(rows)
        with keras_layers.recorded(layer) as record:
            try:
                outputs = keras.tree.flatten(plain(*args, **kwargs))
            finally:
                adds = bool(record.losses)
        proof = Proof([*rows, *filter(has_rows, record.outputs)])
        assigned = [variable for variable, value in record.assigned if not proof.is_constant(value)]
        are_shared = not assigned and all(proof.is_mean(loss) for loss in record.losses)
        harmless = [(part, Arguments(given)) for part, given in record.called if part not in record.adding]
        for part, given in harmless + [(layer, arguments)] * (not adds):
            known.setdefault(part, set()).add(given.settings)
        return _Effects(assigned, [has_rows(output) for output in outputs], are_shared)

    try:
        effects = traced(arguments, inspect)
    except Exception as error:  # an eager layer: on the whole batch any layer is right
        logger().debug("the layer %r cannot be traced: %s", layer.name, error)
        return _UNKNOWN if adds or has_state else _UNTRACED
    return None if effects.are_shared else effects


@contextlib.contextmanager
def whole_batch(
    backend: Backend, prepare_optimizer: Callable[[Any], None], model: keras.Model | None = None,
    prepare: Callable[[Any], Any] = lambda values: values, exact: bool | None = False,
) -> Iterator[None]:  # fmt: skip
    """Makes the losses, gradients and statistics of a share those of the global batch. Each share has its own noise.

    Args:
        prepare_optimizer: Distributes an optimizer that the step applies and that is not distributed yet.
        model: The model whose step runs, `None` in a custom training loop.
        prepare: Takes the losses of single entries before the reduction and returns those to use.
        exact: True if noise and the moments of every BatchNormalization are those of the global batch too. The steps
            must know where their share starts. If it is `None`, the layers where they are not are named.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_model.found_optimizers(prepare_optimizer))
        if not backend.combines_means:
            stack.enter_context(keras_model.scaled_losses(step_module.weigh_loss))
        stack.enter_context(tf_graphs.checked_conditions(functools.partial(agree_on_condition, backend)))
        stack.enter_context(whole_draws(backend) if exact else keras_random.replica_streams(_replica))
        stack.enter_context(keras_random.replica_operations(_replica))
        stack.enter_context(keras_losses.wrapped_losses(functools.partial(losses.of_loss, backend)))
        rescale = functools.partial(losses.rescale, backend.all_reduce_exact)
        stack.enter_context(keras_losses.rescaled_losses(rescale, prepare))
        statistics = functools.partial(sum_statistics, backend.all_reduce_exact)
        stack.enter_context(
            keras_losses.batch_statistics(statistics, bool(exact), lambda: getattr(step_module.current(), "rows", None))
        )
        stack.enter_context(keras_losses.weighted_scalars(lambda: getattr(step_module.current(), "part", None)))
        observe = _check_loss if model is None else lambda loss, gradients: None
        stack.enter_context(keras_losses.added_losses(step_module.weight_of_sum, observe))
        if model is None:
            stack.enter_context(observed_clipping(_check_clipped))
        stack.enter_context(keras_layers.padded_texts(functools.partial(_greatest, backend)))
        if model is not None:
            stack.enter_context(counted_by_share(backend, model))
            # Lets layers that must see the whole batch do so; those that mix examples see it whatever they do.
            others = layers_that_mix_examples(model) if exact else ()
            known = _known_eagerly if tf.executing_eagerly() else weakref.WeakKeyDictionary()
            layers = [(layer, layer.call, has_state) for layer, has_state in keras_layers.own_layers(model)]
            for layer, plain, has_state in layers:
                effects = functools.partial(_effects, known, layer, plain, has_state)
                stack.enter_context(attached(layer, "call", functools.partial(_call, backend, layer, plain, effects)))
            for layer in others:
                call = functools.partial(_call, backend, layer, layer.call, lambda arguments: _UNKNOWN)
                stack.enter_context(attached(layer, "call", call))
            # Refuses assignments that nothing says how to combine. It sees those in a graph.
            for variable in keras_layers.own_state(model):
                stack.enter_context(attached(variable, "assign", functools.partial(_assign, variable, variable.assign)))
            stack.enter_context(compiled_layers(model, backend.topology.is_chief))
        if tf.executing_eagerly():
            stack.enter_context(noted_lookups(_note_lookup))
        inexact: list[Any] | None = [] if exact is None and backend.topology.is_chief else None
        by_script = functools.partial(_check_assigned, backend) if model is None else None
        if by_script is not None or inexact is not None:
            stack.enter_context(keras_layers.observed_layers(by_script, inexact))
            stack.callback(_tell_inexact, inexact, backend)
        yield


def _note_lookup(ids: Any) -> None:
    if (step := step_module.current()) is not None:
        step.looked_up.append(ids)


def _check_loss(loss: Any, gradients: Any) -> None:
    """Refuses the gradient of a sum over the share in a custom loop: the shares' losses count as means."""
    step = step_module.current()
    if step is None or step.is_plain:
        return
    step.gradients += filter(tf.is_tensor, tf.nest.flatten(gradients, expand_composites=True))
    if step.data is None or tf.executing_eagerly() or loss.shape.rank != 0:
        return
    by_library = [*((mean, Kind.MEAN) for mean in step.means), (step.count, Kind.OTHER), (step.total, Kind.OTHER)]
    if _adds_sum(_proof(step, by_library), loss):
        raise NotSupportedError(
            "A step of kd.run computes the gradient of a sum over its share of the batch; a loss counts as a mean.",
            f"a sum over the examples, {loss.name!r}",
            "Take the mean, tf.reduce_mean(loss), or a loss of Keras with reduction='sum'.",
        )


def _check_clipped(arguments: Any) -> None:
    """Refuses to clip the gradients of a share in a custom loop."""
    step = step_module.current()
    if step is None or keras_model.applying() is not None:  # an optimizer clips those of the whole batch
        return
    clipped = [each for each in tf.nest.flatten(arguments, expand_composites=True) if tf.is_tensor(each)]
    if step.gradients and any(_depends_on_gradients(step, each) for each in clipped):
        raise NotSupportedError(
            "A step of kd.run clips the gradients of its share of the batch.",
            "a gradient that was not reduced",
            "Call gradients = kd.all_reduce(gradients) before, or let the optimizer clip: clipnorm, clipvalue, "
            "global_clipnorm.",
        )


def _depends_on_gradients(step: Step, value: Any) -> bool:
    """True if a value is a gradient of the share; in a graph, if it is computed from one that was not reduced."""
    if any(value is gradient for gradient in step.gradients):
        return True
    if tf.executing_eagerly() or (value := tf.convert_to_tensor(value)).graph is not step.gradients[0].graph:
        return False
    kinds = {tensor.name: Kind.OTHER for tensor in step.gradients}
    return not Proof([], kinds | {tensor.name: Kind.CONSTANT for tensor in step.reduced}).is_constant(value)


def _adds_sum(proof: Proof, loss: Any) -> bool:
    if (kind := proof.kind(loss)) is Kind.OTHER and loss.op.type in ("Add", "AddV2", "AddN", "Identity"):
        return any(_adds_sum(proof, part) for part in loss.op.inputs)
    return kind is Kind.SUM


def _is_of_share(step: Step, value: Any) -> bool | None:
    """Returns whether a value depends on the examples of the share, `None` if that can't be seen."""
    values = [each for each in tf.nest.flatten(value, expand_composites=True) if tf.is_tensor(each)]
    if values and (tf.executing_eagerly() or step.data is None):
        return None
    return any(_depends_on(step, each) or _counts(step, each) for each in map(tf.convert_to_tensor, values))


def _check_assigned(backend: Backend, variable: Any, value: Any) -> None:
    """Looks at what a step of a custom loop assigns: a `tf.Variable`, or a variable of Keras.

    State is combined over the replicas, if the script does not say how, by a default. Other variables are not: there a
    value must not depend on the share.
    """
    step = step_module.current()
    if step is None or step.is_plain or keras_model.applying() is not None:  # an optimizer does it on all ranks alike
        return
    is_of_keras = isinstance(variable, keras.Variable)
    is_state = is_of_keras and not variable.trainable
    if is_state and (variable.aggregation in COMBINED or keras_random.is_seed(variable)):
        return
    name = variable.path if is_of_keras else variable.name
    if not is_of_keras and backend.replicas > 1:
        raise NotSupportedError(
            "A step of kd.run assigns a tf.Variable, which each of the replicas in this process would do.",
            f"tf.Variable {name!r}, {backend.replicas} replicas",
            "Make it a keras.Variable(..., trainable=False), or assign it outside of the step.",
        )
    is_of_share = _is_of_share(step, value)
    if is_of_share is False:
        return
    if is_state:
        how = "averaged over" if keras_strategy.is_float(variable) else "taken from the first of"
        text = (
            f"assigns the variable {name!r}, which has no aggregation: what the replicas assign is {how} the "
            "replicas. If it depends on their shares, create it with aggregation='sum' or 'mean', or compute it from "
            "kd.gather(...)."
        )
    elif is_of_share is None:
        text = (
            f"assigns the variable {name!r}, and nothing combines what the replicas assign. If it depends on their "
            "shares, compute it from what kd.all_reduce(...) or kd.gather(...) returns."
        )
    else:
        raise NotSupportedError(
            "A step of kd.run assigns a variable what it computes from its share of the batch, and nothing combines "
            "what the replicas assign.",
            f"variable {name!r}",
            "Let an optimizer apply the gradients, or reduce them before: gradients = kd.all_reduce(gradients). State "
            "belongs into a keras.Variable(..., trainable=False, aggregation='mean').",
        )
    if backend.topology.is_chief:
        announce_once(f"keras_dist: a step of kd.run {text}")


def _tell_inexact(layers: Sequence[Any] | None, backend: Backend) -> None:
    """Names, once, the layers whose numbers intentionally differ from those of one process."""
    if layers and backend.num_replicas > 1 and backend.not_of_one_process is None:
        unique = list(dict.fromkeys(repr(layer.name) for layer in layers))
        names = ", ".join(unique[:3]) + (" ..." if len(unique) > 3 else "")
        announce_once(
            f"keras_dist: layers that normalize by a share or draw other noise on each replica: {names}. exact=True "
            "prevents it, exact=False this line."
        )


def agree_on_condition(backend: Backend, condition: Any) -> Any:
    """Returns a bool tensor, or fails on all replicas if it differs between them."""
    if (step := step_module.current()) is None:
        return condition
    condition = tf.convert_to_tensor(condition)
    number = backend.all_reduce_exact(tf.cast(condition, tf.float64), step.next_name("condition"))
    return check_condition(number, backend.num_replicas, condition)


def _greatest(exchange: Backend, number: Any) -> Any:
    if (step := step_module.current()) is None:
        return number
    return tf.reduce_max(exchange.all_gather(number[None], step.next_name("width")))


def _replica() -> Any:
    step = step_module.current()
    # An update is the same on all replicas, including any noise in it.
    return None if step is None or keras_model.applying() is not None else step.replica


def sum_statistics(sum_over_replicas: Callable[[Any, str], Any], numbers: Any) -> Any:
    """Sums the statistics of a layer over the replicas, for `BatchNormalization(synchronized=True)`.

    Gradients flow back to all replicas. A replica's gradient is weighted by its share when gradients are reduced. But
    the gradient of this sum comes from the losses of all replicas, so it is weighted by their shares here, unless the
    losses were. Outside of a distributed step `numbers` stay as they are.
    """
    step = step_module.current()
    if step is None:
        return numbers
    name = step.next_name("statistics")

    @tf.custom_gradient
    def total(numbers: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            part = tf.cast(step.part_of_gradients, upstream.dtype)
            weighted_sum = sum_over_replicas(tf.math.multiply_no_nan(upstream, part), f"{name}_gradient")
            return tf.math.divide_no_nan(weighted_sum, part)

        # The single row of an empty share does not count.
        counted = tf.where(step.count > 0, numbers, tf.zeros_like(numbers))
        return sum_over_replicas(counted, name), gradient

    return total(numbers)
