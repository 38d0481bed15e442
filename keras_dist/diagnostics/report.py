"""The TPUs that there are, and the results of a dry run, as text and as JSON. Imports no TensorFlow."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_dist.errors import ConfigurationError

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    name: str  # the compiler's
    aliases: tuple[str, ...]
    replicas_per_chip: int  # devices that TensorFlow sees
    counted_per_chip: int  # by a TPU's name: `v3-8` has 4 chips with 2 cores each, `v5e-8` 8 chips
    memory: int  # bytes, of one chip
    shapes: dict[int, str]  # the compiler's topology for a number of chips


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_FLAT_FROM_4 = {4: "2x2", 16: "4x4", 64: "8x8", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}

GENERATIONS = (
    Generation("v2", (), 2, 2, 16 * _GIB, _FLAT_FROM_4),
    Generation("v3", (), 2, 2, 32 * _GIB, _FLAT_FROM_4),
    # TensorFlow joins the two cores of a v4 chip to one device; the compiler alone sees two.
    Generation("v4", (), 2, 2, 32 * _GIB, _CUBES),
    Generation("v5e", ("v5litepod", "v5lite"), 1, 1, 16 * _GIB, _FLAT),
    Generation("v5p", ("v5",), 1, 2, 95 * _GIB, _CUBES),
    Generation("v6e", ("trillium",), 1, 1, 32 * _GIB, _FLAT),
    Generation("tpu7x", ("v7x", "ironwood"), 2, 2, 192 * _GIB, _CUBES),
)


@dataclasses.dataclass(frozen=True)
class Target:
    name: str  # as the user typed it
    topology: str  # the compiler's name of it, "v5e:2x4"
    chips: int
    replicas: int  # devices that TensorFlow sees
    memory: int  # bytes for one replica


def target_of(name: str) -> Target:
    """Returns the TPU of a name like `"v5e-8"`, `"v5litepod-8"`, `"v3-8"`, `"v4-16"`, or `"v5e:2x4"`."""
    typed = name.strip().lower()
    known = []
    for generation in GENERATIONS:
        replicas_per_chip = generation.replicas_per_chip
        for chips, shape in generation.shapes.items():
            topology, count = f"{generation.name}:{shape}", chips * generation.counted_per_chip
            if typed in (topology, *(f"{alias}-{count}" for alias in (generation.name, *generation.aliases))):
                memory = generation.memory // replicas_per_chip
                return Target(typed, topology, chips, chips * replicas_per_chip, memory)
        known.append(", ".join(f"{generation.name}-{n * generation.counted_per_chip}" for n in generation.shapes))
    raise ConfigurationError("Unknown TPU.", f"target={name!r}", f"Use one of {'; '.join(known)}.")


ANSWERS = {
    "forbidden": "forbidden operations", "compiles": "whether it compiles", "memory": "memory",
    "largest_batch": "largest batch",
}  # fmt: skip


@dataclasses.dataclass
class Report:
    """The results of a dry run, as far as they are known. Sizes are in bytes, for one replica.

    The text only ever grows by lines at its end, so that each can be shown as soon as it is known.
    """

    target: str  # the TPU, as the user typed it
    topology: str  # the compiler's name of the TPU
    chips: int
    replicas: int  # devices of the TPU that TensorFlow sees
    batch: int = 0  # global batch size
    batch_per_replica: int = 0
    parameters: int = 0  # number of the model's parameters
    compiles: bool = False
    fits: bool = False  # it compiles, and also fits into the memory
    # Operations that a TPU can't run, with `op`, `layer`, `file`, `line`, `why`.
    forbidden: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str = ""  # the compiler's message, if it refuses the step for another reason
    # Bytes needed: `total`, `arguments`, `temporary`, `results`, `code`, and the device's, `available`.
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    largest_batch: int = 0  # the largest global batch size that was found to fit; 0 if none was
    too_large_batch: int = 0  # the smallest that was found not to fit; 0 if all did
    search_end: str = ""  # why no larger batch was tried, if all did fit
    flops: float = 0.0  # floating-point operations of one replica in one step
    bytes_accessed: float = 0.0  # memory traffic of one replica in one step
    gradient_reductions: int = 0  # over the replicas in one step, as traced
    compiled_reductions: int = 0  # what is left of them after the compiler has combined some
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of each phase: `trace`, `compile`, `search`
    cached: bool = False  # all of the compiler's results were
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of the compiler and its libraries
    missing: list[str] = dataclasses.field(default_factory=lambda: list(ANSWERS))  # the results that are not there yet
    stopped: str = ""  # what has ended the dry run before they were there

    @property
    def ok(self) -> bool:
        """True if the TPU can train the model."""
        return self.compiles and self.fits and not self.forbidden

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.target} ({self.topology}): {_count(self.chips, 'chip')}, {_count(self.replicas, 'replica')}"]
        if self.batch:
            lines += [
                f"batch:         {self.batch}, {self.batch_per_replica} on each replica",
                f"weights:       {self.parameters:,}",
            ]
        if "forbidden" not in self.missing and not self.forbidden:
            lines.append("operations:    a TPU can run them all")
        if "compiles" not in self.missing:
            lines += self._compilation()
        if (self.largest_batch or self.too_large_batch) and (self.stopped or not self.missing):
            lines.append(f"largest batch: {self._largest()}")
        if self.seconds and not self.missing:
            took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.seconds.items())
            lines.append(f"took:          {took}{' (cached)' if self.cached else ''}")
        if self.stopped:
            missing = ", ".join(ANSWERS[name] for name in self.missing)
            lines.append(f"missing:       {missing}; stopped by {self.stopped}")
        return "\n".join(lines)

    def _compilation(self) -> list[str]:
        verdict = "no"
        if self.forbidden:
            verdict = f"no, {_count(len(self.forbidden), 'operation')} that a TPU can't run:"
        elif self.compiles:
            verdict = "yes" if self.fits else "yes, but it doesn't fit into the memory"
        lines = [f"compiles:      {verdict}"]
        for one in self.forbidden:
            layer = f"layer {one['layer']!r}" if one["layer"] else ""
            place = ", ".join(filter(None, [layer, f"{one['file']}:{one['line']}" if one["file"] else ""]))
            lines += [f"  {one['op']}{': ' if place else ''}{place}", f"    {one['why']}"]
        if self.error:
            lines.append(f"  the compiler: {self.error}")
        if self.memory:
            lines.append(f"memory:        {self._memory()}")
        if self.compiles and self.fits:
            flops, traffic = (_short(number, 1000, ("", *"kMGT")) for number in (self.flops, self.bytes_accessed))
            lines += [
                f"work:          {flops}flop and {traffic}B of memory traffic a step, on each replica",
                f"all-reduces:   {self.gradient_reductions} of gradients; the compiler combines them into "
                f"{self.compiled_reductions}",
            ]
        return lines

    def _memory(self) -> str:
        needed, available = self.memory.get("total", 0), self.memory["available"]
        if not needed:
            return f"more than the {_size(available)} of a replica"
        named = [name for name in ("arguments", "temporary", "code") if name in self.memory]
        parts = ", ".join(f"{name} {_size(self.memory[name])}" for name in named)
        share = 100 * needed / available
        return f"{_size(needed)} of {_size(available)} ({share:.1f} %){': ' if parts else ''}{parts}"

    def _largest(self) -> str:
        if not self.largest_batch:
            return f"none was found to fit; {self.too_large_batch} doesn't"
        fits = f"{self.largest_batch}, {self.largest_batch // self.replicas} on each replica"
        if self.too_large_batch:
            return f"{'at least ' if self.stopped else ''}{fits}; {self.too_large_batch} doesn't fit"
        return f"at least {fits}" + (f": {self.search_end}" if self.search_end else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _size(number: float) -> str:
    return _short(number, 1024, ("B", "KiB", "MiB", "GiB"))


def _short(number: float, base: int, units: Sequence[str]) -> str:
    """Returns a number with one of these units, each `base` times the one before."""
    index = 0
    while number >= base and index + 1 < len(units):
        number, index = number / base, index + 1
    return f"{number:.{2 if index else 0}f} {units[index]}"
