"""TensorFlow's collectives: one process per device, with plain local Keras in each. Needs no Horovod.

`tf.distribute.MultiWorkerMirroredStrategy` uses the same operations. The strategy itself, which owns variables and
data, is not used, because Keras 3 computes wrong results under it. Facts that shape this file (TensorFlow 2.21):

- An operation finds its counterparts on the other ranks by a number, its instance key, here a hash of its name.
- A key belongs to one shape forever. Therefore an unknown length is padded to one of a few, which is part of the key.
- Gathered tensors must have the same shape on all ranks. Therefore the ranks gather their lengths first.
- Only 16 to 64 bit floats and signed integers can be sent. Other types are summed in a wider one, or sent as bits.
"""

import math
import re
import secrets
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from keras_dist import environment, store
from keras_dist.comm.backend import Priority, Rendezvous, join, join_seconds, not_joined, wait_for_ranks
from keras_dist.comm.devices import bind, find_devices, list_names, prepare_devices
from keras_dist.comm.processes import Collectives, ProcessBackend
from keras_dist.comm.replicas import ReplicaBackend
from keras_dist.comm.watchdog import Watchdog, bypass_proxies, listens, only_for_its_network
from keras_dist.compat import tf_compat
from keras_dist.data.sources import from_bytes, to_bytes
from keras_dist.environment import Launch, Topology
from keras_dist.errors import ConfigurationError, check_choice
from keras_dist.logging import logger
from keras_dist.training.model import LocalTraining

_GROUP, _GPU_GROUP = 1, 2
_LARGE_BYTES = 1 << 20  # the size from which a tensor has a buffer to itself
# The type in which TensorFlow sums what it can't send, without overflow.
_SUM_AS = {
    tf.bfloat16: tf.float32, tf.int8: tf.int32, tf.uint8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32,
    tf.uint32: tf.int64, tf.uint64: tf.int64,
}  # fmt: skip
_WORD = 4  # the bytes of an int32, a word: the type in which bits are sent


