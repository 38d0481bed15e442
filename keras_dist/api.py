"""The public functions that start and distribute: `init`, `distribute`, and the verbs of a custom loop."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from keras_dist import cluster, environment
from keras_dist import logging as kd_logging
from keras_dist.backends import backend_class, choose
from keras_dist.cluster import current_backend
from keras_dist.comm.backend import Affinity, Backend
from keras_dist.errors import ConfigurationError, MismatchError
from keras_dist.state import random as random_state
from keras_dist.training import refusals
from keras_dist.training.options import Options

_Distributable = TypeVar("_Distributable")

_requested: tuple[str, dict[str, Any]] | None = None


def init(backend: str | Backend = "auto", seed: int | None = None, **options: Any) -> None:
    """Joins the cluster that this process was launched into. Call it once, before data and model are made.

    Every rank must call it; the others wait for a missing one for 300 s (KERAS_DIST_JOIN_TIMEOUT), then end
    with its number. A second call with the same arguments does nothing, so a notebook's cell can run twice.

    Args:
        backend: `"auto"` (what fits the launcher best), the name of a backend (`"serial"`, `"horovod"`), or a
            backend with its options (`kd.Horovod(compression="fp16")`).
        seed: Seeds Python's, NumPy's, TensorFlow's and Keras's random generators. Without it they are kept
            where the script has seeded them alike on all ranks, and otherwise given the chief's seed; in one
            process they are left alone.
        **options: Options of the backend, if it is given by name.

    Raises:
        ConfigurationError: If the backend is unknown, can't run here, or another one was chosen before.
        MismatchError: If the ranks have called it with different arguments.
        PeerLostError: If a rank doesn't arrive in time.

    Example:

    ```python
    import keras_dist as kd

    kd.init()
    ```
    """
    global _requested
    requested = _request(backend, options)
    if cluster.is_started():
        _refuse_another(requested)
        return
    refusals.check_keras_backend()
    _refuse_child_process()
    launch = environment.detect_launch()
    kd_logging.set_up(launch.topology.rank if launch else 0)
    chosen, affinity = _choose(backend, options)
    log = kd_logging.logger()
    log.debug("backend: %r, %s", chosen, affinity.reason)
    chosen.start(launch)
    log.debug("place: %s, local rank %d of %d", chosen.topology, chosen.topology.local_rank, chosen.topology.local_size)
    _refuse_different_arguments(chosen, seed)
    log.debug("random states: %s", random_state.agree(chosen, seed))
    cluster.set_backend(chosen)
    _requested = requested
    if chosen.has_processes:
        environment.set_values({environment.INITIALIZED_BY: str(os.getpid())})
    _announce(chosen, affinity)


def _request(backend: str | Backend, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(backend, Backend):
        if options:
            raise ConfigurationError(
                "Options belong to the backend object, if one is given.",
                f"backend={backend!r}, {options!r}",
                f"Write kd.init({type(backend).__name__}(...)) with all options inside.",
            )
        return backend.name, backend.options()
    if not isinstance(backend, str):
        raise ConfigurationError(
            "`backend` must be a name or a backend.", f"backend={backend!r}", "For example kd.init('horovod')."
        )
    return backend, options


def _choose(backend: str | Backend, options: dict[str, Any]) -> tuple[Backend, Affinity]:
    if isinstance(backend, Backend):
        return backend, Affinity(1, "chosen by the script")
    if backend != "auto":
        return _make(backend_class(backend), options), Affinity(1, "chosen by the script")
    forced = environment.get(environment.BACKEND)
    if forced is not None:
        return _make(backend_class(forced), options), Affinity(1, f"chosen by {environment.BACKEND}")
    cls, affinity = choose(environment.detect_launch())
    return _make(cls, options), affinity


def _make(cls: type[Backend], options: dict[str, Any]) -> Backend:
    try:
        return cls(**options)
    except TypeError as error:
        raise ConfigurationError(
            f"The backend {cls.name!r} doesn't have these options.",
            ", ".join(f"{key}={value!r}" for key, value in options.items()),
            f"Its options: {', '.join(inspect.signature(cls).parameters) or 'none'}. See help(kd.{cls.__name__}).",
        ) from error


def _refuse_another(requested: tuple[str, dict[str, Any]]) -> None:
    if requested == _requested or requested == ("auto", {}):
        return
    raise ConfigurationError(
        "kd.init() was called before, with another backend or other options; a process can't change its cluster.",
        f"{_format(requested)} after {_format(_requested)}",
        "Keep one kd.init() per process; in a notebook, restart the kernel to change it.",
    )


def _format(requested: tuple[str, dict[str, Any]] | None) -> str:
    name, options = requested or ("auto", {})
    return "kd.init(" + ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())]) + ")"


def _refuse_child_process() -> None:
    """A child of a rank has inherited the rank's environment, and would take its place in the cluster."""
    owner = environment.get(environment.INITIALIZED_BY)
    if owner is None or owner == str(os.getpid()):
        return
    raise ConfigurationError(
        "kd.init() was called in a child process of a rank.",
        f"process {os.getpid()}, started by rank process {owner}",
        "Put the script's body under `if __name__ == '__main__':`, so that worker processes of a data loader "
        "don't run it again.",
    )


def _refuse_different_arguments(backend: Backend, seed: int | None) -> None:
    """Ranks that run different scripts would send each other what the others don't expect."""
    everyone = backend.all_gather_object("kd.init()", f"{backend!r}, seed={seed}")
    if len(set(everyone)) > 1:
        raise MismatchError(
            "The ranks have called kd.init() with different arguments.",
            "; ".join(f"rank {rank}: {arguments}" for rank, arguments in enumerate(everyone)),
            "Give kd.init() the same backend, options and seed on every rank.",
        )


