"""Which clusters test a promised case."""

from __future__ import annotations

from collections.abc import Sequence

from keras_dist.backends import BACKENDS, load
from tests.contract.rows import CLIPS

# Two ranks or replicas of every registered backend that can have them on CPUs.
DEFAULT_SIZES: dict[str, tuple[int, ...]] = {
    **{name: (2,) if entry.scales_on_cpus else (1,) for name, entry in BACKENDS.items()},
    "tpu": (1, 8),  # the usual numbers of cores
}

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
REFUSED: dict[str, dict[str, str]] = {
    **dict.fromkeys(("horovod", "multi_worker"), {"predict-widths": _SHAPES}),
    **dict.fromkeys(
        ("central_storage", "mirrored"),
        {
            "predict-widths": _SHAPES, "fit-spectral-normalization": _ASSIGNED,
            "fit-condition": "The replicas of one process can only reduce in the step itself",
        },
    ),
    "parameter_server": {
        "predict-widths": _SHAPES,
        "fit-condition": "The step applies gradients inside `tf.cond`",
        "evaluate-layer-state": "a layer can't change its state in `evaluate` and `predict`",
        "fit-own-train-function": _OWN_FUNCTION, "fit-spectral-normalization": _ASSIGNED,
    },
    "tpu": {
        "fit-own-train-function": _OWN_FUNCTION,
        **dict.fromkeys(
            (
                "data-tfds-shuffle-files", "per-replica-chief", "chief-numpy", "chief-tf", "chief-dict-of-strings",
                "chief-ragged", "sharded-equal", "sharded-unequal", "sharded-without-data", "sharded-predict",
                "differs-peeked-at", "differs-one-more-random-op", "differs-unseeded-numpy",
                "differs-by-rank-and-time", "differs-list-files", "differs-captured",
            ),
            _ONE_READER,
        ),
        **dict.fromkeys(
            (
                "once-numpy", "once-tf-shuffled", "loss-none", "loss-one-number", "loss-scalar-function",
                "loss-add-loss", "loss-regularizers", "loss-by-hand", "metrics-property", "metrics-own",
                "metrics-in-layer", "gather-last-batch", "evaluate-layer-state",
                "data-without-targets", "fit-gan", "fit-layer-state", "fit-step-state", "fit-own-train-step",
                "fit-own-train-step-twice",
                "guide-train-step-last-batch", "examples-last-batch", "metrics-by-hand",
                "jit-compile-models", "jit-compile-around",
                "loop-eager", "loop-keras-losses", "loop-metrics", "loop-own-clipping", "loop-sum", "loop-unbuilt",
            ),
            _NOT_FILLED,
        ),
        **dict.fromkeys(
            ("fit-overridden", "per-replica-ragged", "data-ragged", "data-sparse", "data-scipy-sparse"), _FIXED_SHAPES
        ),
        **dict.fromkeys(
            ("data-other-lengths", "fit-simclr", "data-tf-unknown-size", "data-first-batch-odd", "once-small-batches",
             "loop"),
            "A TPU needs batches of a known size.",
        ),
        **dict.fromkeys(("train-on-batch", "test-on-batch", "loop-shard-function"), "A TPU needs batches of one size."),
        **dict.fromkeys(
            ("exact-run-eagerly", "fit-run-eagerly", "fit-steps-per-execution-eagerly", "verify-run-eagerly"),
            "A TPU runs whole steps, which must be traced.",
        ),
        "exact-mixing": _NOT_FILLED,
    },
    "tpu-3": {
        **_SEVERAL_CORES,
        **dict.fromkeys(
            (
                "exact-in-loop", "exact-random-functions", "exact-vae-sampling", "examples", "guide-train-step",
                "logs-derived", "loss-add-loss-sum", "loss-added-by-hand", "loss-whole-batch",
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
    **dict.fromkeys(
        ("once-numpy", "once-tf-shuffled"), "What a step does in Python, it does once more when it is tried out."
    ),
    **dict.fromkeys(
        ("refuses-metric-that-does-not-add-up", "differs-constants"), "It is found before it is refused."
    ),
}


def refusal(row: str, backend: str, size: int) -> str | None:
    """Returns the text of the error by which a cluster refuses a case, `None` if it does not."""
    refused = {**REFUSED.get(backend, {}), **REFUSED.get(f"{backend}-{size}", {})}
    return refused.get(row)


_MAIN_CLUSTER = ("horovod", 2)


def clusters(more_sizes: Sequence[int] = ()) -> list[tuple[str, int]]:
    """Returns pairs (backend, number of ranks or replicas), with further sizes if the backend is tested with them."""
    chosen = []
    for backend in BACKENDS:
        more = [size for size in more_sizes if size in _FURTHER_SIZES.get(backend, ())]
        chosen += [(backend, size) for size in (*DEFAULT_SIZES[backend], *more)]
    return sorted(chosen, key=lambda cluster: (cluster[0] != "serial", cluster))


# On two cores, `make test` takes under 10 minutes, and CI with `make test-more` under 25. `make test-full` tests all.
_MORE = (
    "test_batches", "test_exact", "test_gather", "test_input", "test_logs", "test_losses", "test_loop",
    "test_models",
    "test_more_callbacks", "test_more_optimizers",
    "test_per_replica", "test_sources", "test_streams", "test_verify",
)  # fmt: skip
# Twelve pairs of optimizer and clipping take the same path, so the longer run tests half of them.
_MORE_ROWS = [f"{optimizer}-{clip}" for optimizer in ("momentum", "adam") for clip in CLIPS]
_MORE_ROWS += [f"jit-compile-{part}" for part in ("models", "around", "exact", "files")]  # XLA takes seconds to compile
# `make test` tests only these on 3 and 4 ranks, and on one rank, which runs plain Keras.
_USUAL_EVERYWHERE = (
    "who-am-i", "fit-float64", "evaluate", "predict",
    "data-tf-shuffled-unseeded", "data-last-batch-smaller-than-ranks", "once-small-batches",
)  # fmt: skip
# The other backends send the same data over another transport.
_MORE_ELSEWHERE = (
    *_USUAL_EVERYWHERE,
    "broadcast", "commit", "custom-callback-batch-logs", "data-generator", "fit-batchnorm", "fit-embedding",
    "predict-widths", "save", "stops-different-calls",
)  # fmt: skip
# Replicas of one process run a different step, and so does the coordinator of parameter servers.
_MORE_IN_REPLICAS = (
    "fit-batchnorm-synchronized", "fit-dropout",
    "fit-embedding-global-clipnorm", "fit-fixed-batch-size",
    "fit-gan", "fit-integer-counter", "fit-layer-state", "logs-derived",
    "metrics-by-hand", "exact-dropout", "exact-batchnorm", "exact-vae-sampling",
    "verify", "verify-finds-sum", "verify-in-loop",
    "fit-mixed-bfloat16", "fit-own-train-step", "fit-own-train-step-raw-mean",
    "fit-run-eagerly", "fit-step-state", "fit-subclassed",
    "fit-steps-per-execution-not-dividing", "train-on-batch", "metrics-auc-precision", "metrics-in-layer",
    "gradient-accumulation", "ema-overwrite", "adam-global-clipnorm", "loss-scaling-overflow",
    "optimizers-found",
    "gather",
    "loss-mask-zero", "loss-add-loss",
    "loss-regularizers",
    "data-pydataset", "data-views", "data-ragged", "data-sparse", "terminate-on-nan-of-one-rank", "model-checkpoint",
    "per-replica-tf", "scale-learning-rate", "loop", "loop-eager", "loop-sum", "loop-unbuilt",
    "loop-distributed-model", "loop-shard-function", "fit-own-clipping", "loop-own-clipping", "loop-metrics",
    "refuses-loop-without-run", "jit-compile", "jit-compile-around",
)  # fmt: skip
# Several cores: shares with filler rows, empty shares, sums over the cores, TPUStrategy's variables.
_MORE_ON_CORES = (
    "adam-global-clipnorm", "backup-and-restore", "callback-evaluates", "commit", "compiled-before", "data-function",
    "data-generator", "data-last-batch-odd", "data-sample-weight", "evaluate", "exact-batchnorm", "exact-dropout",
    "fit-batchnorm", "fit-dropout",
    "fit-embedding-adam", "fit-float64", "fit-own-train-step-raw-mean",
    "gather", "learning-rate-warmup", "logs-derived", "loop-distributed-model",
    "loss-add-loss-sum", "loss-scaling", "metrics-auc-precision",
    "per-replica-tf", "predict", "refuses-fixed-batch", "refuses-stateful-rnn", "save",
    "scale-learning-rate", "terminate-on-nan", "verify", "who-am-i",
)  # fmt: skip
_MORE_ON_ONE_CORE = (
    *_MORE_ELSEWHERE,
    "data-class-weight", "fit-functional-multi-output", "fit-gan", "fit-own-train-step", "fit-run-eagerly",
    "loop-full-batches",
    "loss-weights", "metrics-in-layer", "metrics-own", "progress-bar", "save-subclassed", "schedule-free-adamw",
    "timing", "two-models",
)  # fmt: skip
_USUAL_IN_ONE_PROCESS = ("broadcast", "barrier", "commit", "init-again", "train-on-batch", "model-checkpoint", "save")


def run_of(module: str, row: str, cluster: tuple[str, int]) -> str:
    """Returns which run tests a case on a cluster: `"usual"` (`make test`), `"more"` or `"full"`."""
    backend, size = cluster
    if cluster == _MAIN_CLUSTER:
        return "more" if module in _MORE or row in _MORE_ROWS else "usual"
    if backend in ("serial", _MAIN_CLUSTER[0]):
        is_usual = row in _USUAL_EVERYWHERE or (size == 1 and row in _USUAL_IN_ONE_PROCESS)
        return "usual" if is_usual else "full"
    if backend == "tpu":
        more = {1: _MORE_ON_ONE_CORE, 8: _MORE_ON_CORES}
        return "more" if row in more.get(size, ()) else "full"
    is_more = row in _MORE_ELSEWHERE or (backend in ("mirrored", "parameter_server") and row in _MORE_IN_REPLICAS)
    return "more" if is_more and size == 2 else "full"
