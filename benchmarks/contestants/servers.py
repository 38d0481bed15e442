"""`fit` over parameter servers, the loop by hand on them, and plain Keras, as in `ps_contestants.py`."""

from collections.abc import Callable

import ps_contestants as ps

from contestants import Case


def build(case: Case, mode: str) -> Callable[[], tuple[float, float]]:
    way = ps.WAYS[mode in ("async", ps.HAND_WRITTEN)]  # the workers of a loop read their data
    return lambda: ps.time_fit(case.model, ps.Case(mode, way, 1), case.executions)
