"""The distributed optimizer: a Keras optimizer whose `apply` first reduces the gradients over the ranks.

So clipping, the check for infinities and the update all see the gradient of the global batch, as in one process. A
rank's gradient is that of a mean over its share. It is weighted by `count / total`, so that the sum over the ranks is
the gradient of the mean over the global batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_model, tf_compat
from keras_dist.compat.keras_model import CLIP_GRADIENTS, attach, attached
from keras_dist.compat.keras_optimizers import accumulators, plain_apply
from keras_dist.data.fingerprint import fold
from keras_dist.logging import logger
from keras_dist.step import learning_rate, tables
from keras_dist.step.agreement import Agreement
from keras_dist.step.gradients import step_of
from keras_dist.step.step import Step

_ATTACHED = "_keras_dist_optimizer"


def distribute_optimizer(optimizer: keras.optimizers.Optimizer, backend: Backend, agreement: Agreement) -> None:
    """Makes an optimizer reduce its gradients over all ranks, in place. A second call does nothing.

    Args:
        optimizer: Any Keras optimizer; if optimizers are nested (`LossScaleOptimizer`), the outermost.
        backend: The backend.
        agreement: Checks that the ranks agree.
    """
    if is_distributed(optimizer):
        return
    # The replicas of one process share the accumulators, so their gradients are summed in each step.
    accumulates = optimizer.gradient_accumulation_steps and backend.topology.size > 1
    reducer_class = _AccumulatingReducer if accumulates else _Reducer
    reducer = reducer_class(optimizer, backend, agreement)
    attach(optimizer, _ATTACHED, reducer)
    reducer.attach()
    logger().debug("optimizer %s: its gradients are summed over the ranks", optimizer.name)


def is_distributed(optimizer: Any) -> bool:
    """True if gradients of this optimizer are reduced over the ranks."""
    return getattr(optimizer, _ATTACHED, None) is not None


def accumulators_of(optimizers: Sequence[Any]) -> list[Any]:
    """Returns the variables in which each rank accumulates its own part of the gradients."""
    reducers = [getattr(optimizer, _ATTACHED, None) for optimizer in optimizers]
    accumulating = [reducer for reducer in reducers if isinstance(reducer, _AccumulatingReducer)]
    return [variable for reducer in accumulating for variable in reducer.accumulators()]


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates an optimizer's variables as Keras does while it traces the first step: assignments have no effect there.

    So `ScheduleFreeAdamW` starts from zeros and not from the weights (Keras 3.15).
    """
    with contextlib.ExitStack() as stack:
        for part in parts_of(optimizer):
            stack.enter_context(attached(part, "assign", lambda variable, value: None))
        stack.enter_context(tf.init_scope())
        stack.enter_context(keras_model.outside_stateless_scope())
        optimizer.build(list(variables))


