"""Ctrl-C during `fit`: the ranks stop after the same step, so that the script can still save.

A launcher passes Ctrl-C on to every rank, but the ranks may be in different steps when they receive it. And while a
rank waits for the others inside a step, Python can't handle the signal. So a thread receives it, and publishes the step
of this rank. Before its next step each rank reads the steps of all ranks, then stops after the latest of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Iterator

from keras_dist.comm.backend import Backend
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.logging import logger
from keras_dist.topology import Topology

_WAIT_SECONDS = 2.0  # for a rank that has not received Ctrl-C
_POLL_SECONDS = 0.01
_CLOSE = b"\0"  # not the number of a signal


@functools.cache
def interrupts_of(backend: Backend) -> Interrupts:
    """Returns the interrupts of this process, which count the steps of all its models."""
    store = backend.rendezvous
    return Interrupts() if store is None else SharedInterrupts(backend.topology, store)


class Interrupts:
    """Python's own Ctrl-C, for ranks that can't communicate outside their collectives (MPI)."""

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets the first Ctrl-C wait for the end of a step. The second one raises `KeyboardInterrupt` at once."""
        yield

    def before_step(self) -> None:
        """Raises `KeyboardInterrupt` if all ranks stop here. Call it before each step of `fit`."""


class SharedInterrupts(Interrupts):
    """Lets Ctrl-C wait for a step after which all ranks can stop.

    Args:
        topology: The place of this process.
        store: The store in which ranks publish the step they are in.
    """

    def __init__(self, topology: Topology, store: Rendezvous) -> None:
        self._topology = topology
        self._store = store
        self._step = 0  # the current step, counted over all calls of `fit`; the same on all ranks
        self._stops = 0
        self._is_requested = False
        self._received = 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        if not _is_pythons_handler():
            yield
            return
        with self._receiving():
            yield
            if self._is_requested:  # there was no further step
                raise KeyboardInterrupt

    def before_step(self) -> None:
        self._step += 1
        if self._is_requested and self._step > (latest := self._latest()):
            logger().debug("stopped by Ctrl-C, %s", "as all ranks are" if latest else "though not all ranks are")
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._read, args=(reader,), name="keras_dist_interrupts", daemon=True)
        thread.start()
        previous_writer, handler = signal.set_wakeup_fd(writer), signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.set_wakeup_fd(previous_writer)
            os.write(writer, _CLOSE)
            thread.join()
            os.close(reader)
            os.close(writer)
            self._stops += self._is_requested
            self._is_requested, self._received = False, 0

    def _handle(self, signum: int, frame: object) -> None:
        self._is_requested = True
        self._received += 1
        if self._received > 1:
            raise KeyboardInterrupt

    def _read(self, reader: int) -> None:
        """Receives signals while the main thread may be inside a step, where Python calls no handler."""
        is_published = False
        while (received := os.read(reader, 1)) != _CLOSE:
            if received[0] == signal.SIGINT and not is_published:
                # In this order: either the main thread sees the request before its next step, or we put that step.
                self._is_requested = is_published = True
                self._store.put(self._key(self._topology.rank), str(self._step))

    def _latest(self) -> int:
        """Returns the latest step in which a rank received Ctrl-C, 0 if not all ranks did."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            steps = [self._store.get(self._key(rank)) for rank in range(self._topology.size)]
            if None not in steps:
                return max(int(step) for step in steps if step)
            time.sleep(_POLL_SECONDS)
        return 0

    def _key(self, rank: int) -> str:
        return f"interrupted_{self._stops}_{rank}"


def _is_pythons_handler() -> bool:
    """False where the script or a debugger handles SIGINT itself, and in threads that can't set handlers."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
