"""A model that runs Keras's own steps in this process: on each rank, on several replicas, or alone."""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.comm.replicas import mean_of_shares
from keras_dist.compat import keras_fit, keras_layers, keras_model
from keras_dist.compat.keras_model import attach, attached
from keras_dist.compat.tf_compat import host_variable
from keras_dist.data import pipeline, sources
from keras_dist.data.shares import UNCUT, Share, Shares, joined, may_be_empty, take_shares
from keras_dist.errors import check_alike
from keras_dist.logging import logger, warn_once
from keras_dist.state import weights
from keras_dist.step.gathering import on_share
from keras_dist.step.metrics import flat
from keras_dist.step.optimizer import distribute_optimizer, optimizers_of
from keras_dist.step.step import Fingerprints, Step, check_seen, consistency_check_of
from keras_dist.step.whole_batch import combined_assignments, whole_batch
from keras_dist.training import refusals
from keras_dist.training.call import Call, build
from keras_dist.training.distributed import DistributedModel
from keras_dist.training.loop import Loop, ReplicaLoop
from keras_dist.training.options import Options
from keras_dist.training.resuming import FitExtensions
from keras_dist.training.trial import FirstRows, as_tensors, batch_of_all_ranks

_TUNING = "_keras_dist_tuning"
# The models that `kd.distribute` got. They themselves stay as they are.
_backends: MutableMapping[keras.Model, Backend] = weakref.WeakKeyDictionary()


