"""Ctrl-C and SIGTERM during `fit`: the ranks stop after the same step, so that they can still save.

A launcher passes Ctrl-C on to every rank, but the ranks may be in different steps when they receive it. And while a
rank waits for the others inside a step, Python can't handle the signal. So a thread receives it and publishes how far
this rank is: its step, or for SIGTERM the number of checks, which follow steps and epochs. Each rank then reads how far
all ranks are, and stops right after the furthest one.

SIGTERM is handled only in a `fit` that commits its state. It may reach one rank alone, whose machine is taken away: the
others then read of it in the store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from keras_dist.comm.backend import Backend, Rendezvous
from keras_dist.environment import Topology
from keras_dist.logging import logger

_WAIT_SECONDS = {signal.SIGINT: 2.0, signal.SIGTERM: 10.0}  # for a rank that has not received the signal
_SAME_SECONDS = 2.0  # SIGTERM may come twice: a scheduler sends it to all processes, and a launcher passes its own on
_LOOK_SECONDS = 1.0  # between two looks for a rank that has received SIGTERM
_POLL_SECONDS = 0.01
_CLOSE = b"\0"  # not the number of a signal


@functools.cache
def interrupts_of(backend: Backend) -> Interrupts:
    """Returns the interrupts of this process, which count the steps of all its models."""
    return Interrupts(backend.topology, backend.rendezvous)


class Interrupts:
    """Lets the signals wait for a step after which all ranks can stop.

    Without a store this process is alone, or its ranks can't communicate outside their collectives (MPI): then nothing
    waits, and Python handles Ctrl-C itself.
    """

    def __init__(self, topology: Topology, store: Rendezvous | None) -> None:
        self._topology = topology
        self._store: Any = store
        self._step = 0  # the current step, counted over all calls of `fit`; the same on all ranks
        self._checks = 0  # calls of `is_terminated`; the same on all ranks
        self._stops = 0
        self._is_interrupted = False
        self._received = 0
        self._is_terminable = False
        self._is_terminated = False
        self._terminated_at: float | None = None
        self._is_receiving = False

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets the first Ctrl-C wait for the end of a step. The second one raises `KeyboardInterrupt` at once."""
        if self._store is None or not _is_handled_by(signal.SIGINT, signal.default_int_handler):
            yield
            return
        with self._receiving():
            handler = signal.signal(signal.SIGINT, self._interrupt)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, handler)
            if self._is_interrupted:  # there was no further step
                raise KeyboardInterrupt

    def before_step(self) -> None:
        """Raises `KeyboardInterrupt` if all ranks stop here. Call it before each step of `fit`."""
        self._step += 1
        if self._is_interrupted and self._step > (latest := self._latest(signal.SIGINT)):
            logger().debug("stopped by Ctrl-C, %s", "as all ranks are" if latest else "though not all ranks are")
            raise KeyboardInterrupt

    def _interrupt(self, signum: int, frame: object) -> None:
        self._is_interrupted = True
        self._received += 1
        if self._received > 1:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def terminable(self) -> Iterator[None]:
        """Lets the first SIGTERM wait for the end of a step. A later one ends the process at once."""
        if not _is_handled_by(signal.SIGTERM, signal.SIG_DFL):
            yield
            return
        with self._receiving():
            signal.signal(signal.SIGTERM, self._terminate)
            self._is_terminable = True
            try:
                yield
            finally:
                self._is_terminable = False
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._is_terminated, self._terminated_at = False, None

    def _terminate(self, signum: int, frame: object) -> None:
        self._is_terminated = True
        self._end_if_again()

    def _end_if_again(self) -> None:
        """Ends the process if an earlier SIGTERM, sent for another reason, has come."""
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
        elif time.monotonic() - self._terminated_at > _SAME_SECONDS:
            os._exit(128 + signal.SIGTERM)  # the main thread may wait in a step

    def is_terminated(self) -> bool:
        """True if all ranks end here, because one of them has received SIGTERM. All ranks ask after the same steps."""
        self._checks += 1
        return self._is_terminated and self._checks > self._latest(signal.SIGTERM)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        """Lets a thread receive signals, in the outermost of these contexts."""
        if self._store is None or self._is_receiving:
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._read, args=(reader,), name="keras_dist_interrupts", daemon=True)
        thread.start()
        previous_writer = signal.set_wakeup_fd(writer)
        self._is_receiving = True
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_writer)
            os.write(writer, _CLOSE)
            thread.join()
            os.close(reader)
            os.close(writer)
            self._stops += self._is_interrupted
            self._is_receiving = self._is_interrupted = False
            self._received = 0

    def _read(self, reader: int) -> None:
        """Receives signals while the main thread may be inside a step, where Python calls no handler."""
        published: set[int] = set()
        while (signum := self._next(reader, published)) is not None:
            if signum in (signal.SIGINT, signal.SIGTERM) and signum not in published:
                published.add(signum)
                self._publish(signum)

    def _publish(self, signum: int) -> None:
        # In this order: either the main thread sees the request at its next check, or we put that check.
        self._is_interrupted |= signum == signal.SIGINT
        self._is_terminated |= signum == signal.SIGTERM
        place = self._checks if signum == signal.SIGTERM else self._step
        self._store.put(self._key(signum, self._topology.rank), str(place))
        if signum == signal.SIGTERM:
            self._store.put(self._key(signum, "any"), "1")

    def _next(self, reader: int, published: set[int]) -> int | None:
        """Returns the next signal that this rank receives, or that another one has; `None` at the end."""
        while not select.select([reader], [], [], _LOOK_SECONDS)[0]:
            is_open = self._is_terminable and signal.SIGTERM not in published
            if is_open and self._store.get(self._key(signal.SIGTERM, "any")) is not None:
                return signal.SIGTERM
        received = os.read(reader, 1)
        if received[0] == signal.SIGTERM and self._is_terminable:
            self._end_if_again()
        return None if received == _CLOSE else received[0]

    def _latest(self, signum: signal.Signals) -> int:
        """Returns the latest step or check at which a rank received a signal, 0 if not all ranks have."""
        if self._store is None:
            return 0
        deadline = time.monotonic() + _WAIT_SECONDS[signum]
        while time.monotonic() < deadline:
            steps = [self._store.get(self._key(signum, rank)) for rank in range(self._topology.size)]
            if None not in steps:
                return max(int(step) for step in steps if step)
            time.sleep(_POLL_SECONDS)
        return 0

    def _key(self, signum: int, rank: int | str) -> str:
        return f"received_{signal.Signals(signum).name}_{self._stops}_{rank}"


def _is_handled_by(signum: signal.Signals, handler: Any) -> bool:
    """False where the script or a debugger handles a signal itself, and in threads that can't set handlers."""
    return threading.current_thread() is threading.main_thread() and signal.getsignal(signum) is handler