class TensorFlowCollectives(Collectives):
    """The collectives of TensorFlow. `on_gpu`: sum gradients on the GPU by NCCL, instead of in a ring of the hosts."""

    def __init__(self, topology: Topology, on_gpu: bool = False) -> None:
        super().__init__(topology)
        self._size = topology.size
        self._on_gpu = on_gpu

    def connect(self, seconds: float) -> None:
        """Runs the first collective, and waits up to `seconds` for the other ranks."""
        with tf.device("CPU:0"):
            self._reduce(tf.zeros([1]), _key("connect"), timeout=seconds)

    def broadcast(self, words: Any) -> Any:
        return self._from_chief(words, "broadcast")

    def all_gather(self, tensor: Any, name: str) -> Any:
        with tf.device("CPU:0"):
            rows, row_shape = tf.shape(tensor)[0], tf.shape(tensor)[1:]
            all_rows = self._gather(rows[None], _key(name, "rows"))
            numbers = all_rows * tf.reduce_prod(row_shape)
            length = _padded_length(_words(tf.reduce_max(numbers) * tensor.dtype.size))
            words = _as_words(tensor, length)
            all_words = self._gather(words[None, :], _key_of_length(_key(name), length))
            parts = [
                from_bytes(_bytes_of(all_words[rank]), numbers[rank : rank + 1], tensor.dtype)[0]
                for rank in range(self._size)
            ]
            gathered = tf.reshape(tf.concat(parts, 0), tf.concat([[tf.reduce_sum(all_rows)], row_shape], 0))
        gathered.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))  # whose rank may be unknown
        return gathered

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        with tf.device("CPU:0"):
            lengths = self._from_chief(lengths, f"{name}_lengths")
            rank, length = self._topology.rank, _padded_length(_words(tf.reduce_sum(lengths)))
            words = _as_words(payload, length) if self._topology.is_chief else tf.zeros([length], tf.int32)
            words = self._reduce(words, _key_of_length(_key(name), length))
            start = tf.reduce_sum(lengths[:rank])
            return _bytes_of(words)[start : start + lengths[rank]]

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        numbers = tf.convert_to_tensor(numbers)
        with tf.device("CPU:0"):
            total = tf.reshape(self._sum(tf.reshape(numbers, [-1]), name), tf.shape(numbers))
        total.set_shape(numbers.shape)
        return total

    def _all_reduce_dense(self, tensors: list[Any], name: str) -> list[Any]:
        results: list[Any] = list(tensors)
        for number, members in enumerate(_buffers(tensors)):
            on_gpu = self._on_gpu and tensors[members[0]].dtype.is_floating
            with tf.device("GPU:0" if on_gpu else "CPU:0"):
                flat = [tf.reshape(tensors[index], [-1]) for index in members]
                total = self._sum(tf.concat(flat, 0), f"{name}_{number}", on_gpu)
                for index, part in zip(members, tf.split(total, [tf.size(part) for part in flat]), strict=True):
                    results[index] = tf.reshape(part, tf.shape(tensors[index]))
                    results[index].set_shape(tensors[index].shape)
        return results

    # --- On tensors of one axis ---

    def _sum(self, flat: Any, name: str, on_gpu: bool = False) -> Any:
        wire = _SUM_AS.get(flat.dtype, flat.dtype)
        length = flat.shape[0]
        if length == 0 or self._size == 1:
            return flat
        sent = tf.cast(flat, wire)
        if length is not None:
            return tf.cast(self._reduce(sent, _key(name, wire.name, length), on_gpu), flat.dtype)
        length = tf.size(flat)
        lengths = self._gather(length[None], _key(name, "length"))
        data = ["The ranks' tensors have different sizes:", lengths]
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.reduce_all(lengths == length), data=data)]):
            padded = _padded_length(length)
        total = self._reduce(_pad(sent, padded), _key_of_length(_key(name, wire.name), padded), on_gpu)
        return tf.cast(total[:length], flat.dtype)

    def _from_chief(self, numbers: Any, name: str) -> Any:
        """Returns the chief's integers, as a sum to which the other ranks add zeros."""
        return self._sum(numbers if self._topology.is_chief else tf.zeros_like(numbers), name)

    def _reduce(self, flat: Any, key: Any, on_gpu: bool = False, timeout: float = 0.0) -> Any:
        """Sums tensors of the same length. Only the first sum has a time limit: TensorFlow keeps a thread for each."""
        if self._size == 1:
            return flat
        return tf.raw_ops.CollectiveReduceV2(
            input=flat, group_size=self._size, group_key=_GPU_GROUP if on_gpu else _GROUP, instance_key=key,
            ordering_token=[], merge_op="Add", final_op="Id", communication_hint="nccl" if on_gpu else "ring",
            timeout_seconds=timeout,
        )  # fmt: skip

    def _gather(self, block: Any, key: Any) -> Any:
        """Concatenates blocks of the same shape."""
        if self._size == 1:
            return block
        return tf.raw_ops.CollectiveGatherV2(
            input=block, group_size=self._size, group_key=_GROUP, instance_key=key, ordering_token=[],
            communication_hint="ring",
        )  # fmt: skip


def _key(*parts: Any) -> int:
    """Returns the key of a collective, the same on all ranks. The first part is its name."""
    # Datasets number the names of their collectives. The numbers start again from 0: TensorFlow keeps all keys.
    name = re.sub(r"(?<=^keras_dist_(?:batch|count)_)\d+", lambda match: str(int(match[0]) % 1024), str(parts[0]))
    return zlib.crc32(repr((name, *parts[1:])).encode()) & 0x7FFFFFFF


def _key_of_length(key: int, length: Any) -> Any:
    """Returns the key of a collective whose length is known only when it runs."""
    mixed = tf.cast(length, tf.int64) * 2654435761 + key
    return tf.cast(tf.bitwise.bitwise_and(mixed ^ tf.bitwise.right_shift(mixed, 17), 0x7FFFFFFF), tf.int32)


