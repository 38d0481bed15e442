"""Two lines make a Keras 3 `model.fit` script distributed, with the same results.

    import keras_dist as kd

    kd.init()                       # 1: join the processes that were started together
    model = build_model()
    model = kd.distribute(model)    # 2: compile, fit, evaluate, predict and save now span all of them

What a script calls; `help(kd.init)` and so on say more:

    kd.init(backend="auto", seed=None)      join the other processes, before data and model are made
    kd.distribute(model)                    distribute a model, or the optimizer of a custom loop
    kd.rank(), kd.size(), kd.local_rank()   which process this is
    kd.num_replicas()                       into how many shares a global batch is split
    kd.is_chief()                           whether this process writes the script's own files
    kd.barrier(), kd.broadcast(value)       wait for all processes; the chief's value on each of them
    kd.shard(dataset), kd.run(step, args), kd.reduce(op, value)     a custom training loop
    kd.all_reduce(gradients)                gradients of the global batch, to clip them in a step
    kd.gather(tensor)                       the rows of the global batch, with gradients, to compare them in a step
    kd.losses.WholeBatch(loss)              a loss of the global batch
    kd.callbacks, kd.layers                 what Keras lacks
    kd.tpu_dry_run(model, batch)            whether a model compiles for a TPU and fits, without a TPU
    kd.launch(train, np=4)                  run a function of a notebook on several ranks
    kd.testing                              run functions on several ranks in a test

Backends with options, for `kd.init`: kd.Serial, kd.Horovod, kd.MultiWorker, kd.Mirrored, kd.CentralStorage,
kd.ParameterServer, kd.TPU. Errors: kd.DistributionError and its kinds kd.ConfigurationError, kd.NotSupportedError,
kd.MismatchError, kd.PeerLostError, kd.WorkerError.

Importing it changes nothing and imports nothing: names are resolved when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    name: f"keras_dist.{module}"
    for module, names in {
        "api": ("init", "distribute", "shard", "run", "reduce"),
        "cluster": (
            "all_reduce", "gather", "rank", "size", "num_replicas", "local_rank", "is_chief", "barrier", "broadcast",
        ),
        "launcher.function": ("launch",),
        "diagnostics.process": ("tpu_dry_run",),
        "backends.local.serial": ("Serial",),
        "backends.tpu.backend": ("TPU",),
        "backends.horovod.backend": ("Horovod",),
        "backends.multi_worker.backend": ("MultiWorker",),
        "backends.local.replicas": ("Mirrored", "CentralStorage"),
        "backends.parameter_server.backend": ("ParameterServer",),
        "errors": (
            "DistributionError", "ConfigurationError", "NotSupportedError", "MismatchError", "PeerLostError",
            "WorkerError",
        ),
    }.items()
    for name in names
}  # fmt: skip
_MODULES = ("callbacks", "layers", "losses", "testing")

__all__ = ["__version__", *_PUBLIC, *_MODULES]  # noqa: PLE0604

# isort: off
if TYPE_CHECKING:
    from keras_dist import callbacks as callbacks, layers as layers, losses as losses
    from keras_dist.api import distribute as distribute, init as init, reduce as reduce, run as run, shard as shard
    from keras_dist.backends.horovod.backend import Horovod as Horovod
    from keras_dist.backends.local.replicas import CentralStorage as CentralStorage
    from keras_dist.backends.local.replicas import Mirrored as Mirrored
    from keras_dist.backends.local.serial import Serial as Serial
    from keras_dist.backends.multi_worker.backend import MultiWorker as MultiWorker
    from keras_dist.backends.parameter_server.backend import ParameterServer as ParameterServer
    from keras_dist.backends.tpu.backend import TPU as TPU
    from keras_dist.cluster import all_reduce as all_reduce, gather as gather
    from keras_dist.cluster import barrier as barrier, broadcast as broadcast, is_chief as is_chief, rank as rank
    from keras_dist.cluster import local_rank as local_rank, num_replicas as num_replicas, size as size
    from keras_dist.diagnostics.process import tpu_dry_run as tpu_dry_run
    from keras_dist.errors import ConfigurationError as ConfigurationError, DistributionError as DistributionError
    from keras_dist.errors import MismatchError as MismatchError, NotSupportedError as NotSupportedError
    from keras_dist.errors import PeerLostError as PeerLostError, WorkerError as WorkerError
    from keras_dist.launcher.function import launch as launch
# isort: on


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(_imported(_PUBLIC[name]), name)
    if name in _MODULES:
        return _imported(f"keras_dist.{name}")
    raise AttributeError(f"module 'keras_dist' has no attribute {name!r}")


def _imported(module: str) -> Any:
    if module != "keras_dist.errors":
        # Says what TensorFlow could not: with a libtpu that doesn't fit, importing it kills the process.
        from keras_dist.backends.tpu.place import check_before_tensorflow

        check_before_tensorflow()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        from keras_dist.errors import missing_package

        if (explained := missing_package(error)) is None:
            raise
        raise explained from error


def __dir__() -> list[str]:
    return sorted(__all__)
