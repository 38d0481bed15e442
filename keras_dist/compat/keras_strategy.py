"""Private names of Keras for several replicas in one process. Keras 3.13 to 3.15, 2026-11."""

import collections
import contextlib
import copy
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.losses import loss as loss_module
from keras.src.random import seed_generator
from tensorflow.python.distribute import values_util

from keras_dist.compat import keras_model, keras_random, tf_compat, tf_graphs
from keras_dist.compat.keras_losses import weighted_updates
from keras_dist.compat.keras_model import attach, attached_to, backing, flatten_layers, global_state
from keras_dist.compat.tf_compat import patched


def unscaled_losses() -> contextlib.AbstractContextManager[None]:
    """Keeps Keras from dividing losses by the number of replicas, which it does not do for scalar losses."""
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    return patched(loss_module, **{name: lambda value: value for name in names})


@contextlib.contextmanager
def updates_outside_of_replicas() -> Iterator[None]:
    """Lets optimizers and metrics update a strategy's variables where no replica runs, in this context."""
    interim, scaling = tf.__internal__.distribute.interim, keras.optimizers.LossScaleOptimizer
    plain = values_util.on_read_assign_cross_replica

    def assign_to_first(variable: Any, value: Any, read_value: bool = True) -> Any:
        # TensorFlow gives each replica its part of a sum, and rounds it if it is an integer: 2 of 8 replicas is 0.
        if variable.aggregation != tf.VariableAggregation.SUM:
            return plain(variable, value, read_value)
        first, *others = variable.values
        for other in others:
            other.assign(tf.zeros_like(other))
        return first.assign(value, read_value=read_value)

    with (
        patched(interim, maybe_merge_call=lambda fn, strategy, *args, **kwargs: fn(strategy, *args, **kwargs)),
        patched(scaling, _tf_apply=scaling._common_apply),
        patched(values_util, on_read_assign_cross_replica=assign_to_first),
    ):
        yield


@contextlib.contextmanager
def weighted_averages(model: keras.Model, count: Callable[[], Any], part: Callable[[], Any]) -> Iterator[None]:
    """Makes the averages of losses count real rows only, in this context. Keras counts all rows.

    Losses that a step of the script's own counts without a weight are left to `keras_losses.weighted_scalars`. `count`
    returns the number of real rows, `part` the fraction of the batch in them: the parts of all shares sum to 1.
    """
    of_outputs = getattr(getattr(model, "_compile_loss", None), "metrics", ())
    outputs = [metric for metric in of_outputs if metric is not None]
    of_tracker = weighted_updates([model._loss_tracker], lambda rows: None if rows is None else count())
    with of_tracker, weighted_updates(outputs, lambda _: part()):
        yield


def skip_gradient_reduction(optimizer: Any) -> None:
    """Keeps an optimizer from summing gradients over replicas itself, which it does after clipping."""
    attach(optimizer, "_all_reduce_sum_gradients", lambda grads_and_vars: grads_and_vars)


