"""Finds the largest batch that fits, with few compilations, since each takes seconds to minutes. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

_LARGEST = 2**20
_TOLERANCE = 0.04  # stops when the two bounds are this close


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of one compilation.

    Args:
        batch: Batch size of a replica.
        fits: True if it fits.
        memory: Bytes needed, 0 if unknown.
    """

    batch: int
    fits: bool
    memory: int


def largest_that_fits(
    first: Trial, attempt: Callable[[int], Trial], available: int, most_trials: int
) -> tuple[int, int]:
    """Returns the largest batch that was found to fit and the smallest that was found not to, 0 for none.

    Memory grows about linearly with the batch, so the next guess is where a line through two trials meets the available
    memory. Without such a line the batch is quadrupled, or the interval halved.

    Args:
        first: The first trial.
        attempt: Compiles for a batch.
        available: Available bytes.
        most_trials: Maximum number of attempts.
    """
    trials = {first.batch: first}
    for _ in range(most_trials):
        batch = _next(sorted(trials.values(), key=lambda trial: trial.batch), available)
        if batch is None:
            break
        trials[batch] = attempt(batch)
    fitting, too_large = _bounds(list(trials.values()))
    return (fitting.batch if fitting else 0), (too_large.batch if too_large else 0)


def _bounds(trials: list[Trial]) -> tuple[Trial | None, Trial | None]:
    fitting = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch, default=None)
    too_large = min((trial for trial in trials if not trial.fits), key=lambda trial: trial.batch, default=None)
    return fitting, too_large


def _next(trials: list[Trial], available: int) -> int | None:
    fitting, too_large = _bounds(trials)
    low, high = (fitting.batch if fitting else 0), (too_large.batch if too_large else _LARGEST + 1)
    if high - low <= max(1, int(_TOLERANCE * low)):
        return None
    if too_large is None and low >= _LARGEST:
        return None
    guess = _interpolated(trials, available) or (low * 4 if too_large is None else (low + high) // 2)
    if too_large is None:
        return min(max(guess, low + max(1, int(_TOLERANCE * low))), _LARGEST)
    # Kept away from the bounds, so that a bad guess still narrows the interval.
    margin = max(1, (high - low) // 10)
    return min(max(guess, low + margin), high - margin)


def _interpolated(trials: list[Trial], available: int) -> int | None:
    known = [trial for trial in trials if trial.memory]
    if len(known) < 2:
        return None
    # The two trials closest to the available memory.
    one, other = sorted(sorted(known, key=lambda trial: abs(trial.memory - available))[:2], key=lambda t: t.batch)
    slope = (other.memory - one.memory) / (other.batch - one.batch)
    if slope <= 0:
        return None
    return int((available * 0.995 - one.memory) / slope) + one.batch
