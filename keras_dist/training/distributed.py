"""The object that distributes a model: its methods run where the script calls the model's.

They are set as attributes of the model object, so its class, configuration and files stay those of a plain model. Keras
takes the same object for the model's `tf.distribute.Strategy`, with which it distributes each dataset and runs each
step: below an overridden `fit`, and above an overridden `train_step`, which gets its data in the usual form. An engine
subclasses it and overrides what it does differently.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.callbacks import ChiefOnly, LearningRateWarmup, Timing
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_layers, keras_model, keras_random, tf_compat
from keras_dist.compat.keras_model import attach, attached
from keras_dist.data.shares import Shares
from keras_dist.data.sources import explain_cache
from keras_dist.errors import DistributionError, NotSupportedError
from keras_dist.logging import logger
from keras_dist.state.checkpoint import write_model, write_on_chief
from keras_dist.state.weights import Loss
from keras_dist.step import losses
from keras_dist.step import step as step_module
from keras_dist.step.metrics import Logs, as_number, flat, tensor_of
from keras_dist.step.optimizer import build_at_once, optimizers_of, parts_of, variables_of
from keras_dist.step.step import Stopwatch, explain_check
from keras_dist.step.whole_batch import compiled_layers, explain_compilation
from keras_dist.training import refusals
from keras_dist.training.call import Call, batches_of
from keras_dist.training.interrupts import interrupts_of
from keras_dist.training.options import Options
from keras_dist.training.refusals import ATTACHED, DISTRIBUTED
from keras_dist.training.resuming import FitExtensions
from keras_dist.training.synchronizer import as_list, is_writer, on_chief, sees_batches, with_synchronizers
from keras_dist.training.trial import FirstRows, is_in_step, without_graph
from keras_dist.training.verification import CALLS, Verification, Verified, suspects_in

# Calls that all ranks make together.
_TOGETHER = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_running: list[str] = []  # the ones that run now
_thread = threading.local()  # `is_of_script` is true where models are distributed and trained


class DistributedModel(Verified):
    """Distributes one model: what is the same on all engines."""

    num_replicas_in_sync = 1  # `run` returns one value for all replicas

    def __init__(self, model: keras.Model, backend: Backend, options: Options) -> None:
        self.options = options
        self._model = model
        self._backend = backend
        self._kind = "train"  # of the steps that run: "train" or "test"
        self._is_watched = False  # True while a callback gets the logs of batches
        self._arranged: list[Any] = []  # the callbacks of the call that runs
        self._is_checked: set[str] = set()  # kinds of steps
        self._failed_step: Exception | None = None
        self._drawn: dict[str, list[Any]] = {}  # by kind of step: the state of a seed generator for each draw
        self._found: list[Any] = []  # optimizers that a step applies and that are not attributes of the model
        self.exact = options.exact
        self.interrupts = interrupts_of(backend)
        self._called_alone: list[str] | None = None  # the methods that are called in `local`
        self.first_rows: dict[str, FirstRows] = {}  # of the kinds of steps that will be checked
        self.stopwatch: Stopwatch | None = None
        self.loss_of_rank: Loss | None = None  # of the last epoch, before that of all ranks was known
        self.given: Any = None  # the dataset that Keras has passed last
        self._groups_next = False
        self._to_read: int | None = None  # batches of the next dataset, if Keras is told how many
        self.extended = keras_fit.StrategyExtension()
        self.logs = Logs(model, backend.topology.is_chief)
        self._fitting = FitExtensions(model, backend, self._optimizers, options.tuning(model, backend))
        kinds = CALLS.items() if options.verifies_on(backend) else ()
        # Of the kinds of steps that are still verified.
        self.verifications = {kind: Verification(backend, self, call, model) for kind, call in kinds}

    def attach(self) -> None:
        """Sets the wrappers, and distributes the optimizers of a compiled model. Later calls only check options."""
        _thread.is_of_script = True
        existing: DistributedModel | None = getattr(self._model, ATTACHED, None)
        if existing is not None:
            existing.options.check_again(self.options)
            return
        self._check_strategy()
        refusals.check_model(self._model)
        self._backend.check_variables(self._model.variables)
        attach(self._model, ATTACHED, self)
        DISTRIBUTED.add(self._model)
        attach(self._model, keras_fit.STRATEGY, self)
        keras_fit.set_functions(self._model, {})
        methods: dict[str, Callable[[Call], Any]] = {  # what is called instead
            "compile": self._compile,
            "fit": self._fit,
            "evaluate": self._without_training,
            "predict": self._without_training,
            "train_on_batch": self._on_batch,
            "test_on_batch": self._on_batch,
            "predict_on_batch": self._predict_on_batch,
            "save": self._save,
            "save_weights": self._save,
            "export": self._save,
            "compute_loss": self._compute_loss,
            "make_train_function": functools.partial(self._make_function, "train"),
            "make_test_function": functools.partial(self._make_function, "test"),
            "make_predict_function": self._make_predict_function,
            keras_fit.SYMBOLIC_BUILD: self._symbolic_build,
            keras_fit.METRICS_RESULT: self._metrics_result,
        }
        for name, method in methods.items():
            attach(self._model, name, self._wrapped(name, method))
        self._prepare_optimizers()

    def _wrapped(self, name: str, method: Callable[[Call], Any]) -> Callable[..., Any]:
        plain = getattr(self._model, name)

        @functools.wraps(plain)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = Call(name, plain, args, kwargs)
            try:
                if self._called_alone is not None:  # by a callback that runs on the chief only
                    self._called_alone.append(name)
                    if name in ("save", "save_weights"):
                        return write_model(call.function, name, call.args, call.kwargs)
                    with keras_fit.without_functions(self._model) if name in _TOGETHER else contextlib.nullcontext():
                        return call()
                if name in _TOGETHER and self._backend.topology.size > 1:
                    self._check_thread(name)
                return method(call)
            except DistributionError as error:
                raise refusals.in_few_lines(error)  # noqa: B904 - it is the same one

        return wrapper

    def _check_thread(self, name: str) -> None:
        """Refuses a call by a thread that reads data: other ranks don't make it, or make it at another time.

        Such threads, of TensorFlow and Keras, are daemons. They may still read ahead after the call that needs the data
        has ended.
        """
        thread = threading.current_thread()
        if getattr(_thread, "is_of_script", thread is threading.main_thread()) or not (_running or thread.daemon):
            return
        beside = f", beside {', '.join(_running)}()" if _running else ""
        raise NotSupportedError(
            "All ranks must make this call together, and this thread runs on its own: a generator or a PyDataset that "
            "calls a distributed model, for instance.",
            f"{name}() of {self._model.name!r} in the thread {thread.name!r}{beside}",
            "Call the model itself, model(x, training=False), which computes on this rank alone. Or compute what the "
            "data need before `fit`.",
        )

    def _check_strategy(self) -> None:
        variables = [*self._model.variables]
        for optimizer in optimizers_of(self._model):
            refusals.check_optimizer(optimizer)
            variables += variables_of(optimizer)
        if getattr(self._model, "compiled", False):  # before, `metrics` of a model with its own `compile` may not exist
            variables += self._model.metrics_variables
        refusals.check_strategy(self._backend.strategy, variables)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Translates errors of collectives into errors that name rank and cause."""
        try:
            yield
        except Exception as error:
            explained = self._explain(self._found_by_verification(error))
            if explained is error:
                if error is self._failed_step:
                    error.add_note(f"keras_dist: {self._describe_share()}")
                raise
            raise explained from error

    def _found_by_verification(self, error: Exception) -> Exception:
        """Returns, once, what verification has found if that caused an error of TensorFlow; otherwise the error."""
        found = [verification.error for verification in self.verifications.values() if verification.error is not None]
        for verification in self.verifications.values():
            verification.error = None
        return found[0] if found and isinstance(error, tf.errors.OpError) else error

    def _compile(self, call: Call) -> None:
        self._is_checked.clear()
        with attached(self._model, keras_fit.STRATEGY, None):  # with one, jit_compile="auto" turns XLA off
            call()
        how = "compiles the layers" if keras_layers.is_compiled(self._model) else "is off"
        logger().debug("jit_compile=%r: XLA %s", call.get("jit_compile"), how)
        self._prepare_optimizers()

    def _prepare_optimizers(self) -> list[Any]:
        for optimizer in (optimizers := self._optimizers()):
            self.options.scale(optimizer, self._backend.num_replicas)
            self._prepare_optimizer(optimizer)
        return optimizers

    def _optimizers(self) -> list[Any]:
        of_model = optimizers_of(self._model)
        return [*of_model, *(found for found in self._found if not any(found is known for known in of_model))]

    def prepare_found(self, optimizer: Any) -> None:
        """Prepares an optimizer where a step calls its `apply`, if it was not prepared before."""
        if any(optimizer is known for known in self._optimizers()):
            return
        logger().debug("optimizer %s was found in the step", optimizer.name)
        self._found.append(optimizer)
        with tf.init_scope(), keras_model.outside_stateless_scope():
            self.options.scale(optimizer, self._backend.num_replicas)
            self._prepare_optimizer(optimizer)

    # --- fit, evaluate, predict ---

    def _fit(self, call: Call) -> Any:
        optimizers = self._prepare_optimizers()
        is_train = attached(self, "_kind", "train")
        with self.interrupts.deferred(), self._running(call), is_train, self._fitting.fit():
            callbacks = self._on_this_rank(call.get("callbacks"), optimizers)
            arranged = with_synchronizers(callbacks, self._backend, optimizers, self.stopwatch)
            self._arranged = self._fitting.arrange(call, arranged)
            self._quieten(call)
            return call()

    def _without_training(self, call: Call) -> Any:
        with attached(self, "_kind", "test"):
            if call.kwargs.get(keras_fit.EVALUATE_IN_FIT):  # called by `fit`, which is already wrapped
                return call()
            with self.interrupts.deferred(), self._running(call):
                self._arranged = self._on_this_rank(call.get("callbacks"))
                call.set("callbacks", self._arranged)
                self._quieten(call)
                results = call()
        if call.name == "predict":
            self._end_verification("predict")
        return results

    def _on_batch(self, call: Call) -> Any:
        return_dict = call.get("return_dict")
        call.set("return_dict", True)
        kind = "train" if call.name == "train_on_batch" else "test"
        with self._running(call), attached(self, "_kind", kind):
            in_order = call()  # that of the traced step; the metrics have another one
            logs = dict.fromkeys(in_order) | getattr(self._model, keras_fit.METRICS_RESULT)(in_order)
        logs = keras.tree.map_structure(as_number, logs)
        return logs if return_dict else keras_model.flatten_metrics(self._model, logs)

    def _predict_on_batch(self, call: Call) -> Any:
        with self._running(call):
            return call()

    @contextlib.contextmanager
    def _running(self, call: Call) -> Iterator[None]:
        """The context of each of these calls. Engines extend it."""
        self._check_strategy()
        for source in ("x", "validation_data"):
            refusals.refuse_bare_function(call.get(source))
        grows = call.name == "fit" and self.options.batch == "per_replica" and self._backend.num_replicas > 1
        is_watched = sees_batches(call.get("callbacks"))
        _thread.is_of_script = True
        _running.append(call.name)
        try:
            with (
                attached(self, "_is_watched", is_watched),
                self._explained(),
                attached(self, "_groups_next", grows),  # the training data are the next dataset
                attached(self, "_to_read", batches_of(self._model, call)),
                keras_fit.arranged_callbacks(self._model, self._with_late),
            ):
                yield
        finally:
            _running.remove(call.name)

    def _with_late(self, callbacks: list[Any]) -> list[Any]:
        """Prepares callbacks that are added below this wrapper. They may see batches; they can't stop ranks there."""
        known = {id(callback) for callback in self._arranged}
        late = [callback for callback in callbacks if id(callback) not in known]
        self._is_watched |= sees_batches(late)
        prepared = dict(zip(map(id, late), self._on_this_rank(late), strict=True))
        return [prepared.get(id(callback), callback) for callback in callbacks]

    def _on_this_rank(self, callbacks: Any, optimizers: Sequence[Any] = ()) -> list[Any]:
        """Returns the callbacks of a call; those that write files act on the chief only."""
        prepared = list(map(on_chief, as_list(callbacks)))
        for callback in prepared:
            if isinstance(callback, ChiefOnly):
                callback.local, callback.is_active = self.local, self._backend.topology.is_chief
                callback.optimizers = () if is_writer(callback.callback) else optimizers
            elif isinstance(callback, LearningRateWarmup):
                callback.size = self._backend.num_replicas
            elif isinstance(callback, Timing):
                if self.stopwatch is None:
                    self.stopwatch = Stopwatch()
                    keras_fit.set_functions(self._model, {})  # the traced ones do not measure
                callback.backend, callback.stopwatch = self._backend, self.stopwatch
                callback.loss_of_rank = (lambda: self.loss_of_rank) if self._backend.topology.size > 1 else None
        return prepared

    def _quieten(self, call: Call) -> None:
        if not self._backend.topology.is_chief:
            call.set("verbose", 0)

    # --- What Keras calls inside fit, evaluate and predict ---

    def _compute_loss(self, call: Call) -> Any:
        if not keras_fit.is_overridden(self._model, "compute_loss"):
            return losses.of_each_example(step_module.current(), call())
        function, counted = tf_compat.converted(call.function), self._model.metrics_variables
        return losses.of_own_function(self._backend, counted, function, (call.args, call.kwargs))

    def _symbolic_build(self, call: Call) -> None:
        raise NotImplementedError

    # --- The strategy that Keras uses ---

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Does nothing: variables are ordinary ones."""
        return contextlib.nullcontext()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        """Runs one step of Keras and returns its result for the global batch."""
        (batch,) = args
        if self.is_local:
            return function(batch)
        kind = self._kind_of(function) or "predict"
        if (rows := self.first_rows.get(kind)) is not None:
            rows.keep(self._shares_of(batch).parts)
        if (verification := self.verifications.get(kind)) is None:
            return self._run(function, batch)
        step = functools.partial(self._run, function, batch)
        return verification.run(function, batch, self._total_of(batch), step)

    def _kind_of(self, function: Callable[..., Any]) -> str | None:
        """Returns `"train"` or `"test"` if a function is the model's step of that kind, `None` for `predict`."""
        steps = {"train": self._model.train_step, "test": self._model.test_step}
        return next((kind for kind, step in steps.items() if function == step), None)

    def _run(self, function: Callable[..., Any], batch: Any) -> Any:
        raise NotImplementedError

    def _shares_of(self, batch: Any) -> Shares:
        """Returns the shares of the replicas in this process."""
        raise NotImplementedError

    def _total_of(self, batch: Any) -> Any:
        return self._shares_of(batch).parts[0].total

    # --- The check that is on by default ---

    def _with_check(self, kind: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function of steps that compares some of them, on a few rows, if they run the script's own code."""

        def checked(iterator: Any) -> Any:
            if self.is_local or (rows := self.first_rows.get(kind)) is None:
                return function(iterator)
            rows.begin_step()
            outputs = function(iterator)
            if rows.is_due:
                rows.is_due = False
                self._check_own_code(kind, rows)
                if rows.is_last:
                    self.first_rows.pop(kind, None)
            return outputs

        # What a prediction calls has been compared by `fit` or `evaluate`, unless it has a step of its own.
        known = {kind} if kind != "predict" or keras_fit.is_overridden(self._model, "predict_step") else {*CALLS}
        if self.options.checks_own_code(self._backend) and not known & self._is_checked:
            self._is_checked.add(kind)
            if is_in_step(self._model, kind):
                self.first_rows[kind] = FirstRows(self._backend)
        return checked

    def _noted(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function of steps on shares. `_explained` adds to its errors that a step saw a share."""

        def noted(iterator: Any) -> Any:
            self._build_optimizer()
            try:
                return function(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                self._count_end_of_data(iterator)
                raise
            except Exception as error:
                self._failed_step = error
                raise

        return function if self._backend.num_replicas == 1 else noted

    def _build_optimizer(self) -> None:
        """Builds the optimizer of a step of Keras's own before the trace.

        Ranks would build it in the trace, and trace once too. Replicas of one process would mirror its variables there,
        and trace again.
        """
        optimizer = getattr(self._model, "optimizer", None)
        if self._kind != "train" or not isinstance(optimizer, keras.Optimizer) or optimizer.built:
            return
        weights = self._model.trainable_variables if keras_model.is_built(self._model) else []
        if weights and not keras_fit.is_overridden(self._model, "train_step"):
            build_at_once(optimizer, weights)

    def noting_draws(self, kind: str | None) -> contextlib.AbstractContextManager[None]:
        """Notes the seed generators from which the first replica of this process draws, as a step is traced here."""
        if self._applied is not None or kind is None or tf.executing_eagerly():
            return contextlib.nullcontext()
        drawn, first = self._drawn.setdefault(kind, []), self._backend.topology.rank * self._backend.replicas
        drawn.clear()

        def note(state: Any) -> None:
            step = step_module.current()
            if step is not None and (tf.is_tensor(step.replica) or step.replica == first):
                drawn.append(state)

        return keras_random.observed(note)

    def _count_end_of_data(self, iterator: Any) -> None:
        """Does once what a step does without data when data of unknown length have ended, as TensorFlow does.

        A step that XLA compiles does not begin without data, nor does an eager step, or one of several in an execution.
        """
        model, is_compiled = self._model, keras_layers.is_compiled(self._model)
        if model.run_eagerly or model.steps_per_execution > 1 or is_compiled:
            return
        for state in self._drawn.get(self._kind, ()):
            keras_random.skip(state)
        for optimizer in self._optimizers() if self._kind == "train" else ():
            if optimizer.built and len([*parts_of(optimizer)]) == 1:  # others count if their gradients are finite
                keras_model.update_without_gradients(optimizer)

    def _check_own_code(self, kind: str, rows: FirstRows) -> None:
        if self.exact:
            refusals.check_draws(suspects_in(rows.graph).random)
        with self._backend.in_call(f"the check of {kind}ing steps"):
            if (batch := rows.batch()) is None:
                return
            step = getattr(self._model, f"{kind}_step")
            verification = Verification(self._backend, self, CALLS[kind], self._model)
            which = "a step in the second epoch" if rows.is_last else "step 1"
            with without_graph(self._model, self._optimizers()), attached(self.logs, "is_frozen", True):
                trial = rows.trial(self._model, self._optimizers(), self.counters)
                is_compared = verification.check(step, batch, trial, rows.graph, which)
        rows.is_last |= kind == "predict" or not is_compared  # predictions know no epochs

    def _save(self, call: Call) -> Any:
        path = call.get("filepath")
        shown = f"{os.fspath(path)!r}" if isinstance(path, str | os.PathLike) else "..."
        text = f"model.{call.name}({shown})"

        def write() -> Any:
            with self._writing(call):
                return write_model(call.function, call.name, call.args, call.kwargs)

        with self._explained():
            self._synchronize(text)
            return write_on_chief(self._backend, text, write)

    # --- What a verification asks for, see `verification.Verified` ---

    def distributed(self, function: Callable[..., Any], batch: Any, applied: list[Any]) -> Any:
        with self._trying_out(applied):
            return self._unknown_logs(function, self._run(function, batch))

    def plain(self, function: Callable[..., Any], whole: Any) -> Any:
        with compiled_layers(self._model, self._backend.topology.is_chief):
            return self._unknown_logs(function, function(whole))

    def _unknown_logs(self, function: Callable[..., Any], outputs: Any) -> Any:
        """Returns the logs of a step that don't come from metrics; predictions as they are."""
        kind = self._kind_of(function)
        if kind is None or not isinstance(outputs, dict):
            return outputs if kind is None else {}
        return {name: log for name, log in flat(outputs).items() if not self.logs.is_known(kind, name)}

    # --- What engines do differently ---

    @property
    def counters(self) -> list[tf.Variable]:
        """Returns the variables that a step assigns besides those of the model and its optimizers."""
        return []

    @property
    def is_local(self) -> bool:
        """True in the context of `local`."""
        return self._called_alone is not None

    @contextlib.contextmanager
    def local(self) -> Iterator[list[str]]:
        """In this context the model is an ordinary one in this process. The other ranks take no part.

        Its value lists the methods of the model that are called in it.
        """
        called = list[str]()
        with attached(self, "_called_alone", called), step_module.entered(None):
            yield called

    def _describe_share(self) -> str:
        size = self._backend.num_replicas
        return f"a step sees the share of its replica only, about n / {size} of the n rows of a batch."

    def _explain(self, error: BaseException) -> BaseException:
        return self._backend.translate(explain_cache(explain_check(explain_compilation(error))))

    def _prepare_optimizer(self, optimizer: Any) -> None:
        """Makes an optimizer reduce its gradients over the replicas. A second call does nothing."""
        raise NotImplementedError

    def _synchronize(self, call: str) -> None:
        """Compares the weights of all replicas, and averages their statistics."""

    def _writing(self, call: Call) -> Any:
        return self.local()

    def _make_function(self, kind: str, call: Call) -> None:
        raise NotImplementedError

    def _make_predict_function(self, call: Call) -> None:
        self._made("predict_function", call)

    def _collect_logs(self, call: Call) -> None:
        """Changes the logs at the end of an epoch or evaluation, and what metrics have counted, to those of all."""

    def _refuse_own_function(self, name: str) -> None:
        if keras_fit.is_overridden(self._model, f"make_{name}"):
            raise refusals.own_function(self._model, name)

    def _is_kept(self, name: str, call: Call) -> bool:
        """True if Keras keeps an existing function, False if it makes one now."""
        return getattr(self._model, name) is not None and not call.get("force")

    def _made(self, name: str, call: Call) -> Callable[..., Any] | None:
        """Returns the function that Keras makes now, `None` if it keeps the existing one."""
        if self._is_kept(name, call):
            return None
        with attached(self._model, keras_fit.JIT_COMPILE, False):  # XLA compiles layers, not steps
            call()
        function: Callable[..., Any] = getattr(self._model, name)
        return function

    def _logs_for_callbacks(self, kind: str, logs: Any) -> Any:
        return self._logs_of_all(kind, logs) if self._is_watched and isinstance(logs, dict) else logs

    def _logs_of_all(self, kind: str, logs: dict[str, Any]) -> dict[str, Any]:
        return self.logs.exact(kind, logs)

    def _metrics_result(self, call: Call) -> Any:
        self._collect_logs(call)
        call.change("logs", functools.partial(self.logs.exact, self._kind))
        result = keras.tree.map_structure(tensor_of, call())
        if (rows := self.first_rows.get(self._kind)) is not None:
            rows.end_epoch()
        self._end_verification(self._kind)
        return result

    def _end_verification(self, kind: str) -> None:
        """After the first epoch, evaluation or prediction, steps run as if they had never been verified."""
        if (verification := self.verifications.get(kind)) is not None and verification.steps:
            verification.report()
            del self.verifications[kind]
            getattr(self._model, f"make_{kind}_function")(force=True)
