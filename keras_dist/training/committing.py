"""When `fit` commits, and the thread that writes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from keras_dist import environment
from keras_dist.callbacks.commit import Commit
from keras_dist.comm import objects
from keras_dist.comm.backend import Backend
from keras_dist.state.commits import Commits, Place

STATE = "state"  # the array with everything but the variables


class Due:
    """When to commit: after the same batch on all ranks.

    The chief's clock decides. The ranks don't ask it after each batch, but when it expects that it is time.

    Args:
        settings: What the script asks for.
        backend: The backend.
    """

    def __init__(self, settings: Commit, backend: Backend) -> None:
        self._seconds, self._batches = settings.seconds, settings.batches
        self._backend = backend
        self._asks_at = 0
        self.done(0)

    def done(self, step: int) -> None:
        """Tells that there is a commit of this step."""
        self.step, self._time = step, time.monotonic()

    def now(self, step: int) -> bool:
        """True if it is time for a commit."""
        if self._batches is not None:
            return step // self._batches > self.step // self._batches
        if self._seconds is None or step < self._asks_at:
            return False
        passed = time.monotonic() - self._time
        left = self._seconds - passed
        # As fast as until now, and after at most as many steps again: the first steps are slow.
        done = step - self.step
        further = min(int(left / passed * done), done) if left > 0 else 0
        is_due, self._asks_at = self._backend.all_gather_object(
            "kd.callbacks.Commit (when)", (left <= 0, step + max(1, further))
        )[0]
        return bool(is_due)


class Writer:
    """Writes commits in a thread, one after the other."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def write(self, place: Place, arrays: dict[str, np.ndarray], state: Any) -> None:
        """Begins to write. Waits for the commit before, and raises its error.

        Args:
            place: How far the training has come.
            arrays: The variables by name.
            state: Everything else; nobody may change it meanwhile.
        """
        self.finish()
        self._thread = threading.Thread(target=self._write, args=(place, arrays, state), name="keras_dist_commit")
        self._thread.start()

    def _write(self, place: Place, arrays: dict[str, np.ndarray], state: Any) -> None:
        try:
            encoded = np.frombuffer(objects.encode(state), np.uint8)
            self._commits.write(place, {**arrays, STATE: encoded})
            environment.note_commit(place.step)
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        """Waits for the end of the last write, and raises its error."""
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the end of the last write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
