"""The `Backend` protocol: how ranks communicate, as the rest of the library sees it; and the store where they meet.

In a key-value store ranks report that they have joined, have failed, or wait, and in which call. Both `keras-dist run`
and `horovodrun` serve one, which Horovod needs to start (PUT and GET over HTTP). It runs as long as the launcher.
Training data never go through it.
"""

import abc
import contextlib
import dataclasses
import http.client
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from keras_dist import environment, store
from keras_dist.environment import Launch, Topology, join_seconds
from keras_dist.errors import ConfigurationError, MismatchError, PeerLostError

_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 2


class Rendezvous:
    """A client of a key-value store, at a host and port. A `secret` signs the requests, if the store has one."""

    def __init__(self, address: tuple[str, int], secret: str = "") -> None:
        self._address, self._secret = address, secret

    def put(self, key: str, value: str) -> None:
        """Stores a text. Ignores errors: the store only improves messages, so it must not break training."""
        self._ask("PUT", key, value)

    def get(self, key: str) -> str | None:
        """Returns a stored text, `None` if there is none or the store has ended."""
        return self._ask("GET", key)

    def _ask(self, method: str, key: str, value: str = "") -> str | None:
        path, body = f"/keras_dist_{key}/v", value.encode()
        headers = {store.SIGNATURE: store.signature(self._secret, method, path, body)} if self._secret else {}
        connection = http.client.HTTPConnection(*self._address, timeout=_REQUEST_SECONDS)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.read().decode() if response.status == http.HTTPStatus.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def join(launch: Launch) -> Rendezvous | None:
    """Waits until every rank has called `kd.init()`, and returns the launcher's store, if there is one."""
    if launch.rendezvous is None:
        return None
    rendezvous = Rendezvous(launch.rendezvous)
    rendezvous.put(f"joined_{launch.topology.rank}", "1")
    names = {rank: f"rank {rank} of {launch.topology.size}" for rank in range(launch.topology.size)}
    wait_for_ranks(names, lambda rank: rendezvous.get(f"joined_{rank}") is not None)
    return rendezvous


def wait_for_ranks(names: Mapping[int, str], has_joined: Callable[[int], bool], hint: str = "") -> None:
    """Waits until ranks have joined. After the time limit the `PeerLostError` names the missing ones, and the hint."""
    seconds = join_seconds()
    deadline = time.monotonic() + seconds
    missing = list(names)
    while missing := [rank for rank in missing if not has_joined(rank)]:
        if time.monotonic() > deadline:
            raise not_joined(seconds, f"missing: {', '.join(names[rank] for rank in missing)}", hint)
        time.sleep(_POLL_SECONDS)


def not_joined(seconds: float, received: str, hint: str = "") -> PeerLostError:
    """Returns the error of a rank that has waited too long for the others to join."""
    return PeerLostError(
        f"Not all ranks have joined within {seconds:g} s.",
        received,
        f"Look at the output of the missing ranks: each must call `kd.init()`. {hint}If they only need longer, set "
        f"{environment.JOIN_TIMEOUT} (seconds).",
    )


@dataclasses.dataclass(frozen=True)
class Priority:
    """How well a backend fits the environment of this process. `"auto"` chooses the highest score."""

    score: int  # 0 if the backend can't run here
    reason: str  # for the line that `kd.init()` prints


