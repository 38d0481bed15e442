"""Finds ranks that wait for each other in different calls, and ends them with an error that names both calls.

All ranks make the same collective calls in the same order, so calls can be numbered. If two ranks are in call number
17, and one is in `model.save` while the other is in a training step, neither can ever go on. A rank that has waited for
two seconds publishes its calls in the launcher's key-value store, and compares them with those of the other ranks. A
slow rank is never mistaken for such a rank: it is in a call of a lower number.

The collectives of custom loops are numbered separately, because operations count them.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist.comm.backend import check_same_call
from keras_dist.comm.failure_reports import FailureReports
from keras_dist.comm.loop_waits import LoopWaits
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.environment import WAIT_TIMEOUT
from keras_dist.errors import DistributionError, MismatchError
from keras_dist.logging import logger
from keras_dist.topology import Topology

_WAITED_SECONDS = 2.0
_WARN_SECONDS = 60.0
_TICK_SECONDS = 0.5
_REMEMBERED_CALLS = 64


@dataclasses.dataclass(frozen=True)
class Wait:
    """Where a rank has waited for a while.

    Args:
        calls: Its last calls, by number. It may be in the last of them.
        loop_number: The number of collectives of custom loops that it has begun.
        loop_call: The call of the loop's collective that it is in; empty if it is in the last of `calls`.
    """

    calls: Mapping[int, str]
    loop_number: int
    loop_call: str

    def to_json(self) -> str:
        """Returns it as the text that the other ranks read."""
        return json.dumps([list(self.calls.items()), self.loop_number, self.loop_call])

    @classmethod
    def from_json(cls, text: str) -> Wait:
        """Returns the wait of another rank."""
        calls, *loop = json.loads(text)
        return cls(dict(calls), *loop)

    @property
    def number(self) -> int:
        """The number of its last call."""
        return max(self.calls, default=0)

    @property
    def call(self) -> str:
        """The call that it waits in."""
        return self.loop_call or self.calls[self.number]


def counterpart(own: Wait, other: Wait) -> str | None:
    """Returns the call that another rank makes in place of this rank's call; if they differ, both ranks wait forever.

    Args:
        own: Where this rank waits now.
        other: Where the other rank has waited. It may have moved on since, as far as it can without this rank.

    Returns:
        The call, `None` if the other rank may still make the same call as this one.
    """
    if own.loop_call and other.loop_call:
        return other.call if own.loop_number == other.loop_number else None
    if own.loop_call or other.loop_call:
        loop, call = (own, other) if own.loop_call else (other, own)
        # Neither rank has begun what the other one is in.
        return other.call if call.number > loop.number and loop.loop_number > call.loop_number else None
    return other.calls.get(own.number)


class Watchdog:
    """Watches the collective calls of this rank from a thread.

    Args:
        topology: The place of this process.
        rendezvous: The launcher's store.
        failure_reports: The reports of the other ranks.
        abort: Called with the reason; ends all pending collectives with an error.
        limit: The number of seconds that a rank may wait in a custom loop; `None` for any.
    """

    def __init__(
        self,
        topology: Topology,
        rendezvous: Rendezvous,
        failure_reports: FailureReports,
        abort: Callable[[str], None],
        limit: float | None = None,
    ) -> None:
        self._topology = topology
        self._rendezvous = rendezvous
        self._failure_reports = failure_reports
        self._abort = abort
        self._limit = limit
        self._calls: collections.deque[tuple[int, str]] = collections.deque(maxlen=_REMEMBERED_CALLS)
        self._number = 0
        self._entered: float | None = None
        self._loop_waits: LoopWaits | None = None  # until there is a custom loop
        self._last_position = 0, ""
        self._position_since = 0.0
        self._has_warned = False
        self._cause: DistributionError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keras_dist_watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def rendezvous(self) -> Rendezvous:
        """The launcher's store."""
        return self._rendezvous

    @property
    def is_in_call(self) -> bool:
        """True between `enter` and `leave`."""
        return self._entered is not None

    def enter(self, call: str) -> None:
        """Records that this rank makes its next collective call."""
        self._number += 1
        self._calls.append((self._number, call))
        self._entered = time.monotonic()

    def leave(self, was_made: bool) -> None:
        """Records that the call has ended. A call that was not made (no more data) doesn't count."""
        self._entered = None
        if not was_made:
            self._calls.pop()
            self._number -= 1

    def track(self, call: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Traces `collective(tensors)` of a custom loop, so that this rank records when it runs; returns its result."""
        if self._loop_waits is None:
            self._loop_waits = LoopWaits()
        return self._loop_waits.track(call, tensors, collective)

    def close(self) -> None:
        """Ends the thread, because it must not be inside TensorFlow when the process ends."""
        self._closed.set()
        self._thread.join(_TICK_SECONDS)

    def cause(self) -> DistributionError | None:
        """Returns why the collectives ended, `None` if no rank knows."""
        deadline = time.monotonic() + _TICK_SECONDS
        while self._cause is None and time.monotonic() < deadline:
            self._cause = self._failure_reports.cause()
            time.sleep(_TICK_SECONDS / 10)
        return self._cause

    def missing(self) -> str:
        """Returns which other ranks have ended or are silent, see `FailureReports.missing`."""
        return self._failure_reports.missing()

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            self._failure_reports.show_life()
            seconds = self._seconds()
            if seconds < _WAITED_SECONDS:
                continue
            wait = self._wait()
            self._rendezvous.put(f"calls_{self._topology.rank}", wait.to_json())
            cause = self._mismatch(wait) or self._timeout(wait, seconds)
            if cause is not None and self._seconds() > 0 and self._wait() == wait:
                self._cause = cause
                self._abort(str(cause))
                return

    def _position(self) -> tuple[int, str]:
        return (0, "") if self._loop_waits is None else self._loop_waits.position()

    def _seconds(self) -> float:
        """Returns how long this rank has been in its current call, 0 if it is in none."""
        entered, now = self._entered, time.monotonic()
        if entered is not None:
            return now - entered
        position = self._position()
        if position != self._last_position:
            self._last_position, self._position_since, self._has_warned = position, now, False
        return now - self._position_since if position[1] else 0.0

    def _wait(self) -> Wait:
        is_in_call, (number, call), calls = self.is_in_call, self._position(), dict([*self._calls])
        return Wait(calls, number, "" if is_in_call else call)

    def _mismatch(self, own: Wait) -> MismatchError | None:
        """Compares the wait of this rank with those that the other ranks have published."""
        calls = {self._topology.rank: own.call}
        for rank in range(self._topology.size):
            published = self._rendezvous.get(f"calls_{rank}") if rank != self._topology.rank else None
            call = counterpart(own, Wait.from_json(published)) if published else None
            if call is not None:
                calls[rank] = call
        try:
            check_same_call(dict(sorted(calls.items())))
        except MismatchError as error:
            return error
        return None

    def _timeout(self, wait: Wait, seconds: float) -> MismatchError | None:
        """Returns an error if this rank has waited too long in a custom loop, where nothing else ends the wait."""
        if not wait.loop_call or self._limit is None:
            return None
        if seconds > self._limit:
            return MismatchError(
                f"Not all ranks have made the same call within {self._limit:g} s.",
                f"{self._topology} waits in {wait.loop_call}",
                "Make the call on every rank, forevery batch: move it out of `if kd.is_chief():`. If a rank needs "
                f"more time for other work, set {WAIT_TIMEOUT} (seconds).",
            )
        if seconds > _WARN_SECONDS and not self._has_warned:
            self._has_warned = True
            logger().warning("has waited for other ranks for %d s, in %s", seconds, wait.loop_call)
        return None
