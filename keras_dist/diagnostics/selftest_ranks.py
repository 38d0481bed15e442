"""The checks that each rank of `keras-dist selftest` makes. Rank 0 prints what all have found.

Beside the sums, plain TCP connections between the ranks measure what their network itself takes for the same bytes.
"""

import contextlib
import platform
import select
import socket
import statistics
import sys
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist import api, cluster, environment
from keras_dist.comm.backend import Backend
from keras_dist.environment import installed_version
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.nodes import LOOPBACK

_CHUNK = 2**20
_SECONDS = 30.0


@contextlib.contextmanager
def linked(backend: Backend) -> Iterator[Callable[[int], Callable[[], None]]]:
    """Connects each rank to the next one. Every rank must call it, the function it yields, and what that returns.

    The last one sends what a ring sends to sum that many bytes: an n-th of them in each of 2 (n - 1) steps.
    """
    topology, address = backend.topology, _own_address(backend)
    try:
        server, failure = socket.create_server((address, 0)), None
    except OSError as error:
        server, failure = socket.socket(), error  # tells the others, which would wait for this rank
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        port = 0 if failure else server.getsockname()[1]
        places = backend.all_gather_object("keras-dist selftest: addresses", [address, port])
        if failure:
            raise failure
        server.settimeout(_SECONDS)
        after = socket.create_connection(tuple(places[(topology.rank + 1) % topology.size]), _SECONDS)
        before = server.accept()[0]
        for connection in (after, before):
            stack.enter_context(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

        def ring(count: int) -> Callable[[], None]:
            sent = bytearray(-(-count // topology.size))
            received = bytearray(len(sent))

            def run() -> None:
                for _ in range(2 * (topology.size - 1)):
                    exchange(after, memoryview(sent), before, memoryview(received))

            return run

        yield ring


def exchange(receiver: socket.socket, sent: memoryview, sender: socket.socket, received: memoryview) -> None:
    """Sends and receives at once, over non-blocking connections, perhaps the same one.

    The sender sends as many bytes as `received` has room for. Raises an OSError if it has closed the connection, or
    nothing moves for 30 s.
    """
    while sent or received:
        readable, writable, _ = select.select([sender] if received else [], [receiver] if sent else [], [], _SECONDS)
        if writable:
            sent = sent[receiver.send(sent[:_CHUNK]) :]
        if readable:
            if not (count := sender.recv_into(received[:_CHUNK])):
                raise ConnectionError("the other side has closed the connection")
            received = received[count:]
        if not (readable or writable):
            raise TimeoutError(f"no byte has come or gone within {_SECONDS:g} s")


_CALL = "keras-dist selftest"
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
_LENGTHS = (1, 1000, 300_001)  # of tensors that are summed: some alone, some together in one message
# How many float32 numbers are summed, and how often. The largest are the gradients of a model of 6 M weights.
_SUMS = ((1, 50), (250_000, 20), (6_250_000, 5))
_SLOW = 0.1  # the share of the link's speed below which something is wrong with the network's settings
_TOLERANCE = 1e-5
_EPOCHS = 3


class Wrong(Exception):
    """What a rank has found is wrong. The text says what."""


def main() -> int:
    """Runs the checks on this rank, up to one that fails, and returns the exit code. Every rank must call it."""
    api.init(seed=0)
    backend = cluster.used_backend()
    if backend.topology.size == 1:
        raise ConfigurationError(
            "keras-dist selftest needs several ranks.", "one rank", "Use `keras-dist selftest -np 2`."
        )
    tf.config.experimental.enable_tensor_float_32_execution(False)  # GPUs would round too much
    for name, find, remedy in CHECKS:
        problem, found = "", ""
        try:
            found = find(backend)
        except Wrong as wrong:
            problem = str(wrong)
        problems = backend.all_gather_object(f"{_CALL}: {name}", problem)
        lines = [f"FAILED  {name}: rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if lines:
            lines.append(f"        Remedy: {remedy}")
        if backend.topology.is_chief:
            for line in lines or [f"ok      {name}: {line}" for line in found.splitlines()]:
                print(line, flush=True)
        if lines:
            return 1
    return 0


# --- The checks ---


def _ranks(backend: Backend) -> str:
    places = backend.all_gather_object(_CALL, f"{socket.gethostname()} ({_own_address(backend)})")
    placed = ", ".join(f"{count} on {place}" for place, count in Counter(places).items())
    own, of_horovod = installed_version("keras_dist"), installed_version("horovod")
    versions = f"keras-dist {own} keras {keras.__version__} tensorflow {tf.__version__}"
    if of_horovod is not None:
        versions += f" horovod {of_horovod}"
    return (
        f"{versions}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{backend.topology.size} have joined, {placed}; {backend.name}, {backend.describe_devices()}"
    )


def _sums(backend: Backend) -> str:
    """Sums tensors of each dtype whose sum is known, and not that of other ranks or positions."""
    topology = backend.topology
    values = [_pattern(topology.rank, topology.size, length, dtype) for dtype in _DTYPES for length in _LENGTHS]
    rows = tf.IndexedSlices(tf.fill([2, 3], topology.rank + 1.0), tf.constant([topology.rank, topology.size]), None)
    *sums, table = _sum_of(backend, [*values, rows], "selftest")()
    for found, sent in zip(sums, values, strict=True):
        of_ranks = [_pattern(rank, topology.size, len(sent), tf.float64).numpy() for rank in range(topology.size)]
        if not np.array_equal(found.numpy().astype("float64"), sum(of_ranks)):
            raise Wrong(f"the sum of {len(sent)} numbers of {sent.dtype.name} over the ranks is wrong")
    expected = np.zeros([topology.size + 1, 3])
    for rank in range(topology.size):
        expected[[rank, topology.size]] += rank + 1
    if not np.array_equal(tf.math.unsorted_segment_sum(table.values, table.indices, topology.size + 1), expected):
        raise Wrong("the rows of a sparse gradient are wrong")
    return f"{', '.join(_DTYPES)} and sparse rows, exactly as computed in one place"


def _pattern(rank: int, size: int, length: int, dtype: Any) -> tf.Tensor:
    """Returns whole numbers, on two ranks at each position, so that their sum is exact in 16 bits with any size."""
    index = tf.range(length)
    return tf.cast(tf.where((index + rank) % size < 2, index % 7 + rank % 5, 0), dtype)


def _sum_of(backend: Backend, tensors: list[Any], name: str) -> Callable[[], list[Any]]:
    """Returns a function that sums tensors over the ranks. Every rank must call it."""

    @tf.function
    def total() -> list[Any]:
        return backend.all_reduce(tensors, tf.constant([1.0]), name)[0]

    return lambda: list(total())


def _network(backend: Backend) -> str:
    try:
        with linked(backend) as ring:
            ring(1)()
    except OSError as error:
        address = _own_address(backend)
        raise Wrong(f"TCP over {address} does not connect this rank and its neighbours: {error}") from error
    return "each rank reaches the next one by TCP"


def _speed(backend: Backend) -> str:
    """Times sums beside the same bytes over the network alone, in turns."""
    lines, fastest = [], []  # other programs on the machine can only add to a time
    with linked(backend) as ring:
        for count, times in _SUMS:
            total = _sum_of(backend, [tf.zeros([count])], f"selftest_{count}")
            # Waits for a GPU, and copies one number only.
            functions = lambda total=total: total()[0][0].numpy(), ring(4 * count)
            functions[0]()  # traces, and lets Horovod agree on the tensor
            pairs = [[timeit.timeit(function, number=1) for function in functions] for _ in range(times)]
            sums, rings = zip(*pairs, strict=True)
            fastest.append((min(sums), min(rings)))
            alone, limit = statistics.median(sums), statistics.median(rings)
            size = f"{4 * count} bytes" if 4 * count < 1000 else f"{4 * count / 1e6:g} MB"
            lines.append(f"{size} summed in {_time(alone)}; the network alone takes {_time(limit)}")
    latency, (largest, limit) = fastest[0][0], fastest[-1]  # ranks that share their cores wait for each other
    if limit < _SLOW * (largest - latency):
        raise Wrong("; ".join(lines))
    return "\n".join(lines)


def _own_address(backend: Backend) -> str:
    """Returns the name or address by which the other ranks reach this one."""
    topology, launch = backend.topology, environment.detect_launch()
    if topology.local_size == topology.size:
        return LOOPBACK
    if launch and launch.workers:
        return launch.workers[topology.rank].rpartition(":")[0]
    return environment.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _training(backend: Backend) -> str:
    """Trains a small model on all ranks, and on each rank alone on all data."""
    random = np.random.default_rng(0)
    x = random.normal(size=(50, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    layers = keras.layers
    model, alone = (keras.Sequential([keras.Input([4]), layers.Dense(8, "tanh"), layers.Dense(1)]) for _ in range(2))
    alone.set_weights(model.get_weights())
    model = api.distribute(model)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, batch_size=16, epochs=_EPOCHS, shuffle=False, verbose=0)
    # A loop that is written by hand: nothing of keras_dist, and no `fit`, which it changes.
    optimizer, loss = keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError()
    for start in list(range(0, len(x), 16)) * _EPOCHS:
        with tf.GradientTape() as tape:
            value = loss(y[start : start + 16], alone(x[start : start + 16]))
        optimizer.apply(tape.gradient(value, alone.trainable_variables), alone.trainable_variables)
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    difference = max(float(np.max(np.abs(ours - theirs))) for ours, theirs in pairs)
    if not difference <= _TOLERANCE:
        raise Wrong(f"weights differ from those of one process by {difference:.2g}")
    return f"{_EPOCHS} epochs, the weights of one process; the largest difference is {difference:.1g}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


# The name of each; what every rank calls, which returns what it has found or raises `Wrong`; what to do if it is wrong.
CHECKS: tuple[tuple[str, Callable[[Backend], str], str], ...] = (
    ("ranks", _ranks, "See the messages above, and `keras-dist env` on each host."),
    (
        "sums", _sums,
        "Build Horovod again for this TensorFlow (`keras-dist install-horovod --force`), or try another backend "
        "(`--backend multi_worker`), and report it with the output of `keras-dist env`.",
    ),
    (
        "network", _network,
        "A firewall between the hosts must let the ranks through, on all ports above 1024. With several networks name "
        "the one that joins the hosts: `--interface eth1`.",
    ),
    (
        "speed", _speed,
        "Other programs may use the cores or the network. With several networks name the fast one: `--interface eth1`. "
        "With GPUs, Horovod needs NCCL (`keras-dist env` shows whether it has it).",
    ),
    ("training", _training, "Report it with the output of `keras-dist env`: this must not happen."),
)  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigurationError as refusal:  # another error keeps its name, by which the launcher knows it
        print(f"keras-dist selftest: {refusal}", file=sys.stderr)
        sys.exit(2)
