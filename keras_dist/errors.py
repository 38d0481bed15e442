"""The errors that keras_dist raises: a base class and its subclasses.

Every message has the same three parts: the problem, what was received, and the remedy.
"""

import signal
from collections.abc import Iterable, Sequence
from typing import Any


class DistributionError(RuntimeError):
    """Base class of every error that keras_dist raises on purpose.

    Args:
        problem: What is wrong, in one sentence.
        received: What was found instead of what was expected.
        remedy: What the user can do about it.

    Example:

    >>> print(DistributionError("Unknown backend.", "backend='mpi'", "Use one of 'serial', 'horovod'."))
    Unknown backend.
    Received: backend='mpi'
    Remedy: Use one of 'serial', 'horovod'.
    """

    def __init__(self, problem: str, received: str | None = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.received = received
        self.remedy = remedy
        lines = [problem]
        if received is not None:
            lines.append(f"Received: {received}")
        if remedy is not None:
            lines.append(f"Remedy: {remedy}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type, tuple[str, str | None, str | None]]:
        return type(self), (self.problem, self.received, self.remedy)


class ConfigurationError(DistributionError, ValueError):
    """A backend, an option or the environment asks for something that is not available."""


class NotSupportedError(DistributionError):
    """The request can't give the same results as one process, so it is refused."""


class MismatchError(DistributionError):
    """The ranks are out of step: their data, weights, learning rates or calls differ."""


class PeerLostError(DistributionError):
    """Another rank died, raised, left early, or never arrived."""


class WorkerError(DistributionError):
    """A function failed on a rank. The traceback of the rank is in the message.

    Args:
        rank: The rank that failed first.
        problem: What happened.
        received: The traceback, or the last output.
        error: The exception, if it could be sent; `None` if the rank died or did not answer in time.
    """

    def __init__(self, rank: int, problem: str, received: str | None, error: BaseException | None = None) -> None:
        super().__init__(problem, received)
        self.rank = rank
        self.error = error

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.rank, self.problem, self.received, self.error)


class Stopped(KeyboardInterrupt):
    """A signal asks a command to stop."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__("Ctrl-C" if signum == signal.SIGINT else signum.name)
        self.exit_code = 128 + signum


def check_choice(what: str, name: str, value: Any, choices: Iterable[Any], also: str = "") -> None:
    """Raises if a value is none of the choices. `what` is the kind of setting, `also` names further choices."""
    if value not in (choices := list(choices)):
        known = ", ".join(repr(choice) for choice in choices)
        problem = f"Unknown value for the {what} `{name}`."
        raise ConfigurationError(problem, f"{name}={value!r}", f"Use one of {known}{also}.")


def check_alike(problem: str, of_ranks: Sequence[Any], remedy: str) -> None:
    """Raises `MismatchError` if the ranks have passed different values."""
    if any(value != of_ranks[0] for value in of_ranks):
        raise MismatchError(problem, "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(of_ranks)), remedy)


def other_keras_backend(received: str) -> ConfigurationError:
    """Returns the error for Keras on JAX, PyTorch or NumPy."""
    return ConfigurationError(
        "keras_dist trains with Keras on TensorFlow.", received,
        'Set KERAS_BACKEND=tensorflow before Keras is imported, or "backend": "tensorflow" in ~/.keras/keras.json.',
    )


def missing_package(error: ModuleNotFoundError) -> ConfigurationError | None:
    """Returns the error that explains a failed import of keras_dist, `None` if no known package is missing."""
    received = f"ModuleNotFoundError: {error}"
    if error.name in ("jax", "torch", "openvino"):
        return other_keras_backend(received)
    if error.name != "tensorflow":
        return None
    return ConfigurationError(
        "TensorFlow is not installed.", received,
        "Install it with an extra of keras_dist: `pip install '.[cpu]'`, '.[gpu]' or '.[tpu]' in a clone of it.",
    )
