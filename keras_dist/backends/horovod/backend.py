"""Horovod's ring all-reduce: one process per device, with plain local Keras in each.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
https://arxiv.org/abs/1802.05799. Only Horovod's operations are used, because its Keras layer reduces nothing on
Keras 3 (https://github.com/horovod/horovod/issues/4290). Facts that shape this file (Horovod 0.28.1):

- Eager operations ignore their `name`, so different ones can pair silently. Therefore each is traced.
- TensorFlow's inlining changes the name scope, so names ignore it.
- There is no bfloat16.
- The gradient of an allgather gathers the numbers of rows. If a rank knows its own, TensorFlow does so while it traces
  the gradient, and waits for ranks that trace nothing. Therefore the number is hidden.
- A grouped sum of `IndexedSlices` gets a wrong `dense_shape`. Therefore their rows are gathered.
- Tensors that are sent together are copied into a buffer and back. Therefore large ones are sent by themselves.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import tensorflow as tf

from keras_dist import environment
from keras_dist.comm.backend import Priority, join
from keras_dist.comm.devices import bind, find_devices, list_names, prepare_devices
from keras_dist.comm.processes import Collectives, ProcessBackend
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.comm.watchdog import Watchdog
from keras_dist.compat import tf_compat
from keras_dist.environment import Launch, Topology
from keras_dist.errors import ConfigurationError, PeerLostError, check_choice
from keras_dist.logging import logger
from keras_dist.training.model import LocalTraining

_Method = TypeVar("_Method", bound=Callable[..., Any])
# What Horovod can't send is sent as the bits of another type.
_SEND_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}
# The types of the adder. With bf16 the wire has bfloat16.
_ADD_AS = {"sum_fp16": tf.float16, "sum_bf16": tf.float32}
# A tensor is large if each message of its ring has at least this many bytes. Copying it would take longer than
# the latency that it saves: 25 MB take 18 ms by themselves and 26 ms through the buffer, on 2 ranks of one machine.
_BYTES_OF_A_LARGE_MESSAGE = 2**19


def _traced(method: _Method) -> _Method:
    """Makes an eager call of a collective run in a `tf.function`, also where a script runs functions eagerly."""
    function = tf_compat.often_traced(method)

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        if not tf.executing_eagerly():
            return method(*args)
        with tf_compat.functions_run_eagerly(False):
            return function(*args)

    return call  # type: ignore[return-value]


class HorovodCollectives(Collectives):
    """Horovod's operations as the rest of the library needs them: named, safe to mix, exact in every dtype.

    `hvd` is the initialized module `horovod.tensorflow`.
    """

    def __init__(self, hvd: Any, topology: Topology, compression: str | None, adasum: bool) -> None:
        super().__init__(topology)
        self._hvd = hvd
        self._way = "adasum" if adasum else f"sum_{compression}" if compression else "sum"  # of gradients

    @_traced
    def broadcast(self, words: Any) -> Any:
        return self._hvd.broadcast(words, 0, name="keras_dist_broadcast", ignore_name_scope=True)

    @_traced
    def all_gather(self, tensor: Any, name: str) -> Any:
        sent_as = _SEND_AS.get(tensor.dtype)
        sent = tensor if sent_as is None else tf.bitcast(tensor, sent_as)
        shape = tf.TensorShape([None]).concatenate(tensor.shape[1:])  # whose rank may be unknown
        sent = tf.raw_ops.PlaceholderWithDefault(input=sent, shape=shape)
        gathered = self._hvd.allgather(sent, name=name, ignore_name_scope=True)
        gathered.set_shape(shape)
        return gathered if sent_as is None else tf.bitcast(gathered, tensor.dtype)

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        with tf.device("CPU:0"):
            received, _ = self._hvd.alltoall(payload, splits=lengths, name=name, ignore_name_scope=True)
        return received

    @_traced
    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        total = self._hvd.allreduce(numbers, op=self._hvd.Sum, name=name, ignore_name_scope=True)
        total.set_shape(numbers.shape)
        return total

    all_reduce = _traced(Collectives.all_reduce)

    # --- Dense gradients, by option ---

    def _all_reduce_dense(self, tensors: list[Any], name: str) -> list[Any]:
        groups: dict[tuple[str, tf.DType], list[int]] = {}
        for index, tensor in enumerate(tensors):
            has_way = index < len(tensors) - 1 and (self._way == "adasum" or tensor.dtype.is_floating)
            way = self._way if has_way else "sum"
            added_as = _ADD_AS.get(way, tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype)
            groups.setdefault((way, added_as), []).append(index)
        results: list[Any] = list(tensors)
        for (way, dtype), members in groups.items():
            sent, label = [tf.cast(tensors[index], dtype) for index in members], f"{name}_{way}_{dtype.name}"
            sums = self._sum_bf16(sent, label) if way == "sum_bf16" else self._reduce(sent, label, way == "adasum")
            for index, total in zip(members, sums, strict=True):
                total.set_shape(tensors[index].shape)
                results[index] = tf.cast(total, tensors[index].dtype)
        return results

    def _reduce(self, tensors: list[Any], name: str, adasum: bool) -> list[Any]:
        """Sends large tensors, and all for Adasum, one by one as soon as computed, and the other ones together."""
        options = {"op": self._hvd.Adasum if adasum else self._hvd.Sum, "ignore_name_scope": True}
        alone = [index for index, tensor in enumerate(tensors) if adasum or self._is_large(tensor)]
        results = {index: self._hvd.allreduce(tensors[index], name=f"{name}_{index}", **options) for index in alone}
        if small := [index for index in range(len(tensors)) if index not in results]:
            together = self._hvd.grouped_allreduce([tensors[index] for index in small], name=name, **options)
            results.update(zip(small, together, strict=True))
        return [results[index] for index in range(len(tensors))]

    def _is_large(self, tensor: Any) -> bool:
        numbers = tensor.shape.num_elements()
        return numbers is not None and numbers * tensor.dtype.size >= _BYTES_OF_A_LARGE_MESSAGE * self._topology.size

    def _sum_bf16(self, tensors: list[Any], name: str) -> list[Any]:
        """Sums with bfloat16 on the wire and float32 in the adder, by an all-to-all and an all-gather.

        Horovod has no bfloat16, so the bits travel as uint16: every rank gets its slice of all ranks' gradients, sums
        it, and sends the sum to all. This takes half the bytes of a float32 ring, for any number of ranks.
        """
        size = self._topology.size
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        length = tf.size(flat)
        slice_length = (length + size - 1) // size
        padded = tf.pad(flat, [[0, slice_length * size - length]])
        sent = tf.bitcast(tf.cast(padded, tf.bfloat16), tf.uint16)
        slices, _ = self._hvd.alltoall(
            sent, splits=tf.fill([size], slice_length), name=f"{name}_scatter", ignore_name_scope=True
        )
        slices = tf.cast(tf.bitcast(tf.reshape(slices, [size, -1]), tf.bfloat16), flat.dtype)
        gathered = self.all_gather(tf.cast(tf.reduce_sum(slices, 0), tf.bfloat16), f"{name}_gather")
        flat = tf.cast(gathered, flat.dtype)[:length]
        parts = tf.split(flat, [tf.size(tensor) for tensor in tensors])
        return [tf.reshape(part, tf.shape(tensor)) for part, tensor in zip(parts, tensors, strict=True)]


_DEFAULTS = {
    # Milliseconds between two checks for gradients to send. The gradients of a step wait for it: Horovod's own 1 ms is
    # half a step of a small model. But each check takes processor time, even if nothing is sent: .55 of a core at
    # 0.1 ms, .24 at 0.5 ms, .13 at 1 ms. Steps were no shorter at 0.1 than at 0.5.
    "HOROVOD_CYCLE_TIME": "0.5",
    # Horovod's stall inspector warns about a rank that has waited for so long, then ends it. The watchdog finds ranks
    # in different calls within seconds; this is for all other reasons.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
}
_PEER_LOSS = ("Horovod has been shut down", "HorovodInternalError", "Connection closed by peer")


class Horovod(LocalTraining, ReplicaBackend, ProcessBackend):
    """Trains with Horovod's ring all-reduce: gradients are averaged over all processes in every step.

    Args:
        compression: `None`, `"fp16"` or `"bf16"`: the format of gradients on the wire. Halves the bytes, and rounds
            the gradients.
        op: `"average"`, or `"adasum"` (Maleki et al. 2020, https://arxiv.org/abs/2006.02924). Adasum is another
            algorithm, so its results differ from those of one process. The number of ranks must be a power of two.
        hierarchical_allreduce: Reduce inside each host first. Needs a Horovod built with NCCL and MPI.
        fusion_threshold_mb: The number of MB up to which small gradients are sent together (Horovod's default: 128).
        cycle_time_ms: Milliseconds between two checks for gradients to send (default: 0.5; Horovod's own is 1).
        devices: Names of the devices of each rank, see `kd.MultiWorker`.

    Raises:
        ConfigurationError: If an option is invalid, or the installed Horovod doesn't support it.

    Example:

    ```python
    kd.init(kd.Horovod(compression="fp16"))
    ```
    """

    name = "horovod"
    _sign_of_peer_loss = "Horovod's connection was closed"

    def __init__(
        self,
        compression: Literal["fp16", "bf16"] | None = None,
        op: Literal["average", "adasum"] = "average",
        hierarchical_allreduce: bool = False,
        fusion_threshold_mb: float | None = None,
        cycle_time_ms: float | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        check_choice("Horovod option", "compression", compression, (None, "fp16", "bf16"))
        check_choice("Horovod option", "op", op, ("average", "adasum"))
        for option, value in (("fusion_threshold_mb", fusion_threshold_mb), ("cycle_time_ms", cycle_time_ms)):
            if value is not None and value <= 0:
                raise ConfigurationError(
                    f"The Horovod option `{option}` must be positive.",
                    f"{option}={value!r}",
                    "Leave it out (None) for Horovod's default.",
                )
        self._options: dict[str, Any] = {
            "compression": compression, "op": op, "hierarchical_allreduce": hierarchical_allreduce,
            "fusion_threshold_mb": fusion_threshold_mb, "cycle_time_ms": cycle_time_ms, "devices": list_names(devices),
        }  # fmt: skip

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        if launch is None or launch.workers:
            return Priority(0, "no Horovod launcher found")
        return Priority(10, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        if launch is None or launch.workers:
            raise ConfigurationError(
                "The backend 'horovod' needs a launcher, which tells each process its rank.",
                "a process started by "
                + ("plain `python`" if launch is None else f"{launch.launcher} for the backend 'multi_worker'"),
                "Start the script with `keras-dist run -np N script.py` or `horovodrun -np N python script.py`, "
                "or use backend='auto', which is serial under plain `python`.",
            )
        hvd = load()
        _check_options(hvd, self._options, launch.topology.size)
        megabytes, milliseconds = self._options["fusion_threshold_mb"], self._options["cycle_time_ms"]
        settings = {
            "HOROVOD_FUSION_THRESHOLD": megabytes and int(megabytes * 2**20),
            "HOROVOD_CYCLE_TIME": milliseconds,
            "HOROVOD_HIERARCHICAL_ALLREDUCE": 1 if self._options["hierarchical_allreduce"] else None,
        }
        environment.set_values({name: str(value) for name, value in settings.items() if value is not None})
        environment.set_defaults(_DEFAULTS)
        cores = bind(launch)
        rendezvous = join(launch)
        self.topology = _connect(hvd, launch, cores)
        if prepare_devices(self._options["devices"], self.topology, launch):
            self._mirror(find_devices(self._options["devices"]))
        if self.combines_means and self.replicas > 1:
            raise ConfigurationError(
                "Adasum combines the gradients of ranks, each of which has one device.",
                f"op='adasum' on {self.replicas} devices of each rank",
                "Start a rank for each device, or name one of each rank: devices=['GPU:0'].",
            )
        self._collectives = HorovodCollectives(hvd, self.topology, self._options["compression"], self.combines_means)
        if rendezvous is not None:  # under MPI there is none, only Horovod's stall inspector
            self._watchdog = Watchdog(self.topology, rendezvous, self.translate, lambda reason: hvd.shutdown())

    @property
    def not_of_one_process(self) -> str | None:
        return "Adasum combines gradients by its own rule" if self.combines_means else None

    @property
    def combines_means(self) -> bool:
        return bool(self._options["op"] == "adasum")

    def _is_peer_loss(self, error: BaseException) -> bool:
        text = f"{type(error).__name__}: {error}"
        return any(sign in text for sign in _PEER_LOSS)


def load() -> Any:
    """Imports `horovod.tensorflow`. Raises `ConfigurationError` if it isn't installed or is for another TensorFlow."""
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ConfigurationError(
            "Horovod for TensorFlow is not installed.",
            f"{type(error).__name__}: {error}",
            "Build and install it for your TensorFlow with `keras-dist install-horovod`.",
        ) from error
    except tf.errors.NotFoundError as error:
        raise ConfigurationError(
            f"The installed Horovod was built for another TensorFlow than {tf.__version__}.",
            str(error).splitlines()[0],
            "Build it for this one with `keras-dist install-horovod`.",
        ) from error
    return hvd


def _check_options(hvd: Any, options: Mapping[str, Any], size: int) -> None:
    """Raises `ConfigurationError` if the installed Horovod doesn't support the options for this number of ranks."""
    # Horovod ignores the option silently without either of them (operations.cc of 0.28.1).
    if options["hierarchical_allreduce"] and not (hvd.nccl_built() and hvd.mpi_built()):
        raise ConfigurationError(
            "The option `hierarchical_allreduce` needs a Horovod built with NCCL and MPI.",
            "hierarchical_allreduce=True and a Horovod without NCCL or without MPI",
            "Leave it out, or build Horovod with `keras-dist install-horovod --gpu --mpi` on a GPU machine.",
        )
    if options["op"] == "adasum":
        if size & (size - 1):
            raise ConfigurationError(
                "Adasum needs a number of ranks that is a power of two.",
                f"op='adasum' with {size} ranks",
                "Start 2, 4, 8, … ranks, or use op='average'.",
            )
        if not (hvd.mpi_built() or hvd.nccl_built()):
            raise ConfigurationError(
                "Adasum needs a Horovod built with MPI.",
                "op='adasum' and a Horovod with Gloo only",
                "Build it with `keras-dist install-horovod --mpi`, or use op='average'.",
            )
        if options["compression"] is not None:
            raise ConfigurationError(
                "Adasum and compression can't be combined.",
                f"op='adasum', compression={options['compression']!r}",
                "Leave one of them out.",
            )


def _connect(hvd: Any, launch: Launch, cores: int) -> Topology:
    """Connects to the other ranks. This one has `cores` for itself."""
    if not launch.is_mpi:
        # Without our patch the rings of Horovod 0.28.1 forget HOROVOD_GLOO_IFACE, and use the host's name.
        is_patched = hasattr(importlib.import_module("horovod"), "patched_by_keras_dist")
        if not (is_patched and environment.get("HOROVOD_GLOO_IFACE")):
            environment.check_host_name(several_hosts=launch.topology.local_size < launch.topology.size)
    elif not hvd.mpi_built():
        raise ConfigurationError(
            f"The installed Horovod was built without MPI, so it can't join ranks that {launch.launcher} has started.",
            f"{launch.topology} and a Horovod with Gloo only",
            "Build it with `keras-dist install-horovod --mpi`, or start the script with `keras-dist run -np N`.",
        )
    threads = _threads()
    try:
        hvd.init()
    except Exception as error:
        raise PeerLostError(
            "Horovod could not connect the ranks.",
            f"{type(error).__name__}: {error} (on {launch.topology}, started by {launch.launcher})",
            "Look for the rank that failed first, and whether the hosts can reach each other.",
        ) from error
    if hvd.size() != launch.topology.size:
        raise ConfigurationError(
            "Horovod has found another number of ranks than the launcher has started.",
            f"{hvd.size()} instead of {launch.topology.size}, started by {launch.launcher}",
            "Start the script with the `mpirun` of the MPI that Horovod was built with.",
        )
    if hvd.gloo_enabled() and cores < 2:
        # Gloo waits for the network by spinning, on the core that computes. With the lowest priority of its threads a
        # step of a small MLP took 5.2 ms instead of 6.6, of a larger one 83 instead of 101. The class SCHED_IDLE made
        # it 3.3 and 94, but 36 instead of 15 where another program used the cores too. The first new thread is
        # Horovod's main loop, which must not be delayed; the others are Gloo's.
        new_threads = _threads() - threads
        logger().debug("Gloo's %d threads have the lowest priority", len(new_threads) - 1)
        for thread in sorted(new_threads)[1:]:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, 19)
    return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def _threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task"))) if os.path.isdir("/proc/self/task") else set()
