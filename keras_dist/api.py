"""The public functions that start and distribute: `init`, `distribute`, `shard`, `run`, `reduce`."""

import inspect
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import keras

from keras_dist import cluster, environment
from keras_dist import logging as kd_logging
from keras_dist.backends import backend_class, choose
from keras_dist.cluster import current_backend, used_backend
from keras_dist.comm import devices
from keras_dist.comm.backend import Backend, Priority
from keras_dist.compat import tf_compat
from keras_dist.errors import ConfigurationError, check_alike, other_keras_backend
from keras_dist.state import checkpoint
from keras_dist.state import snapshot as random_state
from keras_dist.training import refusals, synchronizer
from keras_dist.training.options import Options

_Distributable = TypeVar("_Distributable")

_requested: tuple[str, dict[str, Any]] | None = None


def init(backend: str | Backend = "auto", seed: int | None = None, **options: Any) -> None:
    """Joins the cluster that this process was launched into.

    Call it once, on every rank, before you create data and model. If a rank is missing, the others wait 300 s
    (`KERAS_DIST_JOIN_TIMEOUT`) and then raise an error that names it. A second call with the same arguments does
    nothing, so you can run a notebook cell twice.

    Args:
        backend: `"auto"` picks the backend that fits the launcher. Otherwise the name of a backend (`"serial"`,
            `"horovod"`), or a backend with its options (`kd.Horovod(compression="fp16")`).
        seed: int. Seeds the random generators of Python, NumPy, TensorFlow and Keras. By default, generators that
            are in the same state on all ranks stay as they are, and the others get the chief's seed. In one
            process nothing is seeded.
        **options: Options of the backend, if `backend` is a name.

    Raises:
        ConfigurationError: If the backend is unknown, cannot run here, or differs from that of an earlier call.
        MismatchError: If the ranks pass different arguments.
        PeerLostError: If a rank does not join in time.

    Example:

    ```python
    import keras_dist as kd

    kd.init()
    ```
    """
    global _requested
    requested = _request(backend, options)
    if cluster.is_started():
        if requested not in (_requested, ("auto", {})):
            raise ConfigurationError(
                "kd.init() was called before with another backend or other options. A process cannot change its "
                "cluster.",
                f"{_format(requested)} after {_format(_requested)}",
                "Call kd.init() once per process. In a notebook, restart the kernel to change it.",
            )
        return
    if (name := keras.backend.backend()) != "tensorflow":
        raise other_keras_backend(f"Keras on {name!r}")
    # A child process inherits the rank's environment, and would join the cluster as the same rank.
    owner = environment.get(environment.INITIALIZED_BY)
    if owner not in (None, str(os.getpid())):
        raise ConfigurationError(
            "kd.init() was called in a child process of a rank.",
            f"process {os.getpid()}, started by rank process {owner}",
            "Put the script's body under `if __name__ == '__main__':`, so that worker processes of a data loader "
            "do not run it again.",
        )
    launch = environment.detect_launch()
    kd_logging.set_up(launch.topology.rank if launch else 0)
    chosen, priority = _choose(backend, options)
    log = kd_logging.logger()
    log.debug("backend: %r, %s", chosen, priority.reason)
    chosen.start(launch)
    topology = chosen.topology
    log.debug("topology: %s, local rank %d of %d", topology, topology.local_rank, topology.local_size)
    _compare_ranks(chosen, seed)
    log.debug("random states: %s", random_state.agree(chosen, seed))
    cluster.set_backend(chosen)
    _requested = requested
    if chosen.has_processes:
        environment.set_values({environment.INITIALIZED_BY: str(os.getpid())})
    if topology.size > 1:
        checkpoint.share_on_host()
    synchronizer.install(topology)
    tf_compat.end_data_threads_before_python()
    refusals.watch(chosen)
    devices.explain_late_settings()
    if topology.is_chief:
        ranks = f"{topology.size} ranks, " if topology.size > 1 else ""
        kd_logging.announce(f"keras_dist: {chosen.name} ({ranks}{chosen.describe_devices()}; {priority.reason})")


