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
_MORE = (
    "test_input", "test_losses", "test_loop", "test_models", "test_more_callbacks", "test_more_optimizers",
    "test_sources", "test_streams",
)  # fmt: skip
# On two ranks all cases of the other modules are; on 3, on 4, and on one (which is plain Keras) these are:
_USUAL_EVERYWHERE = (
    "who-am-i", "fit-float64", "evaluate", "predict",
    "data-tf-shuffled-unseeded", "data-last-batch-smaller-than-ranks", "once-small-batches",
)  # fmt: skip
_USUAL_IN_ONE_PROCESS = ("broadcast", "barrier", "init-again", "train-on-batch", "model-checkpoint", "save")


def is_usual(module: str, row: str, cluster: tuple[str, int]) -> bool:
    """True if a case is among those that `make test` tries on this cluster."""
    size = cluster[1]
    if module in _MORE:
        return False
    return size == 2 or row in _USUAL_EVERYWHERE or (size == 1 and row in _USUAL_IN_ONE_PROCESS)
