"""Finds ranks that wait for each other in different calls, and ends them with an error that names both.

All ranks make the same collective calls in the same order, so calls can be numbered. If two ranks are in
call number 17 and one is in `model.save` while the other is in a training step, neither can ever go on. A
rank that has waited for two seconds says so in the launcher's key-value store and looks what the others say.
That a rank is merely slow is never mistaken for this: it is then behind, in a call of a lower number.

The collectives of a loop of the user's own have numbers of their own, because operations count them.
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
from keras_dist.comm.loop_waits import LoopWaits, Place
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.environment import WAIT_TIMEOUT
from keras_dist.errors import DistributionError, MismatchError
from keras_dist.logging import logger
from keras_dist.topology import Topology

_WAITED_SECONDS = 2.0
_SAID_SECONDS = 60.0
_TICK_SECONDS = 0.5
_REMEMBERED_CALLS = 64


@dataclasses.dataclass(frozen=True)
class Wait:
    """Where a rank has waited for a while.

    Args:
        calls: Its last calls, by their numbers; it may be in the last of them.
        made: How many calls it has made.
        loop_number: How many collectives of loops it has begun.
        loop_call: The one that it is in; empty if it is in one of `calls`.
    """

    calls: Mapping[int, str]
    made: int
    loop_number: int
    loop_call: str

    def as_text(self) -> str:
        """Returns it as it is told to the others."""
        return json.dumps([list(self.calls.items()), self.made, self.loop_number, self.loop_call])

    @classmethod
    def of_text(cls, text: str) -> Wait:
        """Returns what another rank has told."""
        calls, *rest = json.loads(text)
        return cls(dict(calls), *rest)

    @property
    def call(self) -> str:
        """The call that it waits in."""
        return self.loop_call or self.calls[self.made]


def calls_that_never_meet(own: Wait, other: Wait) -> tuple[str, str] | None:
    """Returns the calls in which two ranks wait for each other for ever, `None` if they may meet.

    Args:
        own: Where this rank waits, now.
        other: Where the other one has waited. It may be further by now, but for what needs this rank.
    """
    if own.loop_call and other.loop_call:
        differ = own.loop_number == other.loop_number and own.loop_call != other.loop_call
        return (own.loop_call, other.loop_call) if differ else None
    if own.loop_call:  # the other one is in a call that this rank hasn't begun, and hasn't begun what this one is in
        never = other.made > own.made and own.loop_number > other.loop_number
        return (own.loop_call, other.call) if never else None
    if other.loop_call:
        never = own.made > other.made and other.loop_number > own.loop_number
        return (own.call, other.loop_call) if never else None
    call = other.calls.get(own.made)
    return (own.call, call) if call is not None else None


class Watchdog:
    """Watches the collective calls of this rank from a thread of its own.

    Args:
        topology: The place of this process.
        rendezvous: The launcher's store.
        failure_reports: Those of the others.
        abort: Ends all pending collectives with an error, on all ranks. Is given a text that says why.
        limit: After so many seconds a rank that waits in a loop of the user's own is ended; `None` for never.
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
        self._last_words = failure_reports
        self._abort = abort
        self._limit = limit
        self._calls: collections.deque[tuple[int, str]] = collections.deque(maxlen=_REMEMBERED_CALLS)
        self._number = 0
        self._entered: float | None = None
        self._loop_waits: LoopWaits | None = None  # as long as there is no loop of the user's own
        self._in_loop = Place(0, ""), 0.0  # and since when
        self._has_said = False
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
    def is_entered(self) -> bool:
        """True if this rank is in a call that was noted."""
        return self._entered is not None

    def enter(self, call: str) -> None:
        """Notes that this rank makes its next collective call."""
        self._number += 1
        self._calls.append((self._number, call))
        self._entered = time.monotonic()

    def leave(self, was_made: bool) -> None:
        """Notes that the call has ended. One that was not made (no more data) doesn't count."""
        self._entered = None
        if not was_made:
            self._calls.pop()
            self._number -= 1

    def around(self, call: str, tensors: Any, collective: Callable[[Any], Any]) -> Any:
        """Returns what a collective of a loop, that is traced now, makes of `tensors`; notes when it runs."""
        if self._loop_waits is None:
            self._loop_waits = LoopWaits()
        return self._loop_waits.around(call, tensors, collective)

    def close(self) -> None:
        """Ends the thread: it must not be inside TensorFlow when the process ends."""
        self._closed.set()
        self._thread.join(_TICK_SECONDS)

    def cause(self) -> DistributionError | None:
        """Returns why the collectives ended, if any rank knows."""
        deadline = time.monotonic() + _TICK_SECONDS
        while self._cause is None and time.monotonic() < deadline:
            self._cause = self._last_words.of_others()
            time.sleep(_TICK_SECONDS / 10)
        return self._cause

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            seconds = self._seconds()
            if seconds < _WAITED_SECONDS:
                continue
            wait = self._wait()
            self._rendezvous.put(f"calls_{self._topology.rank}", wait.as_text())
            cause = self._mismatch(wait) or self._too_long(wait, seconds)
            if cause is not None and self._seconds() > 0 and self._wait() == wait:
                self._cause = cause
                self._abort(str(cause))
                return

    def _place(self) -> Place:
        return Place(0, "") if self._loop_waits is None else self._loop_waits.place()

    def _seconds(self) -> float:
        """Returns how long this rank has been where it is, 0 if it is in no call."""
        entered, now = self._entered, time.monotonic()
        if entered is not None:
            return now - entered
        place = self._place()
        if place != self._in_loop[0]:
            self._in_loop, self._has_said = (place, now), False
        return now - self._in_loop[1] if place.call else 0.0

    def _wait(self) -> Wait:
        is_entered, place, calls = self.is_entered, self._place(), dict([*self._calls])
        return Wait(calls, max(calls, default=0), place.number, "" if is_entered else place.call)

    def _mismatch(self, own: Wait) -> MismatchError | None:
        """Compares where this rank waits with where the others have told that they do."""
        calls = {self._topology.rank: own.call}
        for rank in range(self._topology.size):
            told = self._rendezvous.get(f"calls_{rank}") if rank != self._topology.rank else None
            pair = calls_that_never_meet(own, Wait.of_text(told)) if told else None
            if pair is not None:
                calls[rank] = pair[1]
        try:
            check_same_call(dict(sorted(calls.items())))
        except MismatchError as error:
            return error
        return None

    def _too_long(self, wait: Wait, seconds: float) -> MismatchError | None:
        """Nobody stands around a loop of the user's own to be told later, so it has a time limit."""
        if not wait.loop_call or self._limit is None:
            return None
        if seconds > self._limit:
            return MismatchError(
                f"Not all ranks have made the same call within {self._limit:g} s.",
                f"{self._topology} waits in {wait.loop_call}",
                "Make the call on every rank, for every batch: take it out of `if kd.is_chief():`. If a rank has to "
                f"do something else for so long, set {WAIT_TIMEOUT} (seconds).",
            )
        if seconds > _SAID_SECONDS and not self._has_said:
            self._has_said = True
            logger().warning("has waited for other ranks for %d s, in %s", seconds, wait.loop_call)
        return None
