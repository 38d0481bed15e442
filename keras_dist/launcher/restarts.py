"""Whether the ranks of a job are started again after they have ended."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.job import Outcome
from keras_dist.launcher.output import Console


class Restarts:
    """Decides after each start whether there is another one, and tells the user. Learns of commits from the chief.

    Ranks that crash twice without a new commit in between would crash for ever: they are not started again.

    Args:
        limit: How often all ranks may be started again after a crash. 0 never does it.
        console: Where the messages go.

    Raises:
        ConfigurationError: If there is no folder for temporary files.
    """

    def __init__(self, limit: int, console: Console) -> None:
        self._limit = limit
        self._used = 0
        self._console = console
        self._before: dict[bool, tuple[int | None, str]] = {}  # after crashes, after commits: newest commit and cause
        self._files = contextlib.ExitStack()
        self.folder = Path(self._files.enter_context(_temporary_folder())) if limit else None

    @property
    def variables(self) -> Mapping[str, str]:
        """What tells the chief where to note its commits."""
        return {} if self.folder is None else {environment.COMMITTED: str(self.folder / "step")}

    def starts_again(self, outcome: Outcome) -> bool:
        """Returns whether all ranks are to be started again.

        Args:
            outcome: How they have ended.
        """
        if outcome.is_final or not self._limit:
            return False
        step, is_crash = self._newest_commit(), outcome.code != environment.COMMITTED_EXIT_CODE
        before = self._before.get(is_crash)
        self._before[is_crash] = step, outcome.cause
        if before is not None and before[0] == step:
            return self._refuse("there is no new commit since the last start", f"The first cause: {before[1]}")
        if self._used == self._limit:
            return self._refuse(f"restart {self._used} of {self._limit} was the last", f"The cause: {outcome.cause}")
        self._used += is_crash
        number = f" (restart {self._used} of {self._limit})" if is_crash else ""
        place = "where they began: there is no commit since" if step is None else f"the commit of step {step}"
        self._console.print(f"keras-dist: starts all ranks again{number}, from {place}.")
        return True

    def _refuse(self, why: str, cause: str) -> bool:
        self._console.print(f"keras-dist: does not start again: {why}. {cause}")
        return False

    def _newest_commit(self) -> int | None:
        """Returns the step of the commit that the chief wrote last, `None` if it wrote none."""
        text = ""
        with contextlib.suppress(OSError):
            text = Path(self.variables[environment.COMMITTED]).read_text()
        return int(text) if text.isdecimal() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="keras_dist-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigurationError(
            "There is no folder for temporary files, which --max-restarts needs.",
            f"{error.strerror or error}",
            "Set TMPDIR to a folder that you may write to.",
        ) from error
