"""The `Backend` protocol: all that the rest of the library knows about how ranks talk to each other."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from keras_dist.environment import Launch
from keras_dist.errors import MismatchError, PeerLostError
from keras_dist.topology import Topology

if TYPE_CHECKING:
    from keras_dist.comm.rendezvous import Rendezvous

# How far apart the random streams of two replicas are while they train.
SEED_OFFSET = 1_000_003


@dataclasses.dataclass(frozen=True)
class Affinity:
    """How well a backend fits what the launcher left: the highest score is chosen by `"auto"`.

    Args:
        score: 0 if the backend can't run here; otherwise higher is better.
        reason: Why, for the line that `kd.init()` prints.
    """

    score: int
    reason: str


class Backend(abc.ABC):
    """One way for ranks to train together.

    Two kinds of methods: those for the host (`all_gather_object`, `broadcast_arrays`), called from Python between
    executions, and those for the step (`all_reduce`, `all_gather`), called while a step is traced or run.
    All of them are collectives: every rank calls them, in the same order, or the others wait for it. Whoever
    waits in vain is told by the backend (`MismatchError`, `PeerLostError`), never left hanging.
    """

    name: ClassVar[str]
    topology: Topology = Topology()

    @classmethod
    @abc.abstractmethod
    def affinity(cls, launch: Launch | None) -> Affinity:
        """Says how well this backend fits the environment of this process."""

    @abc.abstractmethod
    def start(self, launch: Launch | None) -> None:
        """Joins the cluster, and sets `topology`. Called once, before data and model exist."""

    @abc.abstractmethod
    def describe_devices(self) -> str:
        """Returns the devices in use in a few words, for the line that `kd.init()` prints."""

    # --- Training ---

    @abc.abstractmethod
    def distribute(self, target: Any, options: Any) -> None:
        """Makes a model, or an optimizer of a custom loop, span all replicas, in place. Twice is the same as once.

        Args:
            target: A `keras.Model` or a `keras.optimizers.Optimizer`.
            options: What `kd.distribute` was asked for, a `training.options.Options`.

        Raises:
            NotSupportedError: If this backend can't distribute it.
        """

    @property
    @abc.abstractmethod
    def loop(self) -> Any:
        """The verbs of a custom loop, `shard`, `run` and `reduce`: a `training.loop.Loop`, always the same one."""

    # --- On the host, between executions ---

    @abc.abstractmethod
    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
        """Gives `value` to all ranks and returns theirs, in the order of rank.

        Args:
            call: What the user called, such as `"model.save('digits.keras')"`. All ranks must be in the same
                call; otherwise all raise `MismatchError`, which names both.
            value: Anything that can be pickled, and small: it travels to every rank.
        """

    @abc.abstractmethod
    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the chief's values of numpy arrays that have the same shapes and dtypes on all ranks."""

    # --- In the step ---

    @abc.abstractmethod
    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        """Adds gradients up over the ranks, and carries one row of numbers from every rank to all.

        Args:
            gradients: Tensors or `tf.IndexedSlices`, already weighted by this rank's share; no `None`.
            row: float32 tensor of shape `(k,)`: what this rank tells the others.
            name: Unique among the reductions of one step.

        Returns:
            The sums, and a float32 tensor of shape `(size, k)` with the rows of all ranks.
        """

    @abc.abstractmethod
    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        """Adds a small float tensor of one shape up over the ranks.

        Args:
            numbers: Tensor, of the same shape and dtype on all ranks.
            name: Unique among the reductions of one step.
        """

    @abc.abstractmethod
    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        """Gives each rank its part of the chief's bytes.

        Args:
            payload: uint8 tensor of shape `(n,)`, the parts behind one another; on the other ranks empty.
            lengths: int32 tensor of shape `(size,)`, the length of each part; on the other ranks zeros.
            name: Unique among what is under way at the same time.

        Returns:
            uint8 tensor of shape `(length,)`.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: Any, name: str) -> Any:
        """Concatenates tensors along their first axis, in the order of rank. Only that axis may differ."""

    # --- Replicas of this process ---

    @property
    def replicas(self) -> int:
        """How many replicas this process has: devices that each compute a share of its own."""
        return 1

    @property
    def num_replicas(self) -> int:
        """How many replicas there are in all."""
        return self.topology.size * self.replicas

    def check_variables(self, variables: Sequence[Any]) -> None:  # noqa: B027
        """Raises `ConfigurationError` if these are not where the backend wants a model's variables."""

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function once for all replicas of this process, which have to make this call together."""
        return function(*args, **kwargs)

    # --- Life ---

    @property
    def rendezvous(self) -> Rendezvous | None:
        """A store of short texts that ranks reach at any time, beside the collectives; `None` if there is none."""
        return None

    @property
    def has_processes(self) -> bool:
        """True if there are others than this process, whose place a child process must not take."""
        return self.topology.size > 1

    def variable_devices(self) -> Sequence[str | None]:
        """Returns the devices over which a layer may split its variables; `None` is wherever the others are."""
        return [None]

    @property
    def combines_means(self) -> bool:
        """True if gradients are combined unweighted, by a rule of the backend's own (Adasum)."""
        return False

    def enter(self, call: str) -> None:  # noqa: B027 - a null object by default
        """Notes that this rank is now in `call`, for the message if the ranks go out of step."""

    def leave(self, was_made: bool = True) -> None:  # noqa: B027
        """Notes that the call of the last `enter` has ended, or that it was not made after all."""

    def translate(self, error: BaseException) -> BaseException:
        """Returns the error that tells the user more than `error`, or `error` itself."""
        return error

    # --- Options ---

    def options(self) -> dict[str, Any]:
        """Returns the options this backend was made with."""
        return dict(vars(self)["_options"]) if "_options" in vars(self) else {}

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{type(self).__name__}({options})"


def rank_has_failed(rank: int, words: str, topology: Topology) -> PeerLostError:
    """Returns the error of a rank that has heard from another one why it failed."""
    return PeerLostError(
        f"Rank {rank} has failed, so {topology} can't go on.", words, f"Mend the error of rank {rank}."
    )


def rank_has_gone(received: str, topology: Topology) -> PeerLostError:
    """Returns the error of a rank that only knows that another one is not there any more."""
    return PeerLostError(
        f"Another rank has gone, so {topology} can't go on.",
        received,
        "Look for the rank that failed first: its error is the cause. `keras-dist run` prints it last, "
        "`--log-dir DIR` keeps the output of every rank. If a rank has ended without an error, this rank made a "
        "call that all have to make: take it out of `if kd.is_chief():`.",
    )


def check_same_call(calls: Mapping[int, str]) -> None:
    """Raises if ranks are in different calls.

    Text in quotes is not compared: a path with a timestamp differs by rank, and the chief's is used.

    Args:
        calls: The call of each rank, as far as known.

    Raises:
        MismatchError: The same text on every rank.
    """
    if len({re.sub(r"'[^']*'", "''", call) for call in calls.values()}) <= 1:
        return
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(call, []).append(rank)
    received = "; ".join(f"{_ranks(ranks)} called {call}" for call, ranks in groups.items())
    raise MismatchError(
        "The ranks are in different calls that all of them have to make together.",
        received,
        "Make the call on every rank: take it out of `if kd.is_chief():` (save, evaluate and predict write or "
        "compute once all by themselves), and let all ranks run the same script on the same data.",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
