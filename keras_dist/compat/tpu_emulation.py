"""Private names for TPUStrategy and the TPU compiler without a TPU. TensorFlow 2.21, 2026-11."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.client import session
from tensorflow.python.distribute import tpu_strategy, values
from tensorflow.python.framework import kernels, ops
from tensorflow.python.tpu import tpu, tpu_function, tpu_replication, tpu_system_metadata
from tensorflow.python.tpu.ops import tpu_ops
from tensorflow.python.util import nest

from keras_dist.compat.tf_compat import patched


class _NoTPU(tf.distribute.cluster_resolver.TPUClusterResolver):
    """A resolver that describes cores that do not exist."""

    def __init__(self, cores: int) -> None:
        super().__init__("local")
        self._cores = cores

    def get_tpu_system_metadata(self) -> Any:
        host = "/job:localhost/replica:0/task:0/device:"
        devices = [session._DeviceAttributes(f"{host}CPU:0", "CPU", 0, 0)]
        devices += [session._DeviceAttributes(f"{host}TPU:{core}", "TPU", 0, 0) for core in range(self._cores)]
        return tpu_system_metadata.TPUSystemMetadata(
            num_cores=self._cores, num_hosts=1, num_of_cores_per_host=self._cores, topology=None, devices=tuple(devices)
        )


class _OneReplica(tpu_replication.TPUReplicateContext):
    """Uses one replica's copy of a distributed variable, instead of an input of the replicated computation."""

    def __init__(self, cores: int, core: int) -> None:
        super().__init__("one_replica", cores, tf.raw_ops.NoOp())
        self._core = core

    def AddOp(self, op: Any) -> None:
        pass

    def AddValue(self, value: Any) -> Any:
        return value

    def get_replicated_var_handle(self, name: Any, handle_id: Any, vars_: Any, *_: Any, **__: Any) -> Any:
        return vars_[self._core].handle


