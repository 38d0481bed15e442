"""Which clusters test a promised case."""

from collections.abc import Sequence

import pytest

from keras_dist.backends import BACKENDS, load

# Two ranks or replicas of every registered backend that can have them on CPUs.
DEFAULT_SIZES: dict[str, tuple[int, ...]] = {
    **{name: (2,) if entry.scales_on_cpus else (1,) for name, entry in BACKENDS.items()},
    "multi_worker": (2, 4),
    "tpu": (1, 8),  # the usual numbers of cores
}
REPLICAS_OF_A_RANK = {("multi_worker", 4): 2}  # 2 ranks with 2 devices each


def ranks_of(backend: str, size: int) -> int:
    """Returns how many processes run the script."""
    return 1 if backend in IN_ONE_PROCESS else size // REPLICAS_OF_A_RANK.get((backend, size), 1)


# For these the size is the number of replicas: devices of one process, or workers of one coordinator.
IN_ONE_PROCESS = [
    name for name, entry in BACKENDS.items()
    if entry.on_cpus or (entry.cluster and load(entry.cluster).only_chief_runs)
]  # fmt: skip

# Further sizes that a row may ask for.
_FURTHER_SIZES: dict[str, tuple[int, ...]] = {
    "horovod": (3, 4), "mirrored": (3, 4), "multi_worker": (3,), "parameter_server": (3,), "tpu": (3,),
}  # fmt: skip

# Cases that a backend refuses, with the text of its error. The table shows a dash.
_ONE_READER = "On a TPU one process reads all data, also for a pod slice."
_NOT_FILLED = "A batch is smaller than the others, or no multiple of the number of TPU cores."
_FIXED_SHAPES = "A TPU needs numbers in tensors of a fixed shape."
_SHAPES = "The predictions for the shares of a batch have different shapes"
_OWN_FUNCTION = "A function that runs a step by itself, and not by the model's strategy, cannot be distributed."
_ASSIGNED = "On this backend a step cannot take the gradient of weights that it has assigned."
_SEVERAL_CORES = {
    "loop-tensors": _NOT_FILLED,
    "per-replica-steps-per-epoch":
        "With batch='per_replica' on a TPU `steps_per_epoch` must be a multiple of the number of cores.",
    "fit-step-state": "A variable of a layer that is summed over TPU cores is not supported",
    "refuses-strategy-scope": "Mixing different tf.distribute.Strategy objects",  # TensorFlow's own words
}  # fmt: skip
_OF_REPLICAS = {
    "predict-widths": _SHAPES,
    "fit-condition": "The replicas of one process can only reduce in the step itself",
}
REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys(("horovod", "multi_worker"), {"predict-widths": _SHAPES}),
    "mirrored": _OF_REPLICAS,
    "central_storage": {
        **_OF_REPLICAS, **dict.fromkeys(("fit-spectral-normalization", "fit-sharpness-aware"), _ASSIGNED),
        "exact-rnn-cell": "On this backend a step cannot assign a variable in a loop",
    },
    "multi_worker-4": {
        **_OF_REPLICAS, "refuses-condition-by-rank": _OF_REPLICAS["fit-condition"],
        "metrics-in-python": "A metric keeps state outside of Keras variables",
    },
    "parameter_server": {
        "predict-widths": _SHAPES,
        "fit-condition": "The step applies gradients inside `tf.cond`",
        "exact-rnn-cell": "The step assigns a variable inside `tf.cond`, `tf.while_loop`",
        "evaluate-layer-state": "a layer can't change its state in `evaluate` and `predict`",
        "fit-own-train-function": _OWN_FUNCTION,
        **dict.fromkeys(("fit-spectral-normalization", "fit-sharpness-aware"), _ASSIGNED),
        "data-sparse-eagerly": "a step that runs eagerly can't add what the workers compute of sparse inputs",
        "fit-graph-network": "a step cannot take the gradient of weights that it has made itself",
        **dict.fromkeys(("exact-batchnorm", "exact-run-eagerly"), "For exact=True a step would be run twice more"),
    },
    "tpu": {
        "fit-own-train-function": _OWN_FUNCTION,
        "fit-graph-network": "On a TPU weights are made before the first step",
        **dict.fromkeys(
            (
                "data-tfds-shuffle-files", "per-replica-chief", "chief-numpy", "chief-tf", "chief-dict-of-strings",
                "chief-ragged", "sharded-equal", "sharded-unequal", "sharded-without-data", "sharded-predict",
                "differs-peeked-at", "differs-by-rank-and-time", "differs-captured",
            ),
            _ONE_READER,
        ),
        **dict.fromkeys(
            (
                "loss-none", "loss-one-number", "loss-scalar-function",
                "loss-of-the-model",
                "loss-add-loss", "loss-regularizers", "loss-by-hand", "metrics-own",
                "metrics-in-layer", "gather-last-batch", "evaluate-layer-state",
                "data-without-targets", "fit-gan", "fit-layer-state", "fit-step-state", "fit-own-train-step",
                "fit-own-train-step-twice", "fit-sharpness-aware",
                "guide-train-step-last-batch", "examples-last-batch", "metrics-by-hand",
                "jit-compile-models", "jit-compile-around",
                "loop-eager", "loop-keras-losses", "loop-metrics", "loop-own-clipping", "loop-sum",
            ),
            _NOT_FILLED,
        ),
        **dict.fromkeys(
            ("fit-overridden", "per-replica-ragged", "data-ragged", "data-sparse", "data-scipy-sparse"), _FIXED_SHAPES
        ),
        **dict.fromkeys(
            ("data-other-lengths", "data-tf-unknown-size", "data-first-batch-odd", "once-small-batches",
             "loop"),
            "A TPU needs batches of a known size.",
        ),
        **dict.fromkeys(("train-on-batch", "test-on-batch"), "A TPU needs batches of one size."),
        **dict.fromkeys(
            ("data-sparse-eagerly", "exact-run-eagerly", "fit-embedding-eagerly", "fit-run-eagerly",
             "fit-steps-per-execution-eagerly", "loss-add-loss-eagerly", "verify-run-eagerly"),
            "A TPU runs whole steps, which must be traced.",
        ),
        **dict.fromkeys(("data-function", "exact-mixing", "loop-shard-function"), _NOT_FILLED),
    },
    "tpu-3": {
        **_SEVERAL_CORES,
        "exact-concatenated": "A TPU can't draw for batches that a step concatenates",
        **dict.fromkeys(
            (
                "exact-in-loop", "exact-random-functions", "exact-vae-sampling", "examples",
                "logs-derived", "loss-add-loss-sum", "loss-added-by-hand", "loss-drops-entries", "loss-whole-batch",
                "loss-whole-batch-forced", "gather", "gather-in-layer", "gather-in-loop",
            ),
            _NOT_FILLED,
        ),
    },
    "tpu-8": _SEVERAL_CORES,
}  # fmt: skip
# Cases that a cluster cannot show, with the reason.
_READ_AHEAD = "TPUStrategy reads ahead as far as it likes: which epoch's order a batch has is not determined."
_FIRST_BATCH = "To learn its size, a TPU makes the first batch once more, which draws from the dataset's generator."
_OF_XLA = {
    "jit-compile-exact": "The emulated cores are not compiled by XLA, which draws other numbers for Dropout.",
    "jit-compile-files": "A model is loaded on the TPU, and the case loads it outside.",
}
NOT_TESTED: dict[str, dict[str, str]] = {
    "tpu-1": {"data-pydataset-fewer-steps": _READ_AHEAD, "commit-pydataset": _FIRST_BATCH, **_OF_XLA},
    "tpu-8": {
        **_OF_XLA,
        "data-pydataset-fewer-steps": _READ_AHEAD,
        "commit-pydataset": _FIRST_BATCH,
        "fit-condition": "The emulation of several cores can't sum inside tf.cond.",
        "fitted-before": "Before kd.distribute, Keras itself trains the model on all cores, with other numbers.",
    },
}