def build_at_once(optimizer: Any, variables: Sequence[Any] | None) -> bool:
    """Creates an optimizer's variables in the step that first calls it, beside those that it updates.

    Args:
        optimizer: The optimizer.
        variables: What it updates; `None` if the caller does not say.

    Returns:
        True if it had none, and now has.
    """
    if optimizer.built or variables is None:
        return False
    with tf_compat.variables_made_by(), tf.device(keras_model.backing(variables[0]).device):
        build_optimizer(optimizer, variables)
    return True


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and the optimizers inside it (`LossScaleOptimizer`, `MultiOptimizer`)."""
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in [*([inner] if inner is not None else []), *getattr(optimizer, "optimizers", ())]:
        yield from parts_of(part)


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
    inner = {id(getattr(optimizer, "inner_optimizer", None)) for optimizer in found.values()}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def _with_first_argument(method: Callable[..., Any], change: Callable[..., list[Any]]) -> Callable[..., Any]:
    def wrapper(grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        grads = list(grads)
        args = tuple(None if arg is None else list(arg) for arg in args)  # variables may come from a generator
        kwargs = {name: None if arg is None else list(arg) for name, arg in kwargs.items()}
        reduced = change(grads, *args, **kwargs) if grads else grads
        return method(reduced, *args, **kwargs)

    return wrapper


class _Reducer:
    """Reduces the gradients of one optimizer in each call of `apply`."""

    def __init__(self, optimizer: Any, backend: Backend, agreement: Agreement) -> None:
        self._optimizer = optimizer
        self._backend = backend
        self._agreement = agreement

    def attach(self) -> None:
        # Not around `once`, in which other replicas go on with their steps.
        update = keras_model.unobserved()(plain_apply(self._optimizer))
        apply = functools.partial(self._backend.once, update)
        attach(self._optimizer, "apply", _with_first_argument(apply, self._weigh_and_reduce))

    def _weigh_and_reduce(self, gradients: list[Any], trainable_variables: Any = None) -> list[Any]:
        step = self._step()
        if not step.is_plain:
            shares = [None if step.is_reduced(gradient) else gradient for gradient in gradients]
            reduced = self._reduce(self._weigh(shares, step), step, step.fingerprint)
            pairs = zip(gradients, reduced, strict=True)
            gradients = [own if step.is_reduced(own) else total for own, total in pairs]
        self._note(step, gradients, trainable_variables)
        if self._backend.mirrors:
            self._prepare_copies(trainable_variables)
        return gradients

    def _prepare_copies(self, variables: Any) -> None:
        """Makes the variables that each device updates, before any of them changes."""
        are_new = build_at_once(self._optimizer, variables)  # in a graph Keras would initialize them after the trace
        self._backend.will_update(self._optimizer.variables, are_new=are_new)

    def _note(self, step: Step, gradients: list[Any], variables: Any) -> None:
        if step.applied is not None:
            step.applied.append((self._optimizer, gradients, variables))

    def _step(self) -> Step:
        return step_of(f"the update of the optimizer {self._optimizer.name!r}")

    def _weigh(self, gradients: Sequence[Any], step: Step) -> list[Any]:
        if self._backend.combines_means:
            return list(gradients)
        return step.weigh_gradients(gradients, id(self._optimizer) in step.weighs_losses_of)

    def _reduce(self, gradients: Sequence[Any], step: Step, fingerprint: Any) -> list[Any]:
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        summands = [gradients[index] for index in present]
        row = self._agreement.row(fingerprint, learning_rate.sum_of(self._optimizer))
        worked = None if step.stopwatch is None else step.stopwatch.worked(after=summands)
        row = row if worked is None else tf.concat([row, worked[None]], 0)
        sums, table = self._backend.all_reduce(summands, row, step.next_name("gradients"))
        if step.stopwatch is not None:
            step.stopwatch.synchronized(worked, table[:, -1])
            table = table[:, :-1]
        if self._backend.topology.size > 1:
            sums = self._agreement.check(table, sums)
        reduced = list(gradients)
        for index, total in zip(present, sums, strict=True):
            reduced[index] = tables.add_rows(total, self._backend.num_replicas, lookup=gradients[index])
        return reduced


class _AccumulatingReducer(_Reducer):
    """Accumulates gradients on each rank, and reduces them once per update.

    An update begins with clipping the accumulated gradients, so they are reduced there. Whatever is left at other times
    counts once, on whichever rank it is: `weights.synchronize` moves it to the chief, whose state is saved.
    """

    def __init__(self, optimizer: Any, backend: Backend, agreement: Agreement) -> None:
        super().__init__(optimizer, backend, agreement)
        with tf.device("CPU:0"), tf.init_scope():
            self._folded = tf.Variable(0, dtype=tf.int64, trainable=False, name="keras_dist_folded")

    def attach(self) -> None:
        optimizer, clip = self._optimizer, getattr(self._optimizer, CLIP_GRADIENTS)
        update = keras_model.unobserved()(plain_apply(optimizer))
        attach(optimizer, "apply", _with_first_argument(update, self._weigh_and_fold))
        attach(optimizer, CLIP_GRADIENTS, _with_first_argument(clip, self._reduce_folded))

    def accumulators(self) -> list[Any]:
        """Returns the optimizer's variables with this rank's part; none before the first step."""
        return accumulators(self._optimizer)

    def _weigh_and_fold(self, gradients: list[Any], trainable_variables: Any = None) -> list[Any]:
        """A step that only accumulates sends nothing. Its fingerprint is folded into that of the next update."""
        step = self._step()
        if not step.is_plain:
            fold(self._folded, step.fingerprint)
            gradients = self._weigh(gradients, step)
        if step.applied is not None:
            whole = gradients if step.is_plain else self._reduce(gradients, step, step.fingerprint)
            self._note(step, whole, trainable_variables)
        return gradients

    def _reduce_folded(self, gradients: list[Any]) -> list[Any]:
        step = self._step()
        return gradients if step.is_plain else self._reduce(gradients, step, tf.cast(self._folded, tf.float32))
