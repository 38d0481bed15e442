"""On which clusters a promised case is tried."""

from __future__ import annotations

from collections.abc import Sequence

from keras_dist.backends import BACKENDS

# Every registered backend is here: one rank where it has no launcher on this machine.
DEFAULT_SIZES: dict[str, tuple[int, ...]] = {"serial": (1,), "horovod": (2,)}


def clusters(more_sizes: Sequence[int] = ()) -> list[tuple[str, int]]:
    """Returns (backend, number of ranks), for backends with several ranks also of the further sizes."""
    chosen = []
    for backend in BACKENDS:
        sizes = DEFAULT_SIZES[backend]
        chosen += [(backend, size) for size in (*sizes, *(more_sizes if max(sizes) > 1 else ()))]
    return sorted(chosen, key=lambda cluster: (cluster[0] != "serial", cluster))


# What `make test` tries, to stay under 12 minutes on two cores; `make test-more` tries the rest.
_MORE = ("test_losses", "test_loop", "test_models", "test_more_optimizers", "test_sources", "test_streams")
_USUAL_ON_3_AND_4 = (
    "who-am-i", "fit-float64", "evaluate", "predict",
    "data-tf-shuffled-unseeded", "data-last-batch-smaller-than-ranks", "once-small-batches",
)  # fmt: skip


def is_usual(module: str, row: str, cluster: tuple[str, int]) -> bool:
    """True if a case is among those that `make test` tries on this cluster."""
    return module not in _MORE and (cluster[1] < 3 or row in _USUAL_ON_3_AND_4)