def _request(backend: str | Backend, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(backend, Backend):
        if options:
            raise ConfigurationError(
                "kd.init() takes options only with the name of a backend, not with a backend object.",
                f"backend={backend!r}, {options!r}",
                f"Pass the options to the object: kd.init({type(backend).__name__}(...)).",
            )
        return backend.name, backend.options()
    if not isinstance(backend, str):
        raise ConfigurationError(
            "`backend` must be a name or a backend object.", f"backend={backend!r}", "For example kd.init('horovod')."
        )
    return backend, options


def _choose(backend: str | Backend, options: dict[str, Any]) -> tuple[Backend, Priority]:
    if isinstance(backend, Backend):
        return backend, Priority(1, "chosen by the script")
    if backend == "auto":
        cls, priority = choose(environment.detect_launch())
    else:
        cls, priority = backend_class(backend), Priority(1, "chosen by the script")
    try:
        return cls(**options), priority
    except TypeError as error:
        raise ConfigurationError(
            f"The backend {cls.name!r} does not have these options.",
            ", ".join(f"{key}={value!r}" for key, value in options.items()),
            f"Its options: {', '.join(inspect.signature(cls).parameters) or 'none'}. See help(kd.{cls.__name__}).",
        ) from error


def _format(requested: tuple[str, dict[str, Any]] | None) -> str:
    name, options = requested or ("auto", {})
    return "kd.init(" + ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())]) + ")"


def _compare_ranks(backend: Backend, seed: int | None) -> None:
    own = f"{backend!r}, seed={seed}", " ".join(environment.processor_features()), backend.replicas
    arguments, processors, replicas = zip(*backend.all_gather_object("kd.init()", own), strict=True)
    remedy = "Pass the same backend, options and seed on every rank."
    check_alike("The ranks called kd.init() with different arguments.", arguments, remedy)
    remedy = (
        "Hide GPUs from ranks that see more of them (CUDA_VISIBLE_DEVICES), or name them: "
        "kd.init(kd.MultiWorker(devices=['GPU:0', 'GPU:1']))."
    )
    check_alike("All ranks must compute on equally many devices.", replicas, remedy)
    if len(set(processors)) > 1:  # XLA compiles for the processor: updates would round differently
        kd_logging.logger().debug("the ranks have different processors: updates are not fused")
        backend.uses_xla = False


def distribute(
    target: _Distributable, data: str | None = None, batch: str | None = None, scale_learning_rate: str | None = None,
    exact: bool | None = None, verify: bool | Literal["auto"] | None = None,
    tune: bool | None = None,
) -> _Distributable:  # fmt: skip
    """Distributes a model, or the optimizer of a custom training loop, over all ranks. Every rank must call it.

    The object is changed in place. `compile`, `fit`, `evaluate`, `predict` and `save` then work on all ranks, with
    the same global batches and the same results as in one process. The model may already be compiled, fitted or
    loaded. A second call does nothing. A clone of the model is not distributed.

    Args:
        target: A `keras.Model` or a `keras.optimizers.Optimizer`.
        data: Who reads the data. `"split"` (default): every rank passes the same data and trains on its share;
            each step checks that the data are the same. `"chief"` (default for Python generators): the chief
            reads, and sends each rank its share. `"sharded"`: each rank passes different data, its own shard.
            With parameter servers, pass `kd.shard(function)` to `fit` instead, and the workers read.
        batch: Meaning of the batch size in `fit`. `"global"` (default): the size of the global batch, split over
            the replicas. `"per_replica"`: the batch size of each replica, so a step trains on `kd.num_replicas()`
            batches. An epoch has the same examples in fewer steps: `steps_per_epoch=100` means 100 batches of the
            script, which are 25 steps on 4 replicas. Schedules and `save_freq` count steps. Validation, `evaluate`
            and `predict` always split the batch. Ignored in one process and with `data="sharded"`.
        scale_learning_rate: `"linear"` multiplies the optimizer's learning rate by the number of replicas, `"sqrt"`
            by its square root. It works for numbers and for Keras's schedules, and happens once: here or in
            `compile`. An optimizer that has already made steps keeps its rate; compile again to scale it. Ignored
            in one process. See also `kd.callbacks.LearningRateWarmup`.
        exact: `True` also makes random layers and BatchNormalization compute what one process computes. Every
            BatchNormalization is synchronized: its moments are those of the global batch. `Dropout`, noise,
            augmentation and `keras.random` draw for the global batch, and each replica takes its rows. It costs
            small reductions in each BatchNormalization, and the time to draw. It holds in `kd.run` too, whether the
            model or the optimizer asks for it. By default each replica normalizes by its own share and has its own
            random stream, as is usual, and a line names such layers when `fit` or a loop of `kd.run` begins; `False`
            prevents the line. Operations of `tf.random` are not changed. Parameter servers refuse it for models with
            BatchNormalization.
        verify: `"auto"` (default): where a step of `fit` or `evaluate` runs code that is not Keras's own (a
            `train_step`, a layer, loss, metric or optimizer of the script's), it is tried out on two or three rows of
            each replica after the first step, on shares and in one place. If more than rounding differs, all ranks
            stop with an error that says what, by how much, and the likely cause. What is tried out is undone.
            Asynchronous parameter servers and TPUs don't do it. `False`, or `KERAS_DIST_VERIFY=0`, turns it off.
            `True` checks the whole script: the first two steps of `fit`, `evaluate`, `predict` and `kd.run`, and the
            first smaller batch, are also computed on the whole batch in one place, from the same state. Losses,
            gradients, states of metrics, other variables and predictions are compared. If more than rounding differs,
            all ranks stop with an error that names what differs, by how much, and the likely cause. What is tried out
            is undone, so it changes no number, and later epochs cost nothing. Of BatchNormalization and random
            layers, what `exact=True` computes is compared. `KERAS_DIST_VERIFY=1` does it for any script.
        tune: `True` lets `fit` choose by the times of its own first steps how the others are made, also in one
            process. After 20 steps as they are, XLA compiles 20 more (in one process the update of a large model alone,
            too), if enough steps are left to earn it and the numbers stay the same: not where layers draw random
            numbers, nor a step of the script's own. The fastest way is kept. Then 16 steps are put into one execution,
            and as many as let Python take at most 2 % of the time of a step; steps of more than 0.1 s stay alone. All
            ranks choose the same; one line says what, and by how much. Callbacks that look at batches are called once
            for each execution, as with `steps_per_execution` in `compile`; if one may act there, steps stay as they
            are. Steps that are left over at the end of an epoch, and validation, run step by step. A number in
            `compile` stays. On a TPU `fit` puts steps together in any case.

    Returns:
        `target` itself.

    Raises:
        DistributionError: If `kd.init()` was not called.
        NotSupportedError: If the learning rate cannot be scaled.
        ConfigurationError: If `target` is something else, or an option is unknown or differs from an earlier call.

    Example:

    ```python
    model = kd.distribute(build_model())
    model.compile("adam", "mse")
    model.fit(x, y)
    ```
    """
    backend = used_backend()
    if not isinstance(target, keras.Model | keras.optimizers.Optimizer):
        raise ConfigurationError(
            "Only a Keras model or optimizer can be distributed.", f"{type(target).__module__}.{type(target).__name__}",
            "Pass a keras.Model, compiled or not. Models of tf_keras (Keras 2) are not supported.",
        )
    options = Options(data, batch, scale_learning_rate, exact, verify, tune)
    is_optimizer = isinstance(target, keras.optimizers.Optimizer)
    if is_optimizer:
        options.check_for_optimizer()
        if options.verifies_on(backend):
            backend.loop.verify()
    backend.distribute(target, options)
    if exact or (is_optimizer and exact is not None):  # a loop may train the model too
        backend.loop.exact = exact
    return target