def _announce(backend: Backend, affinity: Affinity) -> None:
    topology = backend.topology
    if topology.is_chief:
        ranks = f"{topology.size} ranks, " if topology.size > 1 else ""
        line = f"keras_dist: {backend.name} ({ranks}{backend.describe_devices()}; {affinity.reason})"
        print(line, file=sys.stderr, flush=True)


def distribute(
    target: _Distributable, data: str | None = None, batch: str | None = None, scale_learning_rate: str | None = None
) -> _Distributable:
    """Makes a model, or an optimizer of a custom loop, span all ranks. Every rank must call it.

    The same object is returned, distributed: its `compile`, `fit`, `evaluate`, `predict` and `save` now work over
    all ranks, on the same global batches and with the same numbers as in one process. Models that are compiled,
    fitted or loaded already are fine. Twice is the same as once. A clone of it is an undistributed model.

    Args:
        target: A `keras.Model` or a `keras.optimizers.Optimizer`.
        data: Where the data come from. `"split"` (default): every rank passes the same data, and they are split;
            that they are the same is checked in every step. `"chief"`: the chief reads and sends the others
            their share (default for Python generators). `"sharded"`: each rank passes its own part. With parameter
            servers this process is the only rank; what its workers are to read is `kd.shard(function)`.
        batch: Whose batch the script's is in `fit`. `"global"` (default): that of all ranks together. `"per_replica"`:
            that of each, so a step is that of one process with a batch `kd.num_replicas()` times as large. An epoch
            has the same examples in fewer steps: `steps_per_epoch`, too, counts the script's batches, and 100 of
            them are 25 steps on 4 ranks (101 are 26). Schedules and `save_freq` count the steps that are made.
            Validation, `evaluate` and `predict` split a batch as ever; under `data="sharded"` it is a rank's own
            anyway.
        scale_learning_rate: `"linear"` multiplies the optimizer's learning rate, a number or one of Keras's
            schedules, by the number of ranks, `"sqrt"` by its square root: here or in `compile`, never twice. An
            optimizer that has made steps keeps its rate, so that of a fitted or loaded model, which may have been
            scaled before, stays: compile anew to change it. See also `kd.callbacks.LearningRateWarmup`.

    In one process `batch` and `scale_learning_rate` do nothing.

    Returns:
        `target` itself.

    Raises:
        DistributionError: If `kd.init()` hasn't been called.
        NotSupportedError: If the model was compiled with `jit_compile=True`, or the learning rate can't be scaled.
        ConfigurationError: If `target` is something else, an option unknown, or other than in an earlier call.

    Example:

    ```python
    model = kd.distribute(build_model())
    model.compile("adam", "mse")
    model.fit(x, y)
    ```
    """
    backend = current_backend()
    if not isinstance(target, keras.Model | keras.optimizers.Optimizer):
        raise ConfigurationError(
            "Only a Keras model or optimizer can be distributed.",
            f"{type(target).__module__}.{type(target).__name__}",
            "Pass the keras.Model before or after `compile`; tf_keras (Keras 2) models are not supported.",
        )
    options = Options(data, batch, scale_learning_rate)
    if isinstance(target, keras.optimizers.Optimizer):
        options.check_for_optimizer()
    backend.distribute(target, options)
    return target


def shard(source: Any) -> Any:
    """Returns a data set of this rank's shares of global batches. Every rank must call it.

    With a function it is for `fit`, `evaluate` and `validation_data` too: each rank reads its own part. With parameter
    servers each worker does, and this process sees no example.

    Args:
        source: A batched `tf.data.Dataset`, the same on every rank, of which each takes its part; or a function
            of a `tf.distribute.InputContext` that returns a data set with this rank's own part. In such a function
            with parameter servers, `kd.shard(dataset)` is this worker's part of each batch.

    Returns:
        A `tf.data.Dataset`. Its elements are for `fit`, or for `kd.run`, which hands the rank's examples to the step.

    Raises:
        ConfigurationError: If `source` is something else.

    Example:

    ```python
    def read(context):
        files = tf.data.Dataset.list_files("part-*", seed=1)
        return tf.data.TFRecordDataset(files.shard(context.num_input_pipelines, context.input_pipeline_id)).batch(64)

    model.fit(kd.shard(read))

    for batch in kd.shard(dataset):
        loss = kd.reduce("mean", kd.run(step, (batch,)))
    ```
    """
    return current_backend().loop.shard(source)


def run(step: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
    """Runs one step of a custom loop on this rank's share, as `tf.distribute.Strategy.run` does.

    Inside it, optimizers from `kd.distribute` weight gradients by the number of examples of the share. Every
    rank must call it for every batch, or the others wait until the watchdog or Horovod's stall inspector ends
    them. It may be called inside a `tf.function`.

    Args:
        step: Gets `args`, with each element of `kd.shard` replaced by this rank's examples. It returns means
            over its share. If the batch is smaller than the number of ranks, the share may be empty.
        args: Elements of `kd.shard`, or tensors of this rank's examples.

    Returns:
        What `step` returns, of this rank. `kd.reduce` puts the ranks' together.
    """
    return current_backend().loop.run(step, args)


def reduce(op: str, value: Any) -> Any:
    """Puts what a step returned together over all ranks. Every rank must call it.

    Args:
        op: `"mean"` weights by the number of examples that each rank had in the last `kd.run`; `"sum"` adds up.
        value: Tensor, or structure of tensors, of the same shapes on all ranks.

    Returns:
        The same on every rank.

    Raises:
        ConfigurationError: If `op` is unknown.
    """
    return current_backend().loop.reduce(op, value)