class Backend(abc.ABC):
    """One way for ranks to train together.

    `all_gather_object` and `broadcast_arrays` are called on the host, from Python, between executions. The other
    collectives belong to the step and are called while it is traced or run.

    Every rank must call each collective, in the same order. Until the last rank has called it, the others wait. A rank
    that waits for a call that never comes gets an error from the backend (`MismatchError`, `PeerLostError`). A
    collective in the step has a `name`, the same on all ranks and unique among those that run at the same time.

    Methods that are not abstract are right for one process with one replica, so no caller asks how many there are.
    """

    name: ClassVar[str]
    topology: Topology = Topology()
    strategy: Any = None  # the `tf.distribute.Strategy` whose scope `start` has opened
    drawn_seed: int | None = None  # the chief's, where the script sets no seed; different in each run
    puts_steps_together = False  # whether `fit` puts steps into one execution unasked
    mirrors = False  # whether each device of this process has a copy of every variable
    uses_xla = True  # whether XLA may compile updates or steps unasked: servers can't, and TPUStrategy does it itself
    keeps_metrics = True  # whether a replica's metrics keep what it has counted since a reset, not in one step only
    is_used = False  # whether the script has shared work among the replicas, or divides it by `kd.rank()`

    @classmethod
    @abc.abstractmethod
    def priority(cls, launch: Launch | None) -> Priority:
        """Returns how well this backend fits the environment of this process."""

    @abc.abstractmethod
    def start(self, launch: Launch | None) -> None:
        """Joins the other ranks and sets `topology`. Called once, before data and model exist."""

    def refuse_launch(self, launch: Launch | None) -> None:
        """Raises `ConfigurationError` if this process is one of several: each would train alone, on all devices."""
        if launch is not None and launch.topology.size > 1:
            raise ConfigurationError(
                f"The backend {self.name!r} needs one process for all devices, but several were started.",
                f"{launch.topology}, started by {launch.launcher}",
                "Start the script with plain `python`, or use backend='auto'.",
            )

    @abc.abstractmethod
    def describe_devices(self) -> str:
        """Returns the devices in use as a short text, for the line that `kd.init()` prints."""

    # --- Training ---

    @abc.abstractmethod
    def distribute(self, target: Any, options: Any) -> None:
        """Makes a model, or an optimizer of a custom loop, span all replicas, in place. Calling it twice is harmless.

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

    def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
        """Returns the values of all ranks, in the order of rank.

        Args:
            call: What the user called, such as `"model.save('digits.keras')"`. If ranks are in different calls, all
                of them raise `MismatchError`, which names both calls.
            value: A small object of the kinds that `comm.processes.encode` takes. It is sent to every rank.
        """
        return [value]

    def broadcast_arrays(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the chief's NumPy arrays; those of all ranks have the same shapes and dtypes."""
        return list(arrays)

    # --- In the step ---

    def all_reduce(self, gradients: Sequence[Any], row: Any, name: str) -> tuple[list[Any], Any]:
        """Sums gradients over the ranks, and gathers one row of numbers from each rank.

        Every rank must run it in every step, also a rank whose share is empty.

        Args:
            gradients: Tensors or `tf.IndexedSlices`, already weighted by this rank's share; no `None`.
            row: float32 tensor of shape `(k,)`, the numbers of this rank.

        Returns:
            The sums, and a float32 tensor of shape `(size, k)` with the rows of all ranks.
        """
        return list(gradients), row[None, :]

    def all_reduce_exact(self, numbers: Any, name: str) -> Any:
        """Sums a small float tensor without compression. Its shape and dtype are the same on all ranks."""
        return numbers

    def scatter(self, payload: Any, lengths: Any, name: str) -> Any:
        """Sends each rank its part of the chief's bytes.

        Args:
            payload: uint8 tensor of shape `(n,)`, the concatenated parts; empty on the other ranks.
            lengths: int32 tensor of shape `(size,)`, the length of each part; zeros on the other ranks.

        Returns:
            uint8 tensor of shape `(length,)`, the part of this rank.
        """
        return payload

    def all_gather(self, tensor: Any, name: str) -> Any:
        """Concatenates the replicas' tensors along the first axis, in the order of rank. Other sizes must be equal."""
        return tensor

    # --- Replicas of this process ---

    @property
    def replicas(self) -> int:
        """The number of replicas in this process: devices that each compute a share."""
        return 1

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all ranks."""
        return self.topology.size * self.replicas

    def run(self, function: Callable[[int], Any], counts: Sequence[Any], metrics: Collection[Any] = ()) -> list[Any]:
        """Runs a step on each replica of this process, and returns their outputs.

        Args:
            function: The step. It takes the index of the replica.
            counts: int32 scalars, the number of examples in each share.
            metrics: Variables that are updated by one replica after the other, whatever their `aggregation`.
        """
        return [function(0)]

    def check_variables(self, variables: Sequence[Any]) -> None:  # noqa: B027
        """Raises `ConfigurationError` if a model's variables are on the wrong device for this backend."""

    def once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that updates variables: once, or for each copy of them in this process.

        Every replica must make this call, with what belongs to its device.
        """
        return function(*args, **kwargs)

    def will_update(self, variables: Sequence[Any], *, are_new: bool) -> None:  # noqa: B027
        """Called on every replica with the Keras variables that `once` is about to update, before any of them changes.

        `are_new` if the step has just made them.
        """

    def copies(self, variables: Sequence[Any]) -> dict[str, list[Any]]:
        """Returns the values of variables on each device of this process, by its name, if each has copies."""
        return {}

    # --- Life ---

    @property
    def rendezvous(self) -> Rendezvous | None:
        """A store of short texts that ranks can use at any time, outside the collectives; `None` without one."""
        return None

    @property
    def has_processes(self) -> bool:
        """True if there are other processes: a child of this one must not take their place."""
        return self.topology.size > 1

    def variable_devices(self) -> Sequence[str | None]:
        """Returns the devices over which a layer may split its variables; `None` stands for the default device."""
        return [None]

    @property
    def not_of_one_process(self) -> str | None:
        """The reason why steps intentionally compute other numbers than one process, `None` if they don't."""
        return None

    @property
    def combines_means(self) -> bool:
        """True if the backend combines unweighted mean gradients by its own rule (Adasum)."""
        return False

    def in_call(self, call: str) -> contextlib.AbstractContextManager[None]:
        """In this context the rank is in a call, for the error if ranks are in different ones. A failure undoes it."""
        return contextlib.nullcontext()

    def translate(self, error: BaseException) -> BaseException:
        """Returns the error that explains the cause of `error`, or `error` itself if no cause is known."""
        return error

    # --- Options ---

    def options(self) -> dict[str, Any]:
        """Returns the options that this backend was created with."""
        return dict(vars(self).get("_options", {}))

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{type(self).__name__}({options})"


def check_same_call(calls: Mapping[int, str]) -> None:
    """Raises `MismatchError`, with the same text on every rank, if the ranks whose call is known are in different ones.

    Text in quotes is not compared: a path with a timestamp differs between ranks, and the chief's path is used.
    """
    if len({re.sub(r"'[^']*'", "''", call) for call in calls.values()}) <= 1:
        return
    groups: dict[str, list[str]] = {}
    for rank, call in calls.items():
        groups.setdefault(call, []).append(str(rank))
    received = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} called {call}" for call, ranks in groups.items()
    ]
    raise MismatchError(
        "The ranks are in different calls, but all ranks must make the same call.",
        "; ".join(received),
        "Make the call on every rank: move it out of `if kd.is_chief():` (`save` writes once, on the chief, and "
        "`evaluate` and `predict` share the work), and run the same script on the same data on all ranks.",
    )
