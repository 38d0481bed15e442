"""Private names for using the real TPU compiler without a TPU.

TensorFlow 2.21, JAX 0.10.2 with its libtpu, 2026-11: `check_environment.py` pins these versions, as all of it may
change. `tests/multiprocess/test_dry_run.py` fails when one of them changes.
"""

from __future__ import annotations

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
from tensorflow.python.distribute import tpu_strategy
from tensorflow.python.framework import kernels

from keras_dist.compat.tpu_emulation import collectives, one_replica

_XLA = "XLA_CPU_JIT"  # the TPU's kernels are in tensorflow-tpu only; XLA can compile the same operations


@dataclasses.dataclass
class Traced:
    """The traced step of one replica.

    Args:
        function: The function, for XLA.
        graph: Its graph.
        specs: The specifications of its arguments.
        reductions: The number of reductions over the replicas in the trace.
    """

    function: Any
    graph: Any
    specs: Sequence[Any]
    reductions: int


def trace(strategy: Any, step: Callable[[Any], Any], specs: Any) -> Traced:
    """Traces a step as one replica of the strategy runs it.

    Args:
        strategy: From `emulated_strategy`.
        step: Takes a batch.
        specs: Structure of `tf.TensorSpec`, of one replica's share.
    """
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
        with one_replica(cores), tpu_strategy._TPUReplicaContext(strategy), collectives(all_reduce):
            return step(batch)

    flat = tf.nest.flatten(specs)
    concrete = replica.get_concrete_function(*flat)
    return Traced(replica, concrete.graph, flat, reductions)


def ops_of(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph and of all functions in it."""
    seen = set()
    pending = [graph]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield from current.get_operations()
        pending.extend(function.graph for function in current._functions.values() if hasattr(function, "graph"))


def start_xla() -> None:
    """Registers XLA's kernels, which happens when it first compiles something."""
    tf.function(lambda x: x + 1, jit_compile=True)(tf.zeros([]))


@functools.cache  # a step has thousands of operations of some dozen types
def xla_compiles(op_type: str) -> bool:
    """True if XLA can compile an operation. Call `start_xla` first."""
    return any(kernel.device_type == _XLA for kernel in kernels.get_registered_kernels_for_op(op_type).kernel)


def lower(traced: Traced) -> bytes:
    """Returns a traced step as StableHLO, the input of XLA's compilers."""
    code: bytes = traced.function.experimental_get_compiler_ir(*traced.specs)(stage="stablehlo_serialized")
    return code


# --- Compiling ---


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The measures of a step that the TPU compiler has compiled, in bytes per replica.

    Args:
        arguments: Weights, optimizer state and data.
        results: Results that do not overwrite an argument.
        temporary: Activations and other temporary memory.
        code: The program.
        flops: Floating-point operations of one replica in one step.
        bytes_accessed: Memory traffic in one step.
        reductions: Number of all-reduces after the compiler has combined some.
    """

    arguments: int
    results: int
    temporary: int
    code: int
    flops: float
    bytes_accessed: float
    reductions: int

    @property
    def memory(self) -> int:
        return self.arguments + self.results + self.temporary + self.code


class OutOfMemoryError(Exception):
    """The step needs more memory than the chip has.

    Args:
        needed: Bytes, 0 if unknown.
        available: Bytes, 0 if unknown.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} of {available} bytes")
        self.needed = needed
        self.available = available


class CompilerError(Exception):
    """The compiler refuses the step. The text is the compiler's."""


def versions() -> dict[str, str]:
    """Returns the versions of the packages that compile."""
    return {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}


def compile_for(topology: str, replicas: int, code: bytes) -> Compiled:
    """Compiles a step with the real TPU compiler.

    Args:
        topology: The compiler's name of the topology, such as `"v5e:2x4"`.
        replicas: Number of replicas.
        code: The result of `lower`.

    Raises:
        OutOfMemoryError: If the step does not fit into memory.
        CompilerError: If the compiler refuses it for another reason.
    """
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
    return _measure(program)


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


def _measure(program: Any) -> Compiled:
    memory, cost = program.get_compiled_memory_stats(), program.cost_analysis()
    text = program.hlo_modules()[0].to_string()
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=float(cost.get("flops", 0)),
        bytes_accessed=float(cost.get("bytes accessed", 0)),
        reductions=len(re.findall(r" all-reduce(?:-start)?\(", text)),
    )


_SIZE = r"\(?([\d.]+)([KMG])\)?"
_TOO_MUCH = re.compile(rf"{_SIZE} exceeds (?:available HBM )?{_SIZE}|Used {_SIZE} of {_SIZE}")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def _explained(message: str) -> Exception:
    if "RESOURCE_EXHAUSTED" not in message:
        return CompilerError(message)
    found = _TOO_MUCH.search(message)
    if found is None:
        return OutOfMemoryError(0, 0)
    needed, unit, available, available_unit = (group for group in found.groups() if group)
    return OutOfMemoryError(int(float(needed) * _UNITS[unit]), int(float(available) * _UNITS[available_unit]))
