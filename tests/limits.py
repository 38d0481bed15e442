"""How long something may take in a test: a multiple of what this machine, which does other work too, needs just now."""

import functools
import os
import subprocess
import sys
import time

TIER = "KERAS_DIST_TEST_TIER"  # "test", "ci" or "full": set by `tests/suite.py`
PROMISED_ONLY = "KERAS_DIST_TEST_PROMISED_TIMES"  # set by `make faults`
SHORTEST = 10.0
_START_SECONDS = "KERAS_DIST_TEST_START_SECONDS"  # measured once, for all processes of a run


def examples(many: int) -> int:
    """Returns how many examples hypothesis tries where each takes long: in `make test` a quarter."""
    return many if os.environ.get(TIER) == "full" else max(1, many // 4)


def limit(promised: float) -> float:
    """Returns the time limit for what is promised to take so many seconds on an idle machine."""
    if os.environ.get(PROMISED_ONLY):
        return promised
    return max(SHORTEST, 2 * promised, 4 * start_seconds())


@functools.cache
def start_seconds() -> float:
    """Returns how long a process needs to start here now, TensorFlow and Keras included."""
    if _START_SECONDS not in os.environ:
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import tensorflow, keras"], capture_output=True, check=True)
        os.environ[_START_SECONDS] = str(time.monotonic() - started)
    return float(os.environ[_START_SECONDS])