# Cases that are meant to give other numbers than one process: KERAS_DIST_VERIFY=1 stops them.
_DRAWS = "`tf.random` draws other numbers on each replica."
NOT_VERIFIED: dict[str, str] = {
    "fit-random-functions": _DRAWS,
    **dict.fromkeys(("refuses-metric-that-does-not-add-up", "differs-constants"), "It is found before it is refused."),
}


def refusal(row: str, backend: str, size: int) -> str | None:
    """Returns the text of the error by which a cluster refuses a case, `None` if it does not."""
    refused = {**REFUSED.get(backend, {}), **REFUSED.get(f"{backend}-{size}", {})}
    return refused.get(row)


MAIN_CLUSTER = "horovod-2"  # where `make test` tests every case that it does not leave out


def clusters_of(mark: pytest.Mark) -> set[str]:
    """Returns the clusters on which `make test` tests a row."""
    return {*mark.kwargs["also"], *(() if mark.kwargs["covered_by"] else (MAIN_CLUSTER,))}


def clusters(more_sizes: Sequence[int] = ()) -> list[tuple[str, int]]:
    """Returns pairs (backend, number of ranks or replicas), with further sizes if the backend is tested with them."""
    chosen = []
    for backend in BACKENDS:
        more = [size for size in more_sizes if size in _FURTHER_SIZES.get(backend, ())]
        chosen += [(backend, size) for size in (*DEFAULT_SIZES[backend], *more)]
    return sorted(chosen, key=lambda cluster: (cluster[0] != "serial", cluster))
