"""Cloud TPU: one process, `tf.distribute.TPUStrategy` over all cores of a TPU or of a pod slice."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_dist import environment
from keras_dist.backends.tpu import place as tpu_place
from keras_dist.backends.tpu import step
from keras_dist.backends.tpu.model import TPUModel, prepare_optimizer
from keras_dist.backends.tpu.place import TPUAddress
from keras_dist.backends.tpu.step import CoreLoop, once
from keras_dist.comm.backend import Backend, Priority, join_seconds
from keras_dist.comm.watchdog import call_in_thread, why_no_grpc
from keras_dist.compat import tf_compat, tpu_emulation
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError, DistributionError, NotSupportedError, PeerLostError
from keras_dist.logging import logger
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
        return tf.distribute.TPUStrategy(connect(self._place, join_seconds()))

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
        def total(gradient: Any) -> Any:
            if not isinstance(gradient, tf.IndexedSlices):
                return self.all_reduce_exact(gradient, name)
            # All rows: their sum would be dense, and Keras's clipping and Adam then differ.
            values, indices = self._gather(gradient.values), self._gather(tf.cast(gradient.indices, tf.int32))
            return tf.IndexedSlices(values, indices, gradient.dense_shape)

        return list(map(total, gradients)), row[None, :]

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        if tf.distribute.in_cross_replica_context():
            return numbers
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, numbers)

    def all_gather(self, tensor: Any, name: str) -> Any:
        step.refuse_filler_rows("a loss or layer that is computed on the whole batch")
        return self._gather(tensor)

    def _gather(self, tensor: Any) -> Any:
        """Gathers by a sum over the cores: TPUs sum floats and int32."""
        if tf.distribute.in_cross_replica_context():
            return tensor
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
        TPUModel(target, self, options).attach()

    @functools.cached_property
    def loop(self) -> Loop:
        return CoreLoop(self)


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


# --- Connects to a TPU within a time limit, and explains what went wrong ---

_Result = TypeVar("_Result")
# Distributions of TensorFlow without TPU support. Others may have it, such as that in the image of a TPU VM.
_WITHOUT_TPU = ("tensorflow", "tensorflow-cpu")


def connect(place: TPUAddress, seconds: float) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Connects to a TPU and initializes it. Each of finding, connecting and initializing may take `seconds`."""
    start = time.monotonic()
    _wait_for_servers(place.addresses, seconds)
    resolver = _within(seconds, place, "find", lambda: resolve(place))
    workers = [address for addresses in resolver.cluster_spec().as_dict().values() for address in addresses]
    _wait_for_servers(workers, seconds)
    if workers:
        _within(seconds, place, "connect to", lambda: tf.config.experimental_connect_to_cluster(resolver))
    try:
        _within(seconds, place, "initialize", lambda: tf.tpu.experimental.initialize_tpu_system(resolver))
    except tf.errors.OpError as error:
        raise _not_initialized(place, workers, error) from error
    logger().debug("TPU %s (%s): initialized in %.1f s", place.target, place.reason, time.monotonic() - start)
    return resolver


def resolve(place: TPUAddress, service: Any = None) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Returns TensorFlow's resolver of a TPU, with its workers' addresses. `service`: Google's API by default."""
    make = tf.distribute.cluster_resolver.TPUClusterResolver
    try:
        resolver = make(place.target, zone=place.zone, project=place.project, service=service)
        resolver.cluster_spec()  # asks the API
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_resolved(place, error) from error
    return resolver


def _wait_for_servers(addresses: Sequence[str], seconds: float) -> None:
    """Waits until a gRPC server answers at each address. TensorFlow would wait forever and ignore Ctrl-C."""
    deadline = time.monotonic() + seconds
    missing = dict.fromkeys(addresses, "")
    while missing := {address: why for address in missing if (why := why_no_grpc(address))}:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"Not all workers of the TPU answer; waited {seconds:g} s.",
                f"{', '.join(f'{address} ({why})' for address, why in missing.items())}; "
                f"{len(addresses) - len(missing)} of {len(addresses)} answer",
                "Check the addresses and the firewall, and that the workers run TensorFlow's server (on a pod slice "
                "of TPU VMs: a runtime version that ends in -pod). If they need more time, set "
                f"{environment.JOIN_TIMEOUT} (seconds).",
            )
        time.sleep(0.2)