def _padded_length(length: Any) -> Any:
    """Rounds a length up, by at most a quarter, so that there are few different keys."""
    length = tf.maximum(length, 4)
    magnitude = tf.cast(tf.math.ceil(tf.math.log(tf.cast(length, tf.float64)) / math.log(2.0) - 1e-9), tf.int32)
    quarter = tf.bitwise.left_shift(tf.ones_like(magnitude), tf.maximum(magnitude - 3, 0))
    return (length + quarter - 1) // quarter * quarter


def _pad(flat: Any, length: Any) -> Any:
    return tf.pad(flat, [[0, length - tf.size(flat)]])


def _buffers(tensors: Sequence[Any]) -> list[list[int]]:
    """Returns which tensors are sent in one buffer: the small ones of each dtype, and each large one alone."""
    buffers: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        count = tensor.shape.num_elements()  # `None` if the shape is unknown
        alone = index if (count or 0) * tensor.dtype.size >= _LARGE_BYTES else None
        buffers.setdefault((tensor.dtype, alone), []).append(index)
    return list(buffers.values())


def _words(length: Any) -> Any:
    """Returns the number of words that hold `length` bytes."""
    return (length + _WORD - 1) // _WORD


def _as_words(tensor: Any, length: Any) -> Any:
    """Returns the bits of a tensor as `length` words."""
    return tf.bitcast(tf.reshape(_pad(to_bytes(tensor), length * _WORD), [-1, _WORD]), tf.int32)


def _bytes_of(words: Any) -> Any:
    return tf.reshape(tf.bitcast(words, tf.uint8), [-1])


_WAIT_SECONDS = 600.0  # the same as for Horovod's stall inspector
_PEER_LOSS = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError,
)  # fmt: skip
_HINT = "Check these addresses, which TF_CONFIG or Slurm has, and the firewalls between the hosts. "
_SRUN_HINT = f"If each task of srun is to train alone, set {environment.BACKEND}=serial. "


