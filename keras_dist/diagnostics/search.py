"""Finds the largest batch that fits, with few compilations, since each takes seconds to minutes. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

LARGEST = 2**16  # of one replica: nobody trains with more
_TOLERANCE = 0.04  # stops when the two bounds are this close
_BEYOND = 1.1  # how far behind the predicted limit the other bound is looked for


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


_NOTHING = Trial(0, True, 0)  # a batch of nothing needs no memory


def bounds_of_limit(
    first: Trial, attempt: Callable[[int], Trial], available: int, most_trials: int, most: int
) -> Iterator[tuple[int, int]]:
    """Yields the largest batch that was found to fit and the smallest that was found not to, 0 for none, as they close.

    Memory grows about linearly with the batch. So the limit is predicted by a line through these two, and the
    prediction is tried. As long as one of the two is missing, a batch beyond the predicted limit is tried.

    Args:
        first: The first trial.
        attempt: Compiles for a batch.
        available: Available bytes.
        most_trials: Maximum number of attempts.
        most: The largest batch that is of use.
    """
    trials = [first]
    yield _batches(trials)
    for _ in range(most_trials):
        batch = _next(trials, available, max(most, first.batch))
        if batch is None:
            return
        trials.append(attempt(batch))
        yield _batches(trials)


def _batches(trials: list[Trial]) -> tuple[int, int]:
    fitting, too_large = _bounds(trials)
    return (fitting.batch if fitting else 0), (too_large.batch if too_large else 0)


def _bounds(trials: list[Trial]) -> tuple[Trial | None, Trial | None]:
    fitting = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch, default=None)
    too_large = min((trial for trial in trials if not trial.fits), key=lambda trial: trial.batch, default=None)
    return fitting, too_large


def _next(trials: list[Trial], available: int, most: int) -> int | None:
    """Returns the batch to try next, `None` if the bounds are close."""
    fitting, too_large = _bounds(trials)
    low, high = (fitting.batch if fitting else 0), (too_large.batch if too_large else most + 1)
    step = max(1, int(_TOLERANCE / 2 * low))
    if high - low <= max(1, int(_TOLERANCE * low)):
        return None
    if fitting and too_large:
        limit = None if _is_slow(trials) else _limit(fitting, too_large, available)
        guess = math.sqrt(low * high) if limit is None else limit
    else:
        limit = _limit(*_nearest_two(trials), available)
        beyond, without_line = (_BEYOND, 4 * low) if fitting else (1 / _BEYOND, high / 4)
        guess = without_line if limit is None else limit * beyond
    return min(max(int(guess), low + step), high - (step if too_large else 1))


def _is_slow(trials: list[Trial]) -> bool:
    """True if the last prediction has hardly narrowed the bounds: the memory is far from a line."""
    (low, high), (low_before, high_before) = _batches(trials), _batches(trials[:-1])
    return bool(low_before and high_before) and high - low > (high_before - low_before) / 2


def _nearest_two(trials: list[Trial]) -> tuple[Trial, Trial]:
    """Returns the two last trials, which are the closest to the limit while all are on one side of it."""
    return trials[-1], trials[-2] if len(trials) > 1 else _NOTHING


def _limit(one: Trial, other: Trial, available: int) -> float | None:
    """Returns the batch where a line through two trials meets the available memory, `None` if there is no such line."""
    if not one.memory or not (other.memory or other is _NOTHING):
        return None
    slope = (other.memory - one.memory) / (other.batch - one.batch)
    return one.batch + (available - one.memory) / slope if slope > 0 else None