def _within(seconds: float, place: TPUAddress, what: str, function: Callable[[], _Result]) -> _Result:
    """Calls a function that may wait forever: for a metadata server that does not answer, or a TPU that is in use."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"The TPU didn't answer within {seconds:g} s.",
                f"tried to {what} {place.target!r} ({place.reason})",
                "Check that no other process uses the TPU, that its state is READY, and that TensorFlow's server "
                f"listens at its addresses. If it needs more time, set {environment.JOIN_TIMEOUT} (seconds).",
            )

    return call_in_thread(function, check)


def _not_resolved(place: TPUAddress, error: Exception) -> DistributionError:
    words, received = str(error), f"TPU {place.target!r}, {place.reason}"
    by_address = "or give the workers' addresses: kd.TPU('grpc://10.0.0.2:8470')"
    if "Google API client" in words:
        return ConfigurationError(
            "A TPU is named, but the packages that look up its address are not installed.",
            received,
            f"python -m pip install google-api-python-client oauth2client, {by_address}, or kd.TPU('local') on the "
            "TPU VM itself.",
        )
    if "not yet ready" in words:
        state = words.rpartition("state: ")[2].strip('"')
        return ConfigurationError(
            "The TPU is not ready.",
            f"{received}, state {state}",
            f"Wait for the state READY: `gcloud compute tpus tpu-vm describe {place.target}`. "
            "Create a preempted or terminated TPU again.",
        )
    if isinstance(error, OSError):
        return ConfigurationError(
            "A TPU is named, but Google's metadata server, which knows its zone, can't be reached.",
            f"{received} ({words})",
            f"Start the script on a VM of the TPU's project, {by_address}.",
        )
    if "Could not lookup TPU metadata" in words:
        return ConfigurationError(
            "Google's API doesn't know the TPU, or doesn't answer this machine.",
            f"{received} ({words.partition('Exception: ')[2] or words})",
            "Look for it with `gcloud compute tpus tpu-vm list`, give the VM access to the API (scope "
            f"cloud-platform), {by_address}.",
        )
    return ConfigurationError("The TPU can't be found.", f"{received} ({words})", f"Check its name, {by_address}.")


def _not_initialized(place: TPUAddress, workers: Sequence[str], error: Exception) -> DistributionError:
    where = f"TPU {place.target!r}, {place.reason}"
    plain = [name for name in _WITHOUT_TPU if environment.installed_version(name) is not None]
    if not workers and plain and environment.installed_version(tpu_place.TENSORFLOW) is None:
        return ConfigurationError(
            "The installed TensorFlow can't use a TPU.",
            f"{plain[0]} {environment.installed_version(plain[0])}; {where}",
            f"Install {tpu_place.TENSORFLOW} into its own environment: `make setup TF=tpu` in a clone of keras_dist, "
            "or `python -m pip install '.[tpu]'` in a fresh one.",
        )
    headings = ("", "Graph execution error:")  # the first line of many of TensorFlow's errors
    words = next((line for line in str(error).splitlines() if line.strip() not in headings), "")
    if "unknown device" in words or "No OpKernel" in words or not (workers or tpu_place.local_chips()):
        return ConfigurationError(
            "There is no TPU at the workers." if workers else "There is no TPU on this machine.",
            where + (f", connected to {', '.join(workers)}" if workers else f" ({words})"),
            "The addresses must be those of TPU workers, port 8470."
            if workers
            else f"Unset {tpu_place.NAME} to use this machine without a TPU, or name a TPU elsewhere: "
            "kd.TPU('grpc://10.0.0.2:8470').",
        )
    return ConfigurationError(
        "The TPU can't be initialized.",
        f"{where} ({words})",
        "Check that no other process uses it (`sudo lsof -w /dev/accel* /dev/vfio/*`), and that it is READY.",
    )