def _fit(model: keras.Model, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = Call("fit", types.MethodType(plain, model), args, kwargs)
    if (backend := _backends.get(model)) is None:
        return call()
    fitting = FitExtensions(model, backend, lambda: optimizers_of(model), getattr(model, _TUNING, None))

    def watch(epoch_iterator: Any) -> None:
        # Without a strategy Keras iterates over the dataset itself.
        fitting.watch(epoch_iterator, keras_fit.distributed_dataset(epoch_iterator), lambda rest: rest)

    with fitting.fit():
        given = call.get("callbacks")
        is_watched = fitting.arrange(call, given) is not given
        with keras_fit.epoch_iterators(watch) if is_watched else contextlib.nullcontext():
            return call()


class ReplicaModel(DistributedModel):
    """A model that is computed in this process, whose replicas run Keras's own step on their shares of each batch."""

    def __init__(self, model: keras.Model, backend: Backend, options: Options) -> None:
        super().__init__(model, backend, options)
        self._consistency = consistency_check_of(backend.topology.size)
        self._has_compared_options = self._state_is_broadcast = False
        self._has_run = False
        self._step: Step | None = None  # the last one
        self.data, self.reason = options.data or "split", "by kd.distribute" if options.data else "the default"
        self._to_group: tuple[tf.data.Dataset, str] | None = None
        self._constants: list[tuple[str, str, str]] = []
        self.distribute: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None  # as it was, a part of it
        self.element_spec: Any = None  # of the script's own batches, from which Keras builds a model
        self._last_count = host_variable(0, "last_count")
        self._fingerprint = host_variable(0, "fingerprint", dtype=tf.int64)
        self._has_whole_batches = host_variable(False, "has_whole_batches")

    def _explain(self, error: BaseException) -> BaseException:
        return super()._explain(self._consistency.explain(error))

    def _compile(self, call: Call) -> None:
        super()._compile(call)
        self._state_is_broadcast = False

    def _prepare_optimizer(self, optimizer: Any) -> None:
        distribute_optimizer(optimizer, self._backend)

    # --- fit, evaluate, predict ---

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        with super()._running(call), contextlib.ExitStack() as stack:
            sources = (call.get("x"), call.get("validation_data"))
            if self.options.data is None and any(isinstance(source, types.GeneratorType) for source in sources):
                stack.enter_context(attached(self, "data", "chief"))  # generators may differ by rank
                stack.enter_context(attached(self, "reason", "a Python generator"))
            self._seen()  # what a call that failed has left
            if call.name == "fit" or not self._has_compared_options:  # before reading data: errors must name the call
                text = f"model.{call.name}{' (start)' if call.name == 'fit' else ''}"
                passed = self._backend.all_gather_object(text, self.options.passed)
                check_alike("The ranks passed different options to kd.distribute.", passed, "Pass the same ones.")
                self._has_compared_options = True
            if call.name in ("evaluate", "predict", "predict_on_batch"):
                self._synchronize(f"model.{call.name}")
            if call.name == "predict":
                # For the watchdog, `predict` is one call: reading its data has collectives between the steps.
                stack.enter_context(self._backend.in_call("model.predict (steps)"))
                stack.enter_context(keras_fit.epoch_iterators(self.prepare))
            if call.name in ("train_on_batch", "test_on_batch") and not self._state_is_broadcast:
                # Before the first batch; each `fit` does it in `Synchronizer`.
                weights.broadcast_state(self._model, self._optimizers(), self._backend, f"model.{call.name}")
                self._state_is_broadcast = True
            was_built = keras_model.is_built(self._model)
            yield
            if not was_built and call.name in ("evaluate", "predict", "predict_on_batch"):
                self._synchronize(f"model.{call.name} (of a model that was not built)")
            if call.name in ("predict", "predict_on_batch"):
                self._compare_seen(f"model.{call.name} (end)")

    def _synchronize(self, call: str) -> None:
        if keras_model.is_built(self._model):
            weights.synchronize(self._model, self._optimizers(), self._backend, call)
        else:
            self._backend.all_gather_object(call)

    # --- What Keras calls inside fit, evaluate and predict ---

    def _symbolic_build(self, call: Call) -> None:
        refusals.check_model(self._model)
        step, spec = getattr(self._model, f"{self._kind}_step"), None
        if (iterator := call.get("iterator")) is not None:
            self.prepare(iterator)
            self._fitting.watch(iterator, self.given, self.distribute)
            spec = self.element_spec
        build(self._model, step, spec, call.get("data_batch"))
        self._check_strategy()  # metrics have variables only now
        self._backend.check_variables(self._model.variables)

    def _make_predict_function(self, call: Call) -> None:
        """Lets Ctrl-C stop all ranks before the same step."""
        if (function := self._made("predict_function", call)) is None:
            return

        def interruptible(iterator: Any) -> Any:
            self.interrupts.before_step()
            return function(iterator)

        attach(self._model, "predict_function", self._with_check("predict", interruptible))

    def _make_function(self, kind: str, call: Call) -> None:
        """Reports steps to the watchdog, and compares the weights after the first training step.

        Refuses a function of the script's own that, when it is traced, runs no step by the strategy.
        """
        name, backend, step = f"{kind}_function", self._backend, f"model.fit ({kind}ing steps)"
        if (function := self._made(name, call)) is None:
            return
        function, must_run = self._noted(function), keras_fit.is_overridden(self._model, f"make_{name}")

        def watched(iterator: Any) -> Any:
            nonlocal must_run
            self.interrupts.before_step()
            if self._model in weights.WITH_TOTALS:
                weights.WITH_TOTALS.discard(self._model)
                weights.reset_totals(self._model)
            self._has_run = False
            try:
                with backend.in_call(step):
                    logs = function(iterator)
            except Exception as error:
                is_end = isinstance(error, StopIteration | tf.errors.OutOfRangeError)
                if must_run and not self._has_run and not is_end:
                    raise refusals.own_function(self._model, name) from error
                raise
            if must_run and not self._has_run:
                raise refusals.own_function(self._model, name)
            must_run = False
            return self._logs_for_callbacks(kind, logs)

        is_first = kind == "train"

        def compared(iterator: Any) -> Any:
            nonlocal is_first
            outputs = watched(iterator)
            if is_first:
                is_first = False
                if self._has_whole_batches.numpy() and backend.topology.is_chief:
                    warn_once(UNCUT)
                weights.compare(self._model, backend, "model.fit (first step)", self._seen())
            return outputs

        attach(self._model, name, self._with_check(kind, compared))

    def _logs_of_all(self, kind: str, logs: dict[str, Any]) -> dict[str, Any]:
        if self._backend.topology.size == 1:
            return logs
        logs, text = flat(logs), f"model.fit (the logs of a {kind}ing step)"
        with weights.of_all_ranks(self._model, self._backend, text, *self._others(kind, logs)) as averages:
            return {**super()._logs_of_all(kind, logs), **averages}

    def _others(self, kind: str, logs: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Returns the logs that come from no metric, and their weight on this rank."""
        others = {name: log for name, log in logs.items() if not self.logs.is_known(kind, name)}
        return others, float(self._last_count.numpy())

    def _collect_logs(self, call: Call) -> None:
        # If one rank alone sets `stop_evaluating`, this text differs and all ranks raise an error.
        was_stopped = self._kind == "test" and getattr(self._model, "stop_evaluating", False)
        how = " that model.stop_evaluating stopped" if was_stopped else ""
        text, logs = f"the end of an epoch or an evaluation{how}", flat(call.get("logs") or {})
        others, weight = self._others(self._kind, logs)
        if self._kind == "train":
            self.loss_of_rank = weights.loss_of(self._model)
        averages = weights.synchronize_metrics(
            self._model, self._optimizers(), self._backend, text, others, weight, self._seen()
        )
        if not self._backend.topology.is_chief:  # which keeps them
            weights.WITH_TOTALS.add(self._model)
        call.set("logs", {**logs, **averages})

    # --- The strategy that Keras uses ---

    @property
    def counters(self) -> list[tf.Variable]:
        return [self._last_count, self._fingerprint, self._has_whole_batches]

    def _describe_share(self) -> str:
        if self.data == "sharded":
            return "a step sees the batches of its rank's own shard only."
        return super()._describe_share()

    def _seen(self) -> Fingerprints:
        """Returns what the steps since the last call have computed with."""
        seen = Fingerprints(int(self._fingerprint.numpy()), self._constants)
        self._fingerprint.assign(0)
        self._constants = []
        return seen

    def _compare_seen(self, call: str) -> None:
        check_seen([Fingerprints(*each) for each in self._backend.all_gather_object(call, self._seen())])

    def _check_own_code(self, kind: str, rows: FirstRows) -> None:
        # Its error says what differs. That of a trial can only guess.
        self._compare_seen(f"the check of {kind}ing steps (start)")
        super()._check_own_code(kind, rows)

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        self.given, self.element_spec, self.distribute = dataset, dataset.element_spec, None
        if self.is_local:
            return dataset
        if isinstance(dataset.element_spec, Shares):  # from `kd.shard`
            self._groups_next = False
            return dataset
        to_read, self._to_read = self._to_read, None
        if to_read:
            dataset = pipeline.first(dataset, to_read + 1)  # TensorFlow reads one batch ahead in plain Keras
        mode, reason = ("sharded", "AutoShardPolicy.OFF") if sources.is_sharded(dataset) else (self.data, self.reason)
        logger().debug("data: %s (%s), %s", mode, reason, type(dataset).__name__.strip("_"))
        is_grouped, self._groups_next = self._groups_next, False
        if is_grouped and mode != "sharded":  # each rank passes its own batches anyway
            self._to_group = dataset, mode
            return dataset
        if mode == "split":
            self.distribute = functools.partial(self._read, mode=mode)
        return self._read(dataset, mode)

    def _read(self, dataset: tf.data.Dataset, mode: str) -> tf.data.Dataset:
        return sources.shares_of_rank(dataset, mode, self._backend)

    def prepare(self, epoch_iterator: Any) -> None:
        """Called once Keras knows the number of batches in an epoch."""
        dataset, counted = keras_fit.distributed_dataset(epoch_iterator), epoch_iterator.data_adapter.num_batches
        if self._to_group is not None and dataset is self._to_group[0]:
            size, per_epoch = self._backend.num_replicas, epoch_iterator.steps_per_epoch
            keras_fit.set_dataset(epoch_iterator, sources.group_batches(*self._to_group, self._backend, per_epoch))
            keras_fit.set_steps(epoch_iterator, counted and sources.number_of_steps(counted, size, per_epoch))
            epoch_iterator.steps_per_epoch = per_epoch and sources.number_of_steps(per_epoch, size)
            self._to_group = None
        elif sources.is_sharded(dataset):
            steps = self._backend.all_gather_object("the number of steps", counted)
            keras_fit.set_steps(epoch_iterator, None if None in steps else max(steps))

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        self._has_run = True
        shares = self._shares_of(batch)
        share = joined(shares)
        step = Step.of(share, self._backend.topology.rank, self.stopwatch if self._applied is None else None)
        self._step, step.applied = step, self._applied
        pipeline.fold(self._fingerprint, share.fingerprint)
        kind = self._kind_of(function)
        whole = whole_batch(self._backend, self.prepare_found, self._model, exact=self.exact)
        with whole, self.logs.recording(), self.noting_draws(kind):
            if kind is None:
                tried = "" if self._applied is None else "tried_"
                outputs = self._backend.run(self._step_on(shares, function), shares.counts)
                pairs = zip(shares.parts, outputs, strict=True)
                predictions = [part._replace(data=as_tensors(own)) for part, own in pairs]
                outputs = batch_of_all_ranks(self._backend, predictions, f"keras_dist_{tried}predictions")
            else:
                self._last_count.assign(share.count)
                self._has_whole_batches.assign(share.is_whole)
                outputs = self._run_and_keep_state(lambda: self._run_counted(function, shares, kind), share, step)
        if self._applied is None and self._backend.topology.size > 1:
            self._constants += weights.of_step(self._model, step.data)
        return outputs

    def _run_counted(self, function: Callable[..., Any], shares: Shares, kind: str) -> Any:
        """Runs a training or evaluation step, and returns its logs for all replicas of this process."""

        def noted(data: Any) -> Any:
            return self.logs.note(kind, function(data))

        outputs = self._backend.run(self._step_on(shares, noted), shares.counts, self._model.metrics_variables)
        if not isinstance(outputs[-1], dict):
            return outputs[-1]
        # The last replica's metrics include the other shares.
        return {
            name: last if self.logs.is_known(kind, name) else _combined([logs[name] for logs in outputs], shares.counts)
            for name, last in outputs[-1].items()
        }

    def _step_on(self, shares: Shares, function: Callable[..., Any]) -> Callable[[int], Any]:
        """Returns the step of a replica, by its index in this process."""
        of_rank, first = self._step, self._backend.topology.rank * self._backend.replicas
        assert of_rank is not None

        def run(index: int) -> Any:
            share = shares.parts[index]
            step = Step.of(share, first + index)
            step.whole, step.own = of_rank.whole, of_rank.own
            if index == 0:
                step.applied, step.stopwatch = of_rank.applied, of_rank.stopwatch
            with on_share(self._backend, step, share.data, self.exact) as data:
                return function(data)

        return run

    def whole(self, batch: Any) -> Any:
        return batch_of_all_ranks(self._backend, batch.parts) if isinstance(batch, Shares) else as_tensors(batch)

    def _unknown_logs(self, function: Callable[..., Any], outputs: Any) -> Any:
        """Returns logs of the step on shares as averages over the ranks."""
        logs, step = super()._unknown_logs(function, outputs), self._step
        if self._applied is None or step is None or not isinstance(logs, dict) or self._kind_of(function) is None:
            return logs
        names = sorted(name for name, log in logs.items() if tf.is_tensor(log) and log.dtype.is_floating)
        weighted = step.weigh([logs[name] for name in names])
        sums = [self._backend.all_reduce_exact(own, step.next_name("logs")) for own in weighted]
        return {**logs, **dict(zip(names, sums, strict=True))}

    def state_of_all(self, variable: Any) -> Any:
        own = super().state_of_all(variable)
        if variable.aggregation != "sum" or self._step is None:
            return own
        total = self._backend.all_reduce_exact(tf.cast(own, tf.float64), self._step.next_name("state"))
        return tf.cast(total, own.dtype)

    def _shares_of(self, batch: Any) -> Shares:
        """Cuts a whole batch, which `train_on_batch` and similar methods pass without a dataset."""
        if isinstance(batch, Shares):
            return batch
        topology = self._backend.topology
        return take_shares(as_tensors(batch), self._backend.replicas, topology.rank, topology.size)

    def _run_and_keep_state(self, function: Callable[[], Any], share: Share, step: Step) -> Any:
        """Runs a step. If the share is empty, it does not change metrics, and its placeholder no statistics."""
        if self._backend.topology.size == 1:  # what its replicas assign is combined where they meet
            return function()
        if not may_be_empty(share):
            with combined_assignments(self._backend, self._model, step):
                return function()
        metrics = [(variable, tf.identity(variable.value)) for variable in self._model.metrics_variables]
        statistics = [(v, tf.identity(v.value)) for v in keras_layers.statistics_of_a_share(self._model, self.exact)]
        with combined_assignments(self._backend, self._model, step):
            outputs = function()
        is_empty = share.count == 0
        restored = [_restore_if(is_empty, step, metrics), _restore_if(is_empty & ~share.is_whole, step, statistics)]
        with tf.control_dependencies([operation for operation in restored if operation is not None]):
            return tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, outputs)


def _combined(leaves: Sequence[Any], counts: Sequence[Any]) -> Any:
    """Returns the mean of the replicas' floats. Otherwise the last value: that replica has seen the other shares."""
    is_float = tf.is_tensor(leaves[-1]) and leaves[-1].dtype.is_floating
    return mean_of_shares(leaves, counts) if is_float else leaves[-1]


def _restore_if(condition: Any, step: Step, before: Sequence[tuple[Any, Any]]) -> Any:
    """Assigns to variables what they had before the step, unless they were assigned what the whole batch gives."""
    values = [(variable, value) for variable, value in before if id(variable) not in step.whole]
    if not values:
        return None
    return tf.cond(
        condition, lambda: tf.group(*[variable.value.assign(value) for variable, value in values]), lambda: tf.group()
    )


class LocalTraining(Backend):
    """A backend on which `fit` runs Keras's own steps in this process, on this process's shares."""

    def distribute(self, target: keras.Model | keras.optimizers.Optimizer, options: Options) -> None:
        if self.num_replicas == 1:
            if isinstance(target, keras.Model):  # its `fit` can commit and resume, and put steps together
                _backends[target] = self
                if not hasattr(target, _TUNING) and (tuning := options.tuning(target, self)) is not None:
                    attach(target, _TUNING, tuning)
                keras_fit.wrap_fit(_fit)
        elif isinstance(target, keras.Model):
            ReplicaModel(target, self, options).attach()
        else:
            options.scale(target, self.num_replicas)
            distribute_optimizer(target, self)

    @functools.cached_property
    def loop(self) -> Loop:
        return Loop() if self.num_replicas == 1 else ReplicaLoop(self)
