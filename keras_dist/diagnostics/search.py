"""Looks for the largest batch that fits, with few compilations: each takes seconds to minutes. Pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

_LARGEST = 2**20
_CLOSE = 0.04  # good enough: the two ends are so near


@dataclasses.dataclass(frozen=True)
class Trial:
    """What one compilation said.

    Args:
        batch: Examples on a replica.
        fits: True if it fits.
        memory: Bytes needed, 0 if that isn't known.
    """

    batch: int
    fits: bool
    memory: int


def largest_that_fits(
    first: Trial, attempt: Callable[[int], Trial], available: int, most_trials: int
) -> tuple[int, int]:
    """Returns the largest batch that was seen to fit and the smallest that was seen not to, 0 for none.

    Memory grows about linearly with the batch, so the next guess is where a line through what is known meets what is
    there; where there is no line, twice or half of it.

    Args:
        first: What is known already.
        attempt: Compiles for a batch.
        available: Bytes.
        most_trials: How many attempts at most.
    """
    trials = {first.batch: first}
    for _ in range(most_trials):
        batch = _next(sorted(trials.values(), key=lambda trial: trial.batch), available)
        if batch is None:
            break
        trials[batch] = attempt(batch)
    good, bad = _ends(list(trials.values()))
    return (good.batch if good else 0), (bad.batch if bad else 0)


def _ends(trials: list[Trial]) -> tuple[Trial | None, Trial | None]:
    good = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch, default=None)
    bad = min((trial for trial in trials if not trial.fits), key=lambda trial: trial.batch, default=None)
    return good, bad


def _next(trials: list[Trial], available: int) -> int | None:
    good, bad = _ends(trials)
    low, high = (good.batch if good else 0), (bad.batch if bad else _LARGEST + 1)
    if high - low <= max(1, int(_CLOSE * low)):
        return None
    if bad is None and low >= _LARGEST:
        return None
    guess = _where_it_meets(trials, available) or (low * 4 if bad is None else (low + high) // 2)
    if bad is None:
        return min(max(guess, low + max(1, int(_CLOSE * low))), _LARGEST)
    # Kept off the ends, so that a bad guess still narrows it.
    margin = max(1, (high - low) // 10)
    return min(max(guess, low + margin), high - margin)


def _where_it_meets(trials: list[Trial], available: int) -> int | None:
    known = [trial for trial in trials if trial.memory]
    if len(known) < 2:
        return None
    # The two that are nearest to what is there.
    one, other = sorted(sorted(known, key=lambda trial: abs(trial.memory - available))[:2], key=lambda t: t.batch)
    slope = (other.memory - one.memory) / (other.batch - one.batch)
    if slope <= 0:
        return None
    return int((available * 0.995 - one.memory) / slope) + one.batch