def metric_values(
    metrics: list[Any], look: Callable[[Any, Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Passes the values that metrics average (`metrics=["mae"]`, a function) to `look`, in this context."""

    def seen(metric: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        def values_of(*args: Any, **kwargs: Any) -> Any:
            values = plain(*args, **kwargs)
            look(metric, values)
            return values

        return values_of

    return attached_to([metric for metric in metrics if hasattr(metric, "_fn")], "_fn", seen)


def layers_with_losses(model: keras.Model) -> list[str]:
    return [layer.name for layer in flatten_layers(model) if layer._losses]


def layers_with_metrics(model: keras.Model) -> list[str]:
    return [layer.name for layer in flatten_layers(model) if layer._metrics]


def batch_size_of(adapter: Any) -> int | None:
    if adapter.batch_size is not None:
        return int(adapter.batch_size)
    for name in ("_first_batches", "py_dataset"):  # of a generator, of a `PyDataset`
        if (batches := getattr(adapter, name, None)) is not None:
            return int(tf.nest.flatten(batches[0])[0].shape[0])
    return None


def batches_are_full(adapter: Any) -> bool | None:
    """Returns whether all batches are full, `None` if the data are not arrays."""
    return None if adapter.batch_size is None else not adapter.has_partial_batch


class ReplicaScope(keras.StatelessScope):
    """Intercepts the variables that a replica with `count` examples reads or assigns, see docs/how_it_works.md.

    `metrics` are variables that are updated by one replica after the other, whatever their `aggregation`. `own` returns
    what the replica reads in place of a variable: its copy. If there are copies, `assign_own` assigns there what is the
    same on all replicas, as on ranks: weights that are trained, random states. So gradients with respect to them may
    follow, and they may be assigned in a loop. `refuse` is called with another variable that is assigned in another
    graph: its new value could not be used outside of it.
    """

    def __init__(
        self, count: Any, metrics: Collection[Any], own: Callable[[Any], Any] = backing,
        assign_own: Callable[[Any, Any], None] | None = None, refuse: Callable[[Any], object] = lambda variable: None,
    ) -> None:  # fmt: skip
        super().__init__(collect_losses=True, initialize_variables=False)
        self.count, self._own, self._assign_own, self._refuse = count, own, assign_own, refuse
        self._metrics = {id(variable) for variable in metrics}
        self.of_batch: set[int] = set()  # ids of variables that are assigned what the whole batch gives
        self._assigned: dict[int, Any] = {}
        self.loss_ids: dict[int, set[int]] = collections.defaultdict(set)  # by layer
        self._graph = tf_graphs.current()

    def assigned(self) -> list[Any]:
        return list(self._assigned.values())

    def clear(self) -> None:
        self.state_mapping.clear()
        self._assigned.clear()

    # --- What Keras calls ---

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self._adds_up(variable):
            if not tf.get_static_value(self.count) and id(variable) not in self.of_batch:
                value = tf.where(self.count > 0, value, tf.cast(variable._value, value.dtype))
            assign(variable, value)
        elif self._assign_own is not None and (variable.trainable or keras_random.is_seed(variable)):
            self._assign_own(variable, value)
        else:
            if tf_graphs.current() is not self._graph:
                self._refuse(variable)
            self.state_mapping[id(variable)] = tf.stop_gradient(value)  # none flows through a variable that is assigned
            self._assigned[id(variable)] = variable

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self.state_mapping:
            return self.state_mapping[id(variable)]
        return variable._value if self._adds_up(variable) else self._own(variable)

    def _adds_up(self, variable: Any) -> bool:
        return variable.aggregation == "sum" or id(variable) in self._metrics


def assign_of_batch(variables: Collection[Any]) -> None:
    """Lets a replica with an empty share assign these variables too, from now on."""
    if isinstance(scope := keras_model.stateless_scope(), ReplicaScope):
        scope.of_batch.update(map(id, variables))


def losses_of_each_replica() -> contextlib.AbstractContextManager[None]:
    """Keeps what layers add by `add_loss` in one `ReplicaScope` apart from that of another, in this context.

    Keras notes in the layer which losses of a scope are its own, and drops these notes when the layer is called again:
    by the next replica, while this one waits for it.
    """

    def loss_ids(layer: keras.Layer) -> Any:
        if isinstance(scope := keras_model.stateless_scope(), ReplicaScope):
            return scope.loss_ids[id(layer)]
        if "_loss_ids" not in vars(layer):  # Keras asks before it sets it
            raise AttributeError("_loss_ids")
        return vars(layer)["_loss_ids"]

    return patched(keras.Layer, _loss_ids=property(loss_ids, lambda layer, ids: vars(layer).update(_loss_ids=ids)))


class UpdateScope(keras.StatelessScope):
    """In this context an optimizer reads and updates the copies of one device, which `own` returns."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        super().__init__(initialize_variables=False)
        self._own = own

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        own = self._own(variable)
        own.assign(tf.cast(value, own.dtype))

    def get_current_value(self, variable: Any) -> Any:
        return self._own(variable)


def copy_on(variable: Any, device: str) -> Any:
    """Returns the copy of a Keras variable on a device, see `tf_copies`; `None` before it has a value."""
    return None if variable._value is None else tf_compat.copy_on(variable._value, device)


def is_float(variable: Any) -> bool:
    return bool(keras_backend.is_float_dtype(variable.dtype))


def assign(variable: Any, value: Any) -> None:
    """Assigns to the variable itself and its copies, in any scope."""
    with tf_compat.following(True):
        variable._direct_assign(value)


@contextlib.contextmanager
def thread_state() -> Iterator[dict[str, Any]]:
    """Yields the state that Keras keeps per thread: the dtype policy, the random generator, open scopes."""
    is_new, before = keras_random.global_seed_generator() is None, random.getstate()
    # Create it here: created in a replica's thread, it would be lost, and in a trace it would have no value yet.
    with tf.init_scope(), tf_compat.variables_made_by():
        generator = seed_generator.global_seed_generator()
    random.setstate(before)  # Keras draws its seed from Python's generator, from which layers draw theirs
    drawn: list[Any] = []
    with keras_random.observed(drawn.append):
        yield _copied(vars(global_state.GLOBAL_STATE_TRACKER))
    if is_new and any(state is generator.state for state in drawn):
        seed_generator.make_default_seed()  # as Keras has drawn it
    elif is_new:  # it gets another seed where the script first draws from it
        global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)


def set_thread_state(state: dict[str, Any]) -> None:
    vars(global_state.GLOBAL_STATE_TRACKER).update(_copied(state))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copies the lists of open scopes: each thread changes its own."""
    return {name: copy.copy(value) if isinstance(value, list) else value for name, value in state.items()}


def initialized_at_once(device: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Initializes at once, in this context, variables that are created in a `StatelessScope`, on a device.

    Without one: as around this context, or as the strategy does.
    """
    before = global_state.get_global_attribute("uninitialized_variables")
    now = before if device is None and isinstance(before, _Initialized) else _Initialized(device)
    return keras_model.global_attribute("uninitialized_variables", now)


class _Initialized(list[Any]):
    """The list of variables that Keras would initialize after the scope: a step already trains with them."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self._device = device  # where ordinary ones are made; `None` makes variables of the current strategy

    def append(self, variable: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_model.outside_stateless_scope())
            stack.enter_context(tf.init_scope())
            if self._device is not None:
                stack.enter_context(tf_compat.variables_made_by())
                stack.enter_context(tf.device(self._device))
            variable._deferred_initialize()
