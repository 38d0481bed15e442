"""Cloud TPU: one process, `tf.distribute.TPUStrategy` over all cores of a TPU or of a pod slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import environment
from keras_dist.backends.tpu import connect, step
from keras_dist.backends.tpu import place as tpu_place
from keras_dist.backends.tpu.model import TPUModel, prepare_optimizer
from keras_dist.backends.tpu.step import CoreLoop, once
from keras_dist.comm.backend import Backend, Priority, join_seconds
from keras_dist.compat import tf_compat, tpu_emulation
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.training.loop import Loop
from keras_dist.training.options import Options


class TPU(Backend):
    """Trains on a Cloud TPU. One process leads all cores, even those of a pod slice, and is the chief.

    Args:
        name: `"local"` for the chips of this machine, addresses of workers (`"grpc://10.0.0.2:8470"`, separated by
            commas), or the name of a TPU. By default it is read from the environment
            (KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS on GKE, TPU_NAME, TPU_CONFIG), or this machine is searched.

    Raises:
        ConfigurationError: If the name is invalid.

    Example:

    ```python
    kd.init()                                   # finds the TPU in the environment or on this machine
    kd.init(kd.TPU("grpc://10.0.0.2:8470"))     # another one
    ```
    """

    name = "tpu"
    uses_xla = False
    puts_steps_together = True
    keeps_metrics = False
    strategy: tf.distribute.Strategy

    def __init__(self, name: str | None = None) -> None:
        if name:
            tpu_place.find(name, {})  # raises if the name is invalid
        self._options: dict[str, Any] = {"name": name}

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        if launch is not None:
            return Priority(0, f"started by {launch.launcher}")
        environ = environment.current()
        try:
            return Priority(6, tpu_place.find(None, environ).reason)
        except ConfigurationError as error:
            is_named = any(environ.get(variable) for variable in (tpu_place.GKE, tpu_place.NAME, tpu_place.CONFIG))
            return Priority(6 if is_named else 0, error.problem)  # `start` raises it

    def start(self, launch: Launch | None) -> None:
        self.refuse_launch(launch)
        tpu_place.check()
        environ = environment.current()
        self._place = tpu_place.find(self._options["name"], environ)
        tpu_place.check_worker(self._place, environ)
        self.strategy = self._connect()
        tf_compat.add_number_conversions()
        tf_compat.set_strategy(self.strategy)  # models created from now on are on the TPU

    def _connect(self) -> tf.distribute.Strategy:
        return tf.distribute.TPUStrategy(connect.connect(self._place, join_seconds()))

    def describe_devices(self) -> str:
        return f"{self.num_replicas} TPU cores, {self._place.target}"

    @property
    def replicas(self) -> int:
        return int(self.strategy.num_replicas_in_sync)

    def check_variables(self, variables: Sequence[Any]) -> None:
        elsewhere = [v for v in variables if not self.strategy.extended.variable_created_in_scope(v.value)]
        if elsewhere:
            raise ConfigurationError(
                "The model was created before the TPU was connected, so its weights are not on the TPU.",
                elsewhere[0].path,
                "Call `kd.init()` before the model is created.",
            )

    # --- In the step: TPUStrategy has the collectives, and only inside a replica ---

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        if tf.distribute.in_cross_replica_context():
            return list(gradients), row[None, :]
        results = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                # All rows: their sum would be dense, and Keras's clipping and Adam then differ.
                indices = tf.cast(gradient.indices, tf.int32)  # TPUs sum int32, not int64
                context = tf.distribute.get_replica_context()
                values, indices = context.all_gather([gradient.values, indices], axis=0)
                results.append(tf.IndexedSlices(values, indices, gradient.dense_shape))
            else:
                results.append(self.all_reduce_exact(gradient, name))
        return results, row[None, :]

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        if tf.distribute.in_cross_replica_context():
            return numbers
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, numbers)

    def all_gather(self, tensor: Any, name: str) -> Any:
        if tf.distribute.in_cross_replica_context():
            return tensor
        step.refuse_filler_rows("a loss or layer that is computed on the whole batch")
        # It gathers by a sum over the cores: TPUs sum floats and int32.
        gather = functools.partial(tf.distribute.get_replica_context().all_gather, axis=0)
        if not tensor.dtype.is_integer or tensor.dtype == tf.int32:
            return gather(tensor)
        if tensor.dtype.size == 8:
            return tf.bitcast(gather(tf.bitcast(tensor, tf.int32)), tensor.dtype)
        return tf.cast(gather(tf.cast(tensor, tf.int32)), tensor.dtype)

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return once(self, functools.partial(function, *args, **kwargs))

    def distribute(self, target: keras.Model | keras.optimizers.Optimizer, options: Options) -> None:
        if isinstance(target, keras.optimizers.Optimizer):
            options.scale(target, self.num_replicas)
            prepare_optimizer(target, self)
            return
        if options.data not in (None, "split"):
            raise NotSupportedError(
                "On a TPU one process reads all data, also for a pod slice.",
                f"data={options.data!r}",
                "Leave `data` out, and pass all data.",
            )
        TPUModel(target, self, options, self.strategy).attach()

    @functools.cached_property
    def loop(self) -> Loop:
        return CoreLoop(self, self.strategy)


class EmulatedTPU(TPU):
    """TPU cores. Everything in them is real except the connection, the compiler and the chip."""

    def __init__(self, cores: int = 1) -> None:
        super().__init__("local")
        self._cores = cores

    def start(self, launch: Launch | None) -> None:
        self._cpu = tpu_emulation.runs_on_cpu()  # for as long as this process lives
        self._cpu.__enter__()
        super().start(launch)

    def _connect(self) -> Any:
        return tpu_emulation.emulated_strategy(self._cores)

    def describe_devices(self) -> str:
        return f"{self._cores} TPU core{'s' if self._cores > 1 else ''}, emulated on the CPU"
