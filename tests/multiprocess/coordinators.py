"""What tests run on the coordinator of a pool, which is in `"sync"` mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def in_mode(mode: str, max_staleness: int | None = None) -> Iterator[None]:
    """Lets the coordinator train in another mode while this is entered."""
    from keras_dist.cluster import current_backend

    backend: Any = current_backend()
    backend._options.update(mode=mode, max_staleness=max_staleness)
    try:
        yield
    finally:
        backend._options.update(mode="sync", max_staleness=None)
