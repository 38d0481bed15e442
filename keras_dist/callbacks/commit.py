"""A callback that saves the state of training, so that the same script goes on where it was killed."""

from __future__ import annotations

import os
import re
from typing import Any

import keras

from keras_dist.errors import ConfigurationError
from keras_dist.state.commits import Commits

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Commit(keras.callbacks.Callback):
    """Saves the whole state of `fit`, and lets the next start of the same script go on at the next batch.

    A commit has the weights, the optimizer, the random state, the metrics, the state of the other callbacks, the
    history, and the place in the data. Only the chief writes, in the background, and a commit is complete or not there.
    At the next start `fit` loads the newest commit that is whole. With the same number of ranks, the final weights are
    those of a run that was not interrupted, bit for bit.

    The data have to come in the same order again, so give `shuffle` a seed: call `keras.utils.set_random_seed(...)`, or
    pass `seed=...`. Where an order can't be made again, `fit` goes on at the beginning of the epoch, and says so.

    SIGTERM, which Slurm, Kubernetes and clouds send before they take a machine away, makes all ranks commit after the
    same step and exit with code 75: start the same command again. Another SIGTERM, two seconds later or more, ends
    them at once.

    Args:
        directory: str or path. The folder of the commits, on a disk that is still there at the next start.
        every: When to commit: a time in seconds, minutes or hours (`"300s"`, `"10min"`, `"1h"`), a number of batches,
            or `"epoch"`. The beginning and the end of training are always committed.
        keep: int. How many commits are kept.

    Raises:
        ConfigurationError: If `every` or `keep` is invalid, or the directory is not on a file system.

    Example:

    ```python
    keras.utils.set_random_seed(1)
    model = kd.distribute(build_model())
    model.compile("adam", "mse")
    model.fit(x, y, epochs=90, callbacks=[kd.callbacks.Commit("commits", every="300s")])
    ```
    """

    async_safe = True  # it has no batch hooks: `fit` adds its own

    def __init__(self, directory: str | os.PathLike[str], every: str | int = "300s", keep: int = 3) -> None:
        super().__init__()
        self.directory = os.fspath(directory)
        self.seconds, self.batches = _parse(every)
        self.commits = Commits(directory, keep)
        self.is_arranged = False  # `fit` of a distributed model sets it

    @property
    def at_epochs(self) -> bool:
        """True if it commits only at the end of an epoch."""
        return self.seconds is None and self.batches is None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.is_arranged:
            raise ConfigurationError(
                "Commit needs a model that keras_dist knows, also in one process.",
                f"a model {self.model.name!r} that was not passed to kd.distribute",
                "Add `model = kd.distribute(model)` before `model.compile`.",
            )


def _parse(every: Any) -> tuple[float | None, int | None]:
    """Returns the seconds or the batches between two commits; both `None` for epochs."""
    if every == "epoch":
        return None, None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return None, every
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(s|min|h)", every) if isinstance(every, str) else None
    if found is not None:
        return float(found[1]) * _SECONDS[found[2]], None
    raise ConfigurationError(
        "Unknown time between commits.",
        f"every={every!r}",
        'Pass a time ("300s", "10min", "1h"), a number of batches, or "epoch".',
    )
