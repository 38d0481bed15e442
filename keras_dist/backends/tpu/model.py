"""A model whose variables belong to TPUStrategy, which runs its steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.tpu import step
from keras_dist.backends.tpu.strategy import ReplicaStrategy
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_strategy
from keras_dist.compat.keras_model import attach
from keras_dist.errors import NotSupportedError
from keras_dist.logging import logger
from keras_dist.step.agreement import agreement_of
from keras_dist.step.optimizer import distribute_optimizer, parts_of
from keras_dist.training import executions
from keras_dist.training.call import Call
from keras_dist.training.executions import Executions
from keras_dist.training.options import Options
from keras_dist.training.wrapper import Wrapper


class TPUWrapper(Wrapper):
    """What makes a model a distributed one on a TPU."""

    strategy: ReplicaStrategy

    def __init__(
        self, model: keras.Model, backend: Backend, options: Options, strategy: tf.distribute.Strategy
    ) -> None:
        super().__init__(model, backend, options, ReplicaStrategy(model, backend, strategy))
        self._executions = Executions(model)
        self._may_choose = True  # while no callback acts between batches
        _advise_on_precision(keras.config.dtype_policy().name)

    def _compile(self, call: Call) -> None:
        """Keeps Keras from compiling a part of the step with XLA: TPUStrategy compiles the whole step."""
        asked, is_given = call.get("jit_compile"), call.is_given("steps_per_execution")
        if call.takes("jit_compile"):
            call.set("jit_compile", False)
        with self.strategy.scope():
            call()
        self._executions.compiled(is_given)
        self._note_jit(asked)
        self._prepare_optimizers()

    def attach(self) -> None:
        if getattr(self._model, "compiled", False):
            self._note_jit(self._model.jit_compile)
        super().attach()

    def _note_jit(self, asked: Any) -> None:
        if asked is True:
            logger().warning("jit_compile=True is off on a TPU: TPUStrategy compiles the whole step.")
        self._model.jit_compile = False

    def _prepare_optimizer(self, optimizer: Any) -> None:
        prepare_optimizer(optimizer, self._backend)

    # --- fit, evaluate, predict ---

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        if self._model.run_eagerly and call.name != "predict_on_batch":
            raise NotSupportedError(
                "A TPU runs whole steps, which must be traced.",
                "run_eagerly=True",
                "Leave it out. To debug a step, run it without a TPU: kd.init('serial').",
            )
        with super()._running(call), self.strategy.scope(), contextlib.ExitStack() as stack:
            self._may_choose = not executions.act_between_batches(call.get("callbacks"))
            if call.name == "fit":
                choose = functools.partial(self._choose_executions, stack, call)
                stack.enter_context(self.strategy.preparing("train", "test", first=choose))
            elif call.name in ("evaluate", "predict"):
                stack.enter_context(self._executions.of(self._executions.asked))
                stack.enter_context(self.strategy.preparing("test" if call.name == "evaluate" else "predict"))
            yield

    def _choose_executions(self, stack: contextlib.ExitStack, call: Call, epoch_iterator: Any) -> None:
        """Puts several steps of `fit` into one execution. By now the number of steps of an epoch is known."""
        if self._executions.may_choose and self._may_choose:
            exactly = (epoch_iterator.steps_per_epoch, call.get("validation_steps"))
            number = executions.number_of(epoch_iterator.data_adapter.num_batches, exactly)
            epoch_iterator.steps_per_execution = number
            stack.enter_context(self._executions.of(number))
            executions.report(number)

    def _make_train_function(self, call: Call) -> None:
        self._make_function("train", call)

    def _make_test_function(self, call: Call) -> None:
        self._make_function("test", call)

    def _make_function(self, kind: str, call: Call) -> None:
        name = f"{kind}_function"
        self._refuse_own_function(name)
        if (function := self._made(name, call)) is not None:
            attach(self._model, name, lambda iterator: self._logs_for_callbacks(kind, function(iterator)))

    def _compute_loss(self, call: Call) -> Any:
        loss = super()._compute_loss(call)
        step.refuse_loss_of_each_example(loss)
        return loss

    def _symbolic_build(self, call: Call) -> None:
        """Builds for `train_on_batch` and `test_on_batch`. For a dataset `strategy.preparing` has done so."""
        if (batch := call.get("data_batch")) is not None:
            self.strategy.build_for_batch(batch)
        if (iterator := call.get("iterator")) is not None:
            self._fitting.watch(iterator, self.strategy.given, None)


def prepare_optimizer(optimizer: Any, backend: Backend) -> None:
    """Makes an optimizer sum its gradients over the cores before anything else. Keras itself sums them later."""
    if backend.num_replicas > 1:
        distribute_optimizer(optimizer, backend, agreement_of(backend.topology.size))
    for part in parts_of(optimizer):
        keras_strategy.skip_gradient_reduction(part)


@functools.cache
def _advise_on_precision(policy: str) -> None:
    if policy == "float32":
        logger().warning(
            "the model computes in float32. mixed_bfloat16 is faster on a TPU and takes less memory; its numbers "
            "differ in the third digit. Call keras.mixed_precision.set_global_policy('mixed_bfloat16') before the "
            "model is created."
        )
