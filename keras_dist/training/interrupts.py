"""Ctrl-C during `fit`: the ranks stop after the same step, so that the script can still save.

A launcher passes Ctrl-C on to every rank, but not between the same two steps of each; and a rank that waits for
the others inside a step would hear of it only when that step is done. So a thread listens, and says in which step
this rank is. Each rank stops before its next step to hear that from all, then goes on to the one after the latest.
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

_WAIT_SECONDS = 2.0  # for a rank that nobody has asked to stop
_POLL_SECONDS = 0.01
_CLOSE = b"\0"  # the number of no signal


@functools.cache
def interrupts_of(backend: Backend) -> Interrupts:
    """Returns the one of this process: models that are trained in turn share its count of steps."""
    store = backend.rendezvous
    return Interrupts() if store is None else TogetherInterrupts(backend.topology, store)


class Interrupts:
    """Ctrl-C as it is in Python. All there is where ranks can't talk beside their collectives (MPI)."""

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """While this is entered, Ctrl-C is heard before a step; a second Ctrl-C at once."""
        yield

    def before_step(self) -> None:
        """Raises `KeyboardInterrupt` if all ranks stop here. To be called before each step of `fit`."""


class TogetherInterrupts(Interrupts):
    """Lets Ctrl-C wait for a place where all ranks can stop.

    Args:
        topology: The place of this process.
        store: Where ranks say in which step they are.
    """

    def __init__(self, topology: Topology, store: Rendezvous) -> None:
        self._topology = topology
        self._store = store
        self._step = 0  # that this rank is in, of all that it has made; counted alike on all ranks
        self._stops = 0
        self._is_asked = False
        self._times_heard = 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        if not _ctrl_c_is_pythons():
            yield
            return
        with self._listening():
            yield
            if self._is_asked:  # too late for another step
                raise KeyboardInterrupt

    def before_step(self) -> None:
        self._step += 1
        if self._is_asked and self._step > (latest := self._latest()):
            logger().debug("stopped by Ctrl-C, %s", "as all ranks are" if latest else "though not all ranks are")
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        listener = threading.Thread(target=self._listen, args=(ear,), name="keras_dist_interrupts", daemon=True)
        listener.start()
        others_mouth, handler = signal.set_wakeup_fd(mouth), signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            signal.set_wakeup_fd(others_mouth)
            os.write(mouth, _CLOSE)
            listener.join()
            os.close(ear)
            os.close(mouth)
            self._stops += self._is_asked
            self._is_asked, self._times_heard = False, 0

    def _hear(self, signum: int, frame: object) -> None:
        self._is_asked = True
        self._times_heard += 1
        if self._times_heard > 1:
            raise KeyboardInterrupt

    def _listen(self, ear: int) -> None:
        """Hears of signals while the main thread may be inside a step, where no handler of Python's can run."""
        has_said = False
        while (heard := os.read(ear, 1)) != _CLOSE:
            if heard[0] == signal.SIGINT and not has_said:
                # In this order: either the main thread sees it before its next step, or that is the step that is said.
                self._is_asked = has_said = True
                self._store.put(self._key(self._topology.rank), str(self._step))

    def _latest(self) -> int:
        """Returns the latest step in which a rank was asked to stop, 0 if not all of them were."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            said = [self._store.get(self._key(rank)) for rank in range(self._topology.size)]
            if None not in said:
                return max(int(step) for step in said if step)
            time.sleep(_POLL_SECONDS)
        return 0

    def _key(self, rank: int) -> str:
        return f"interrupted_{self._stops}_{rank}"


def _ctrl_c_is_pythons() -> bool:
    """False where a script, or a debugger, has another use for it, and where handlers can't be set."""
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
