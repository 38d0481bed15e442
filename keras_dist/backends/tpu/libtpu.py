"""Whether the installed libtpu fits the installed tensorflow-tpu, by the packages' metadata.

With a wrong pair, importing TensorFlow kills the process, and no error can be caught. pip installs a wrong pair by
default: tensorflow-tpu 2.20.0 requires any libtpu 0.0.x. Measured in 2026-11.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable

from keras_dist.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Pair:
    """The versions of libtpu that work with a TensorFlow.

    Args:
        oldest: The oldest version that works.
        newest: The newest version that works.
        best: The version to install.
    """

    oldest: str
    newest: str
    best: str


# By the minor version of tensorflow-tpu. Other versions are unknown and not checked.
PAIRS = {
    "2.19": Pair("0.0.10", "0.0.10", "0.0.10"),
    "2.20": Pair("0.0.14", "0.0.30", "0.0.23"),
}
TENSORFLOW = "tensorflow-tpu"


def installed(distribution: str) -> str | None:
    """Returns the version of a distribution, `None` if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_before_tensorflow() -> None:
    """Raises `ConfigurationError` if TensorFlow is not imported yet and importing it would kill this process."""
    if "tensorflow" not in sys.modules:
        check()


def check(version_of: Callable[[str], str | None] = installed) -> None:
    """Raises if the installed libtpu doesn't fit the installed tensorflow-tpu.

    Args:
        version_of: Returns the version of a distribution, `None` if it is not installed.

    Raises:
        ConfigurationError: With the pair to install.
    """
    tensorflow = version_of(TENSORFLOW)
    pair = PAIRS.get(".".join((tensorflow or "").split(".")[:2]))
    if pair is None:
        return
    libtpu = version_of("libtpu")
    if libtpu is not None and _numbers(pair.oldest) <= _numbers(libtpu) <= _numbers(pair.newest):
        return
    raise ConfigurationError(
        f"The installed libtpu doesn't fit {TENSORFLOW} {tensorflow}: importing TensorFlow would kill the process."
        if libtpu
        else f"{TENSORFLOW} {tensorflow} is installed without libtpu, so it can't use a TPU.",
        f"libtpu {libtpu or 'not installed'}; {TENSORFLOW} {tensorflow} runs with {_range(pair)}",
        f"Install the pair: python -m pip install '{TENSORFLOW}=={tensorflow}' 'libtpu=={pair.best}'",
    )


def _range(pair: Pair) -> str:
    return pair.oldest if pair.oldest == pair.newest else f"{pair.oldest} to {pair.newest}"


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the release of a version as numbers, `(0, 0, 23)` for `0.0.23.dev1`."""
    numbers = []
    for part in version.split(".")[:3]:
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