class MultiWorker(LocalTraining, ReplicaBackend, ProcessBackend):
    """Trains with TensorFlow's collective all-reduce over processes or machines.

    Start the processes with `keras-dist run --backend multi_worker`, or set `TF_CONFIG` for each, with the address of
    every rank: `{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}`.
    Under Slurm, `srun python train.py` needs neither.

    Args:
        communication: `"ring"` sums gradients on the hosts, `"nccl"` on the GPUs, if each rank has one. `"auto"` is
            the ring.
        devices: Names of the devices of each rank, such as `["GPU:0", "GPU:1"]`. Each has a copy of every weight, as
            with `kd.Mirrored`, and the sums over the devices of a rank are summed over the ranks. All ranks must have
            equally many. Default: all GPUs that a rank sees if it is the only one on its host, or Slurm shows it only
            its own (`--gpus-per-task`); one GPU if there are more ranks, or after `keras-dist run -np 1`. Missing CPUs
            (`["CPU:0", "CPU:1"]`) are created, so that you can try a script without GPUs.

    Raises:
        ConfigurationError: If an option is unknown, or a device doesn't exist.

    Example:

    ```python
    kd.init(kd.MultiWorker(communication="nccl"))
    ```
    """

    name = "multi_worker"
    _sign_of_peer_loss = "a connection of TensorFlow's collectives was closed"

    def __init__(
        self, communication: Literal["auto", "ring", "nccl"] = "auto", devices: Sequence[str] | None = None
    ) -> None:
        check_choice("option", "communication", communication, ("auto", "ring", "nccl"))
        self._options: dict[str, Any] = {"communication": communication, "devices": list_names(devices)}
        self._server: store.Server | None = None

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        if launch is None or not launch.workers:
            return Priority(0, "no TF_CONFIG found")
        return Priority(10, f"started by {launch.launcher}")

    def start(self, launch: Launch | None) -> None:
        if launch is None or not launch.workers:
            raise ConfigurationError(
                "The backend 'multi_worker' needs a cluster, which tells each process its rank.",
                "no TF_CONFIG" + (f", in a process started by {launch.launcher}" if launch is not None else ""),
                "Start the script with `keras-dist run -np N --backend multi_worker script.py`, or set TF_CONFIG "
                "for each process, or use backend='auto', which is serial under plain `python`.",
            )
        seconds = join_seconds()
        self.topology = launch.topology
        if tf_compat.tensorflow_has_started():
            raise ConfigurationError(
                "TensorFlow has started before this process could join the others.",
                "a tensor, variable or device that was used above `kd.init()`",
                "Move `kd.init()` above everything that uses TensorFlow.",
            )
        has_several = prepare_devices(self._options["devices"], self.topology, launch)
        on_gpu = self._options["communication"] == "nccl"
        if on_gpu and not tf.config.get_visible_devices("GPU"):
            raise ConfigurationError(
                "NCCL works between GPUs only.", "communication='nccl' on a process without GPU", "Use 'ring'."
            )
        bind(launch)
        rendezvous = join(launch)
        self._collectives = _connect(launch, seconds, on_gpu)
        if has_several:
            self._mirror(find_devices(self._options["devices"]))
        rendezvous = rendezvous or self._serve_store(launch)
        if self.topology.size == 1:
            return
        self._watchdog = Watchdog(
            self.topology, rendezvous, self.translate, tf_compat.abort_collectives,
            environment.seconds(environment.WAIT_TIMEOUT, _WAIT_SECONDS), launch.workers, self._server is not None,
        )  # fmt: skip

    def _serve_store(self, launch: Launch) -> Rendezvous | None:
        """Lets the chief serve the store where no launcher does. Returns `None` if not all ranks can reach it."""
        host, place = launch.workers[0].rpartition(":")[0], None
        if self.topology.is_chief:
            secret = secrets.token_hex()
            try:
                self._server = store.Server(host, secret)
            except OSError:  # the name leads to this machine, but belongs to none of its interfaces
                self._server = store.Server("", secret)
            if self.topology.local_size < self.topology.size and self._server.is_local:  # as in Debian's /etc/hosts
                self._server.close()
                self._server = store.Server("", secret)
            place = (host, self._server.port), secret
        rendezvous = Rendezvous(*self.all_gather_object("kd.init() (address of the store)", place)[0])
        key = f"reached_{self.topology.rank}"
        rendezvous.put(key, "1")
        is_reached = self.all_gather_object("kd.init() (store)", rendezvous.get(key) == "1")
        unreached = [rank for rank, reached in enumerate(is_reached) if not reached]
        if not unreached:
            return rendezvous
        if self.topology.is_chief:
            logger().warning(
                "ranks %s can't connect to a second port of %s, so ranks in different calls would wait forever, "
                "without an error.", unreached, host,
            )  # fmt: skip
        return None

    def _is_peer_loss(self, error: BaseException) -> bool:
        return isinstance(error, tf.errors.OpError) and (
            isinstance(error, _PEER_LOSS) or "Collective ops is aborted" in str(error)
        )


def _connect(launch: Launch, seconds: float, on_gpu: bool) -> TensorFlowCollectives:
    """Listens for the other ranks, and waits until all of them do."""
    rank, workers = launch.topology.rank, launch.workers
    if launch.is_srun:
        environment.check_slurm_names(workers)
    bypass_proxies(workers)
    try:
        with only_for_its_network(workers[rank], warns=rank == 0):
            tf_compat.start_collectives(workers, rank)
    except tf.errors.OpError as error:
        raise ConfigurationError(
            f"{str(launch.topology).capitalize()} can't listen at its address.",
            f"{workers[rank]} ({str(error).splitlines()[0]})",
            "Look for a process of an earlier run that still uses the port, or set another one in TF_CONFIG. Under "
            "Slurm, `srun keras-dist run` finds free ports.",
        ) from error
    names = {other: f"rank {other} at {address}" for other, address in enumerate(workers) if other != rank}
    wait_for_ranks(names, lambda other: listens(workers[other]), _HINT + _SRUN_HINT * launch.is_srun)
    collectives = TensorFlowCollectives(launch.topology, on_gpu)
    try:
        collectives.connect(seconds)
    except tf.errors.OpError as error:
        raise not_joined(seconds, str(error).splitlines()[0], _HINT) from error
    return collectives
