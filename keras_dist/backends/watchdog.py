"""Finds ranks that wait for each other in different calls, and ends them with an error that names both.

All ranks make the same collective calls in the same order, so calls can be numbered. If two ranks are in
call number 17 and one is in `model.save` while the other is in a training step, neither can ever go on. A
rank that has waited for two seconds says so in the launcher's key-value store and looks what the others say.
That a rank is merely slow is never mistaken for this: it is then behind, in a call of a lower number.
"""

from __future__ import annotations

import atexit
import collections
import json
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from keras_dist.backends.base import check_same_call, rank_has_failed
from keras_dist.backends.rendezvous import Rendezvous
from keras_dist.errors import DistributionError, MismatchError, PeerLostError
from keras_dist.topology import Topology

_WAITED_SECONDS = 2.0
_TICK_SECONDS = 0.5
_REMEMBERED_CALLS = 64


class Watchdog:
    """Watches the collective calls of this rank from a thread of its own.

    Args:
        topology: The place of this process.
        rendezvous: The launcher's store.
        abort: Ends all pending collectives with an error, on all ranks.
    """

    def __init__(self, topology: Topology, rendezvous: Rendezvous, abort: Callable[[], None]) -> None:
        self._topology = topology
        self._rendezvous = rendezvous
        self._abort = abort
        self._calls: collections.deque[tuple[int, str]] = collections.deque(maxlen=_REMEMBERED_CALLS)
        self._number = 0
        self._entered: float | None = None
        self._cause: DistributionError | None = None
        self._closed = threading.Event()
        self._tell_last_words()
        threading.Thread(target=self._watch, name="keras_dist_watchdog", daemon=True).start()
        atexit.register(self.close)

    @property
    def rendezvous(self) -> Rendezvous:
        """The launcher's store."""
        return self._rendezvous

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

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()

    def cause(self) -> DistributionError | None:
        """Returns why the collectives ended, if any rank knows."""
        if self._cause is None:
            self._cause = self._last_words_of_others()
        return self._cause

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            entered, number = self._entered, self._number
            if entered is None or time.monotonic() - entered < _WAITED_SECONDS:
                continue
            self._publish()
            mismatch = self._mismatch(number)
            if mismatch is not None and self._number == number and self._entered is not None:
                self._cause = mismatch
                self._abort()
                return

    def _publish(self) -> None:
        self._rendezvous.put(f"calls_{self._topology.rank}", json.dumps(list(self._calls)))

    def _mismatch(self, number: int) -> MismatchError | None:
        """Compares the call of this number on all ranks that have told theirs."""
        calls = {}
        for rank in range(self._topology.size):
            told = self._rendezvous.get(f"calls_{rank}")
            call = dict(json.loads(told)).get(number) if told else None
            if call is not None:
                calls[rank] = call
        try:
            check_same_call(calls)
        except MismatchError as error:
            return error
        return None

    def _tell_last_words(self) -> None:
        """If this rank raises, the others can say why they had to stop."""
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            # A rank that only lost its peer is not the cause.
            if not isinstance(error, PeerLostError):
                words = f"{kind.__name__}: {error}"
                self._rendezvous.put(f"last_words_{self._topology.rank}", words)
            previous(kind, error, traceback)

        sys.excepthook = excepthook

    def _last_words_of_others(self) -> DistributionError | None:
        deadline = time.monotonic() + _TICK_SECONDS
        while time.monotonic() < deadline:
            for rank in range(self._topology.size):
                words = self._rendezvous.get(f"last_words_{rank}")
                if words and rank != self._topology.rank:
                    return rank_has_failed(rank, words, self._topology)
            time.sleep(_TICK_SECONDS / 10)
        return None
