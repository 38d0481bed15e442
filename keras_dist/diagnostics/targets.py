"""TPUs by the names that users type, and their names in the TPU compiler."""

from __future__ import annotations

import dataclasses

from keras_dist.errors import ConfigurationError

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of TPUs.

    Args:
        name: The compiler's name of it.
        aliases: Other names of it.
        replicas_per_chip: Devices that TensorFlow sees on one chip.
        counted_per_chip: What a TPU's name counts on a chip: `v3-8` has 4 chips with 2 cores each, `v5e-8` 8 chips.
        memory: Bytes of memory on one chip.
        shapes: The compiler's topology for a number of chips.
    """

    name: str
    aliases: tuple[str, ...]
    replicas_per_chip: int
    counted_per_chip: int
    memory: int
    shapes: dict[int, str]


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
    """A TPU that a model is compiled for.

    Args:
        name: As the user typed it.
        topology: The compiler's name of it, `"v5e:2x4"`.
        chips: Number of chips.
        replicas: Number of devices that TensorFlow sees.
        memory: Bytes of memory for one replica.
    """

    name: str
    topology: str
    chips: int
    replicas: int
    memory: int


def target_of(name: str) -> Target:
    """Returns the TPU of a name like `"v5e-8"`, `"v5litepod-8"`, `"v3-8"`, `"v4-16"`, or `"v5e:2x4"`.

    Raises:
        ConfigurationError: Names the known TPUs.
    """
    typed = name.strip().lower()
    for generation in GENERATIONS:
        for chips, shape in generation.shapes.items():
            count = chips * generation.counted_per_chip
            names = {f"{alias}-{count}" for alias in (generation.name, *generation.aliases)}
            if typed in names | {f"{generation.name}:{shape}"}:
                return Target(
                    name=typed,
                    topology=f"{generation.name}:{shape}",
                    chips=chips,
                    replicas=chips * generation.replicas_per_chip,
                    memory=generation.memory // generation.replicas_per_chip,
                )
    raise ConfigurationError("Unknown TPU.", f"target={name!r}", f"Use one of {'; '.join(map(_names, GENERATIONS))}.")


def _names(generation: Generation) -> str:
    return ", ".join(f"{generation.name}-{chips * generation.counted_per_chip}" for chips in generation.shapes)
