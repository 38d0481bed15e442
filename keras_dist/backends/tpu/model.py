"""A model whose variables belong to TPUStrategy, which runs its steps on shares of one shape."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.backends.tpu import step
from keras_dist.backends.tpu.step import Even, Filled
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, keras_random, keras_strategy, tf_compat
from keras_dist.compat.keras_losses import like
from keras_dist.compat.keras_model import attach, attached
from keras_dist.data.shares import row_count
from keras_dist.errors import DistributionError, NotSupportedError
from keras_dist.logging import logger, warn_once
from keras_dist.state.weights import not_additive
from keras_dist.step import step as step_module
from keras_dist.step.gathering import whole_draws
from keras_dist.step.optimizer import build_optimizer, distribute_optimizer, parts_of
from keras_dist.training import options
from keras_dist.training.call import Call
from keras_dist.training.distributed import DistributedModel
from keras_dist.training.options import Executions, Options
from keras_dist.training.trial import as_tensors


class TPUModel(DistributedModel):
    """A model whose steps run on the replicas of TPUStrategy."""

    def __init__(self, model: keras.Model, backend: Backend, options: Options) -> None:
        super().__init__(model, backend, options)
        self._strategy = backend.strategy
        self._parts: Callable[[Any], Any] = backend.strategy.experimental_local_results
        self._replicas = backend.num_replicas
        self._kinds: Iterator[str] = iter(())  # of the steps on the datasets of a call, in their order
        self._asked_for: Any = None
        self._length: int | None = None  # of the shares of the step that is traced
        self._why_not_filled: str | None = None
        self._executions = Executions(model)
        if keras.config.dtype_policy().name == "float32":
            warn_once(
                "the model computes in float32. mixed_bfloat16 is faster on a TPU and takes less memory; its numbers "
                "differ in the third digit. Call keras.mixed_precision.set_global_policy('mixed_bfloat16') before the "
                "model is created."
            )

    def _compile(self, call: Call) -> None:
        with self.scope():
            call()
        self._executions.compiled("steps_per_execution" in call.given())
        self._turn_jit_off()
        self._prepare_optimizers()

    def attach(self) -> None:
        if getattr(self._model, "compiled", False):
            self._turn_jit_off()
        super().attach()

    def _turn_jit_off(self) -> None:
        if self._model.jit_compile is True:
            logger().warning("jit_compile=True is off on a TPU: TPUStrategy compiles the whole step.")
        self._model.jit_compile = False

    def _prepare_optimizer(self, optimizer: Any) -> None:
        prepare_optimizer(optimizer, self._backend)

    # --- fit, evaluate, predict ---

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        if self._model.run_eagerly and call.name != "predict_on_batch":
            raise NotSupportedError(
                "A TPU runs whole steps, which must be traced.",
                "run_eagerly=True",
                "Leave it out. To debug a step, run it without a TPU: kd.init('serial').",
            )
        with super()._running(call), self.scope(), contextlib.ExitStack() as stack:
            if call.name in ("evaluate", "predict"):
                stack.enter_context(self._executions.of(self._executions.asked))
            if call.name in ("fit", "evaluate", "predict"):
                stack.enter_context(self._preparing(call, stack))
            yield

    def _make_function(self, kind: str, call: Call) -> None:
        name = f"{kind}_function"
        self._refuse_own_function(name)
        if not self._is_kept(name, call):
            function = self._for_each_length(name, call)
            attach(self._model, name, lambda iterator: self._logs_for_callbacks(kind, function(iterator)))

    def _make_predict_function(self, call: Call) -> None:
        if not self._is_kept("predict_function", call):
            attach(self._model, "predict_function", self._for_each_length("predict_function", call))

    def _for_each_length(self, name: str, call: Call) -> Callable[..., Any]:
        """Returns a function that Keras makes anew for each length of shares: its own is traced for any length."""
        made: dict[int | None, Any] = {}

        def function(data: Any) -> Any:
            self._length = step.static_size(data)
            if self._length not in made:
                with attached(self._model, name, None):
                    made[self._length] = self._made(name, call)
            return made[self._length](data)

        return function

    def _compute_loss(self, call: Call) -> Any:
        loss = super()._compute_loss(call)
        if tf.is_tensor(loss) and loss.shape.rank:
            step.refuse_filler_rows("a loss with reduction='none'")
        return loss

    def _symbolic_build(self, call: Call) -> None:
        """Builds for `train_on_batch` and `test_on_batch`. For a dataset `_preparing` has done so."""
        if (batch := call.get("data_batch")) is not None:
            specs = tf.nest.map_structure(
                lambda leaf: None if leaf is None else tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)), batch
            )
            self._build(specs, True)
        if (iterator := call.get("iterator")) is not None:
            self._fitting.watch(iterator, self.given, None)

    # --- The strategy that Keras uses ---

    def local(self) -> Any:
        """Changes nothing: no model belongs to this process alone, as the variables are on the TPU."""
        return contextlib.nullcontext()

    def scope(self) -> Any:
        return self._strategy.scope()

    # --- Data ---

    @contextlib.contextmanager
    def _preparing(self, call: Call, stack: contextlib.ExitStack) -> Iterator[None]:
        """Cuts each dataset that Keras iterates over into shares, in this context."""
        first, others = ["train"] if call.name == "fit" else [], "predict" if call.name == "predict" else "test"
        may_choose = self._executions.may_choose and not options.act_between_batches(call.get("callbacks"))

        def prepare(epoch_iterator: Any) -> None:
            # A callback may evaluate this model or train another one, so several contexts may be entered.
            if keras_fit.distributed_dataset(epoch_iterator) is not self._asked_for:
                return
            self._asked_for, kind = None, next(self._kinds)
            grows = self._groups_next and kind == "train"
            if grows:
                step.make_fewer_steps(epoch_iterator, self._replicas)
            if kind == "train" and may_choose:  # by now the number of steps of an epoch is known
                exactly = (epoch_iterator.steps_per_epoch, call.get("validation_steps"))
                number = options.number_of(epoch_iterator.data_adapter.num_batches, exactly)
                epoch_iterator.steps_per_execution = number
                stack.enter_context(self._executions.of(number))
                if number > 1:
                    text = "%d steps in one execution: no callback acts between batches."
                    warn_once(f"{text} compile(steps_per_execution=1) turns it off.", number)
            self._prepare(epoch_iterator, kind, self._replicas if grows else 1)

        kinds = itertools.chain(first, itertools.repeat(others))
        with attached(self, "_kinds", kinds), keras_fit.epoch_iterators(prepare):
            try:
                yield
            except tf.errors.InvalidArgumentError as error:
                step.refuse(error, self._why_not_filled)
                raise

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset) -> Any:
        """Returns the dataset unchanged. `_prepare` follows and has more of what Keras knows about it."""
        self.given = self._asked_for = dataset
        return dataset

    def _prepare(self, epoch_iterator: Any, kind: str, together: int) -> None:
        dataset, adapter = keras_fit.distributed_dataset(epoch_iterator), epoch_iterator.data_adapter
        step.check_shapes(dataset)
        told, are_full = step.batch_size_of(dataset)
        size = told or keras_strategy.batch_size_of(adapter)
        if size is None:
            raise step.unknown_size(dataset)
        if are_full is None:
            are_full = keras_strategy.batches_are_full(adapter)
        if together > 1:
            size, are_full = size * together, None
            dataset = dataset.rebatch(size)
        self._build(dataset.element_spec, kind == "train")
        replicas, self._why_not_filled = self._replicas, None
        is_filled = False
        if size % replicas or not are_full:
            reason = step.why_not_filled(self._model, kind)
            is_filled = reason is None
            if reason and (size % replicas or (are_full is False and epoch_iterator.steps_per_epoch is None)):
                raise step.not_filled(reason)
            self._why_not_filled = reason  # a smaller batch is refused when it comes
        batches = step.checked(dataset, size, replicas if is_filled else None)

        def of_host(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return step.shares(batches, replicas, context.input_pipeline_id, context.num_input_pipelines)

        keras_fit.set_dataset(epoch_iterator, self._strategy.distribute_datasets_from_function(of_host))

    def _build(self, specs: Any, trains: bool) -> None:
        """Creates the variables of a step before it is traced: it can't create any. The optimizer's too if `trains`."""
        with self._strategy.scope():
            if not keras_model.is_built(self._model):
                try:
                    keras_model.build(self._model, specs)
                except DistributionError:
                    raise
                except Exception as error:
                    raise NotSupportedError(
                        "On a TPU weights are made before the first step: the model is called with a batch, and fails.",
                        " ".join(str(error).split()),
                        "Build all parts of the model before `fit`: call each once with what it takes.",
                    ) from error
            optimizer = getattr(self._model, "optimizer", None)
            if trains and optimizer is not None and not optimizer.built:
                build_optimizer(optimizer, self._model.trainable_variables)
        if self._replicas == 1:
            return
        sums = [variable.path for variable in self._model.variables if variable.aggregation == "sum"]
        if sums:
            raise NotSupportedError(
                "A variable of a layer that is summed over TPU cores is not supported: TensorFlow would sum its old "
                "value too.",
                f"aggregation='sum' of {', '.join(sums)}",
                "Count in a metric, such as keras.metrics.Sum.",
            )
        for variable in self._model.metrics_variables:
            if variable.aggregation == "none":
                raise not_additive(variable.aggregation, variable.path)

    # --- Steps ---

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        (batch,) = args
        cut = batch if isinstance(batch, Even | Filled) else step.split(as_tensors(batch), self._replicas)
        return super().run(function, (cut,))

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        kind, is_filled = self._kind_of(function), isinstance(batch, Filled)
        counts = kind is not None and (is_filled or self._replicas > 1)
        traced: list[Any] = []  # by the last core; on all of them it is the same

        def replica(share: Any) -> Any:
            # Copies: a step's own graph shows what depends on them, see `whole_batch.py`.
            share = tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, share)
            if kind is not None and counts:
                outputs, applied = self._run_counted(function, share, kind)
                traced[:] = applied or []
            else:
                current = step.step_on(share, self._replicas) if kind is None else None
                with step_module.entered(current):
                    outputs = function(share.batch)
            return outputs, share.rows if is_filled else (), step.gradients_of(traced)

        batch = tf.nest.map_structure(self._with_length, batch)
        with contextlib.ExitStack() as stack:
            if counts:
                counting = step.counting(self._backend, self._model, self.prepare_found, is_filled, self.exact)
                stack.enter_context(counting)
                stack.enter_context(self.logs.recording())
            else:
                others = keras_random.replica_streams(step.current_replica)
                stack.enter_context(whole_draws(self._backend) if self.exact else others)
                stack.enter_context(keras_model.found_optimizers(self.prepare_found))
            outputs, rows, gradients = self._strategy.run(replica, args=(batch,))
        if self._applied is not None:
            self._applied += step.with_gradients(traced, gradients, self._strategy)
        if kind is not None:
            return tf.nest.map_structure(lambda leaf: self._parts(leaf)[0], outputs)
        return self._together(outputs, rows if is_filled else None)

    def _run_counted(self, function: Callable[..., Any], share: Even | Filled, kind: str) -> tuple[Any, Any]:
        """Runs a step that counts real rows only, in the context of a replica. Also returns `Step.applied`."""
        backend, current = self._backend, step.step_on(share, self._replicas)
        current.applied = None if self._applied is None else []
        with step_module.entered(current):
            # What replicas collect in variables is averaged, such as BatchNormalization's moving averages.
            statistics = keras_model.float_statistics(self._model) if self._replicas > 1 and kind == "train" else []
            before = [(variable, tf.identity(variable.value)) for variable in statistics]
            data = share.batch
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            if weights is not None and isinstance(current, step.FilledStep):
                rows = current.rows  # the user's weights are 0 for filler rows
                data = x, y, tf.nest.map_structure(lambda weight: weight * like(rows, weight), weights)
            outputs = self.logs.note(kind, function(data))
            if self._replicas > 1 and isinstance(outputs, dict):
                # Of the numbers that only a custom step knows, the mean over the global batch.
                others = {name: leaf for name, leaf in outputs.items() if not self.logs.is_known(kind, name)}
                names = [name for name, leaf in others.items() if tf.is_tensor(leaf) and leaf.dtype.is_floating]
                for name, own in zip(names, current.weigh([others[name] for name in names]), strict=True):
                    others[name] = backend.all_reduce_exact(own, current.next_name("logs"))
                outputs = {**outputs, **others}
            changes = current.weigh([variable.value - old for variable, old in before]) if before else []
            for (variable, old), change in zip(before, changes, strict=True):
                # A variable that the step does not change keeps its value, bit for bit.
                variable.assign(old + backend.all_reduce_exact(change, current.next_name("changes")))
        counting = [f"the layer {name!r} adds a loss" for name in keras_strategy.layers_with_losses(self._model)]
        counting += [f"the variable {v.path!r} is a sum" for v in current.own.values() if v.aggregation == "sum"]
        if isinstance(current, step.FilledStep) and counting:
            raise step.not_filled(counting[0])
        return outputs, current.applied

    # --- Verification ---

    def _total_of(self, batch: Any) -> Any:
        if isinstance(batch, Filled):
            return self._parts(batch.totals)[0][0]
        first = tf.nest.flatten(batch.batch)[0]
        return tf.add_n([row_count(part) for part in self._parts(first)])

    def whole(self, batch: Any) -> Any:
        return self._together(batch.batch, batch.rows if isinstance(batch, Filled) else None)

    def plain(self, function: Callable[..., Any], whole: Any) -> Any:
        with tf_compat.strategy_hidden(), keras_strategy.updates_outside_of_replicas():
            return super().plain(function, whole)

    def _with_length(self, leaf: Any) -> Any:
        """Restores the length of shares, which a TPU needs and Keras's loop over several steps loses."""
        parts = self._parts(leaf)
        if leaf is None or None not in parts[0].shape:
            return leaf
        parts = [tf.ensure_shape(part, [self._length, *part.shape[1:]]) for part in parts]
        return parts[0] if tf.is_tensor(leaf) else tf_compat.per_replica(parts)

    def _together(self, outputs: Any, is_real: Any) -> Any:
        """Returns the rows of all shares. How many is known when the step runs, as it is in one process."""

        def of_all(leaf: Any) -> Any:
            if leaf is None:
                return None
            rows = tf.concat(self._parts(leaf), 0)
            rows = rows if is_real is None else tf.boolean_mask(rows, tf.concat(self._parts(is_real), 0) > 0)
            return tf.compat.v1.placeholder_with_default(rows, tf.TensorShape([None]).concatenate(rows.shape[1:]))

        return tf.nest.map_structure(of_all, outputs)


def prepare_optimizer(optimizer: Any, backend: Backend) -> None:
    """Makes an optimizer sum its gradients over the cores before anything else. Keras itself sums them later."""
    if backend.num_replicas > 1:
        distribute_optimizer(optimizer, backend)
    for part in parts_of(optimizer):
        keras_strategy.skip_gradient_reduction(part)