def shard(source: Any) -> Any:
    """Returns a dataset of this rank's shares of the global batches. Every rank must call it.

    Iterate over it in a custom training loop. If `source` is a function, you can also pass the result to `fit`,
    `evaluate` and `validation_data`: then each rank reads its own shard. With parameter servers, each worker does.

    Args:
        source: A batched `tf.data.Dataset`, the same on every rank, that is split. Or a function that takes a
            `tf.distribute.InputContext` and returns a dataset with this rank's shard. With parameter servers, such
            a function can call `kd.shard(dataset)` to get this worker's share of each batch.

    Returns:
        A `tf.data.Dataset`, whose elements are for `fit` or `kd.run`.

    Raises:
        ConfigurationError: If `source` is something else.
        NotSupportedError: If the backend does not support custom training loops.

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
    """Runs one step of a custom training loop on this rank's share, like `tf.distribute.Strategy.run`.

    In `step`, optimizers from `kd.distribute` weight gradients by the number of examples in the share. Every rank
    must call it for every batch; if one does not, the others wait until the watchdog or Horovod's stall inspector
    ends them. You can call it inside a `tf.function`.

    Args:
        step: Function that takes `args`, with each element of `kd.shard` replaced by this rank's examples, and
            returns means over them. The share is empty if the batch has fewer examples than there are ranks.
        args: Tuple of elements of `kd.shard`, or of tensors with this rank's examples.

    Returns:
        What `step` returned on this rank. Use `kd.reduce` to combine it over the ranks.

    Raises:
        ConfigurationError: If `args` is an element of `kd.shard`, and no tuple of them.
    """
    return used_backend().loop.run(step, args)


def reduce(op: str, value: Any) -> Any:
    """Reduces what `kd.run` returned over all ranks. Every rank must call it, or the others wait for it.

    Args:
        op: `"sum"`, or `"mean"`, weighted by the number of examples that each rank had in the last `kd.run`.
        value: Float tensor, or a structure of them, of the same shapes on all ranks.

    Returns:
        The reduced value, the same on every rank.

    Raises:
        ConfigurationError: If `op` is unknown.
    """
    return used_backend().loop.reduce(op, value)