def emulated_strategy(cores: int) -> tf.distribute.Strategy:
    """Returns a real TPUStrategy over this number of cores, with its variables on the CPU.

    TPUStrategy has an iterator for each core. To delete one, TensorFlow 2.21 waits for the thread that tunes it, for up
    to a minute. So here the elements of a dataset are those of all replicas.
    """

    def of_all(element: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: values.PerReplica(tuple(tf.unstack(leaf, cores))), element)

    def elements_of_all(make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        context = tf.distribute.InputContext(num_replicas_in_sync=cores)
        return make(context).batch(cores, drop_remainder=True).map(of_all)

    strategy = tf.distribute.TPUStrategy(_NoTPU(cores))
    strategy._enable_packed_variable_in_eager_mode = False  # packed variables need a TPU
    if cores > 1:
        strategy.distribute_datasets_from_function = elements_of_all
    return strategy


@contextlib.contextmanager
def _one_replica(cores: int, core: int, reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Traces the work of one replica inside a graph, without the TPU's collectives: plain TensorFlow has no kernels."""
    graph = ops.get_default_graph()
    outer = graph._get_control_flow_context()
    graph._set_control_flow_context(_OneReplica(cores, core))
    instead = {
        "cross_replica_sum": lambda x, group_assignment=None, name=None: reduce(x),
        "all_to_all": lambda x, *args, **kwargs: tf.identity(x),  # of seeds and counters only
    }
    try:
        with tpu_function.tpu_shard_context(cores), patched(tpu_ops, **instead):
            yield
    finally:
        graph._set_control_flow_context(outer)


@contextlib.contextmanager
def runs_on_cpu() -> Iterator[None]:
    """Makes an emulated strategy run its steps on the CPU, in this context.

    The replicas are traced one after another into the same graph. Each sum is first an `Identity` of the replica's own
    value. Once all replicas are traced, it gets the sum as input.
    """

    def replicate(computation: Any, inputs: Any = None, **_: Any) -> Any:
        graph, outputs = ops.get_default_graph(), []
        summands: list[list[Any]] = [[] for _ in inputs]

        def reduce(own: list[Any], value: Any) -> Any:
            if ops.get_default_graph() is not graph:
                raise NotImplementedError("a sum over emulated cores inside a tf.function, tf.cond or tf.while_loop")
            identity = tf.identity(tf.convert_to_tensor(value))  # sparse rows become dense, as on a TPU
            own.append(identity)
            return identity

        for core, (replica_id, *arguments) in enumerate(inputs):
            unknown = tf.raw_ops.PlaceholderWithDefault(input=replica_id, shape=[])  # a TPU traces once for all cores
            with _one_replica(len(inputs), core, functools.partial(reduce, summands[core])):
                outputs.append(nest.flatten(computation(unknown, *arguments)))
        for identities in zip(*summands, strict=True):
            total = tf.add_n([identity.op.inputs[0] for identity in identities])
            for identity in identities:
                identity.op._update_input(0, total)
        return outputs

    with patched(tpu, replicate=replicate):
        yield


@dataclasses.dataclass
class Traced:
    """The traced step of one replica."""

    function: Any
    graph: Any
    specs: Sequence[Any]  # of the arguments
    reductions: int  # in the trace, over the replicas


def trace(strategy: Any, step: Callable[[Any], Any], specs: Any) -> Traced:
    """Traces a step as one replica of an emulated strategy runs it on its share, a structure of `tf.TensorSpec`."""
    cores, reductions = strategy.num_replicas_in_sync, 0
    all_replicas = [list(range(cores))]

    def all_reduce(x: Any) -> Any:
        nonlocal reductions
        reductions += 1
        # Lowers to the same code as CrossReplicaSum.
        return gen_xla_ops.xla_all_reduce(x, all_replicas, reduce_op="Add", mode="CrossReplica")

    @tf.function(jit_compile=True, autograph=False)
    def replica(*leaves: Any) -> Any:
        batch = tf.nest.pack_sequence_as(specs, leaves)
        with _one_replica(cores, 0, all_reduce), tpu_strategy._TPUReplicaContext(strategy):
            return step(batch)

    flat = tf.nest.flatten(specs)
    concrete = replica.get_concrete_function(*flat)
    return Traced(replica, concrete.graph, flat, reductions)


def start_xla() -> None:
    """Registers XLA's kernels, which happens when it first compiles something."""
    tf.function(lambda x: x + 1, jit_compile=True)(tf.zeros([]))


@functools.cache  # a step has thousands of operations of some dozen types
def xla_compiles(op_type: str) -> bool:
    """True if XLA can compile an operation. Call `start_xla` first."""
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    # The TPU's kernels are in tensorflow-tpu only; XLA can compile the same operations.
    return any(kernel.device_type == "XLA_CPU_JIT" for kernel in registered)


def lower(traced: Traced) -> bytes:
    """Returns a traced step as StableHLO, the input of XLA's compilers."""
    return traced.function.experimental_get_compiler_ir(*traced.specs)(stage="stablehlo_serialized")


# --- Compiling ---


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The measures of a step that the TPU compiler has compiled, in bytes per replica."""

    arguments: int  # weights, optimizer state and data
    results: int  # that do not overwrite an argument
    temporary: int  # activations, for example
    code: int
    flops: float  # of one replica in one step
    bytes_accessed: float  # in one step
    reductions: int  # all-reduces, after the compiler has combined some

    @property
    def memory(self) -> int:
        return self.arguments + self.results + self.temporary + self.code


class OutOfMemoryError(Exception):
    """The step needs more bytes than the chip has; 0 if they are unknown."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} of {available} bytes")
        self.needed, self.available = needed, available


class CompilerError(Exception):
    """The compiler refuses the step. The text is the compiler's."""


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def compile_for(topology: str, replicas: int, code: bytes) -> Compiled:
    """Compiles what `lower` returned with the real TPU compiler, for a topology such as `"v5e:2x4"`."""
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    # A host has four chips, unless the TPU is a single one.
    settings = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **settings).devices)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # libtpu, just loaded, prints a stack of C++
    if len(devices) != replicas:
        raise CompilerError(f"{topology} has {len(devices)} devices, not {replicas}")
    options = xla_client.CompileOptions()
    for part in (options, options.executable_build_options):
        part.num_replicas, part.num_partitions = replicas, 1
    assignment = np.array([[device.id] for device in devices], np.int32)
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    try:
        program = devices[0].client.compile(_module(code), xla_client.DeviceList(tuple(devices)), options)
    except Exception as error:
        raise _explained(str(error)) from error
    memory, cost = program.get_compiled_memory_stats(), program.cost_analysis()
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=float(cost.get("flops", 0)),
        bytes_accessed=float(cost.get("bytes accessed", 0)),
        reductions=len(re.findall(r" all-reduce(?:-start)?\(", program.hlo_modules()[0].to_string())),
    )


def fingerprint(code: bytes) -> str:
    """Returns a hash of a computation, the same each time it is traced."""
    text = _module(code).operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(re.sub(r"^module @\S+", "module", text).encode()).hexdigest()


def _module(code: bytes) -> Any:
    """Parses StableHLO, and removes an operation that TensorFlow adds for other compilers."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        module, copies = ir.Module.parse(code), []

        def look(op: Any) -> Any:
            if op.name == "mhlo.copy":
                copies.append(op)
            return ir.WalkResult.ADVANCE

        module.operation.walk(look)
        for op in copies:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        return module


def _explained(message: str) -> Exception:
    if "RESOURCE_EXHAUSTED" not in message:
        return CompilerError(message)
    size, units = r"\(?([\d.]+)([KMG])\)?", {"K": 2**10, "M": 2**20, "G": 2**30}
    found = re.search(rf"{size} exceeds (?:available HBM )?{size}|Used {size} of {size}", message)
    if found is None:
        return OutOfMemoryError(0, 0)
    needed, unit, available, available_unit = (group for group in found.groups() if group)
    return OutOfMemoryError(int(float(needed) * units[unit]), int(float(available) * units[available_unit]))
