"""The options of `kd.distribute`, and what `tune=True` chooses by the times of the first steps.

XLA makes some steps faster and others slower. Returning to Python after each step can take longer than the step itself,
so several steps are put into one execution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_dist import environment
from keras_dist.callbacks import Commit, defines
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model, keras_random
from keras_dist.compat.keras_model import attached, plain_apply
from keras_dist.data import sources
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.logging import announce, logger, warn_once
from keras_dist.step.optimizer import RULES, fused, is_large, scale
from keras_dist.training.synchronizer import as_list, needs_single_steps
from keras_dist.training.trial import is_in_step

_MOST = 32
PLAIN, UPDATE, ALL = WAYS = "as it is", "with its update compiled by XLA", "compiled by XLA"  # to make a step


def number_of(steps: int | None, exactly: Sequence[int | None] = ()) -> int:
    """Returns how many steps of an epoch to put into one execution: a divisor of `exactly`, as data may be endless."""
    common = math.gcd(*(number for number in exactly if number))
    limit = min(_MOST, steps or _MOST)
    divisors = [number for number in range(1, limit + 1) if (common or steps or 0) % number == 0]
    if common or (steps and divisors[-1] > limit // 2):
        return divisors[-1]
    return limit


class Executions:
    """Lets `fit` put several steps into one execution, if the script leaves their number to Keras."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._made: dict[tuple[int, str], dict[str, Any]] = {}
        self.compiled(False)

    def compiled(self, is_given: bool) -> None:
        """Notes that the model was compiled, and whether the script passed `steps_per_execution`."""
        self._made.clear()
        self.asked: int = getattr(self._model, "steps_per_execution", None) or 1
        self._is_open = not is_given and self.asked == 1
        self._way = PLAIN

    @property
    def may_choose(self) -> bool:
        return self._is_open and not self._model.run_eagerly

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        before = self._model.steps_per_execution
        self.set(number)
        try:
            yield
        finally:
            self.set(before)

    def set(self, number: int, way: str = PLAIN) -> None:
        """Puts `number` steps into one execution from now on, each made in a way. Other functions are kept."""
        before, wanted = (self._model.steps_per_execution, self._way), (number, way)
        if wanted == before:
            return
        self._made[before] = keras_fit.functions_of(self._model)
        keras_fit.set_functions(self._model, self._made.pop(wanted, {}))
        self._model.steps_per_execution = number
        if ALL in (way, self._way):
            self._model.jit_compile = way == ALL
        self._way = way


def act_between_batches(callbacks: Any) -> bool:
    """True if a callback of `fit` or `evaluate` may act or write between batches, or stop after the first one."""
    return any(needs_single_steps(callback) or _writes_or_stops(callback) for callback in as_list(callbacks))


def _writes_or_stops(callback: Any) -> bool:
    if isinstance(callback, Commit):
        return not callback.at_epochs
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch" or callback.write_steps_per_second)
    return not keras_model.is_kerass(type(callback)) and defines(callback, "on_epoch_begin")


PYTHONS_SHARE = 0.02  # of the time of a step, at most
ALONE, TOGETHER = 20, 5  # how many executions of one step and of several are timed, beside the first, which traces
WORTH = 10  # a way is tried if the remaining steps take this many times as long as the first one, which is traced
GAIN = 0.03  # by which a way must be faster than the step as it is
TRIED = 16  # steps in one execution, to see what Python takes
SLOW = 0.1  # seconds of a step beside which Python does not count
LONGEST = 1.0  # seconds of an execution: so often a progress bar moves, and Ctrl-C is heard


def number_for(alone: float, together: float, tried: int) -> int:
    """Returns how many steps one execution needs, so that Python takes at most 2 % of the time of a step.

    `alone` are the seconds of an execution of one step: the step, and what Python does between two executions.
    `together` are the seconds of a step in an execution of `tried` steps.
    """
    python = (alone - together) * tried / (tried - 1)
    step = max(alone - python, 1e-6)
    if python <= PYTHONS_SHARE * step:
        return 1
    needed = math.ceil(round(python / (PYTHONS_SHARE * step), 6))
    return max(min(needed, int(LONGEST / together)), 1)


def evenly(number: int, steps: int | None) -> int:
    """Returns about this number of steps for one execution, so that few are left over at the end of an epoch."""
    return number if steps is None else steps // math.ceil(steps / number)


class Tuning(keras.callbacks.Callback):
    """`kd.distribute(tune=True)`: times the first steps of `fit`, and chooses how the others are made.

    First whether XLA compiles the step, or its update, then how many steps one execution has. All steps that are timed
    are steps of the training. All ranks choose the same, after the same step. What is left over at the end of an epoch
    runs step by step, so each epoch has the steps that it would have otherwise.
    """

    async_safe = True  # it has no batch hooks

    def __init__(self, model: keras.Model, backend: Backend, spares_first_epoch: bool = False) -> None:
        super().__init__()
        self._model = model  # Keras sets `model` later
        self._backend = backend
        self._executions = Executions(model)
        self._spares_next_epoch = spares_first_epoch  # it runs step by step in any case
        self._epoch_iterator: Any = None
        self._epochs_left = 0
        self._forget()

    def _forget(self) -> None:
        self._executions.compiled(is_given=self._model.steps_per_execution > 1 if self._model.compiled else False)
        self._number: int | None = None  # what was chosen
        self._way = PLAIN  # what is timed, then what was chosen
        self._untried: list[str] | None = None  # ways that follow; `None` before it is known which
        self._tried = TRIED
        self._alone: dict[str, list[float]] = {PLAIN: []}  # seconds of executions of one step
        self._together: list[float] = []
        self._made: Any = object()  # the model's function of one step, after `fit`

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        if self._made is not self._model.train_function:  # compiled or made again
            self._forget()
        self._epoch_iterator = None
        try:
            yield
        finally:
            self._executions.set(self._executions.asked)
            self._made = self._model.train_function

    def arrange(self, given: Any, arranged: Any) -> Any:
        """Returns the callbacks of `fit` with this one, if the script's own (`given`) let it choose."""
        if (reason := self._reason_for_one(given)) is not None:
            logger().warning("tune=True changes nothing here: %s.", reason)
            return arranged
        return [*as_list(arranged), self]

    def _reason_for_one(self, callbacks: Any) -> str | None:
        """Returns why the script's number of steps has to stay, `None` if it need not."""
        if self._model.run_eagerly:
            return "the steps run eagerly"
        if not self._executions.may_choose:
            return f"`compile` has set {self._executions.asked}"
        for name in ("fit", "make_train_function"):
            if keras_fit.is_overridden(self._model, name):
                return f"{type(self._model).__name__} has a `{name}` of its own"
        for callback in as_list(callbacks):
            if needs_single_steps(callback):
                return f"{type(callback).__name__} may act between batches"
        return None

    def watch(self, epoch_iterator: Any) -> None:
        """Called with each iterator over data of the model, before it is used. The first is that of the training."""
        if self._epoch_iterator is None:
            self._epoch_iterator = epoch_iterator

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epochs_left = self.params.get("epochs", 0) - epoch - 1
        spares, self._spares_next_epoch = self._spares_next_epoch, False
        if not spares and (self._number, self._way) != (1, PLAIN):
            keras_fit.enumerate_next_epoch(self._epoch_iterator, self._in_executions)

    def _in_executions(self, steps: Iterator[Any], left: Callable[[int], int | None]) -> Iterator[Any]:
        """Puts steps of one epoch together. `left` returns how many are left with a given one, `None` if unknown."""
        try:
            for step, _, iterator in steps:  # of an execution the first and the last step, which are the same
                is_alone = len(self._alone[self._way]) <= ALONE
                number, steps_left = self._number or (1 if is_alone else self._tried), left(step)
                # `stop_training` was set before the first batch: Keras makes one step.
                if steps_left is None or self._model.stop_training or steps_left < number:
                    number = 1
                for _ in range(number - 1):
                    next(steps)
                # The end of data of unknown length counts as a step, but not of one that XLA compiles.
                way = PLAIN if steps_left is not None and steps_left < 1 else self._way
                self._put_together(number, way)
                optimizer, began = self._model.optimizer, time.perf_counter()
                with contextlib.ExitStack() as stack:
                    if way == UPDATE:
                        stack.enter_context(attached(optimizer, "apply", fused(optimizer, plain_apply(optimizer))))
                    yield step, step + number - 1, iterator
                self._took(number, time.perf_counter() - began, steps_left)
        finally:
            self._put_together(self._executions.asked)  # as an evaluation is

    def _put_together(self, number: int, way: str = PLAIN) -> None:
        self._executions.set(number, way)
        self._model.make_train_function()

    def _took(self, number: int, seconds: float, left: int | None) -> None:
        if self._number is not None:
            return
        alone = self._alone[self._way]
        if number == 1 and len(alone) <= ALONE:
            alone.append(seconds)
            if len(alone) > ALONE:
                self._choose_way(left)
        elif number == self._tried:
            self._together.append(seconds / number)
            if len(self._together) > TOGETHER:
                self._choose_number()

    def _choose_way(self, left: int | None) -> None:
        """Lets the next way be timed. After the last one chooses the fastest, and how many steps are tried together."""
        if self._untried is None:
            self._untried = list(self._of_all(self._worth_trying(left))[0])
        if self._untried:
            self._way = self._untried.pop(0)
            self._alone[self._way] = []
            return
        medians = [statistics.median(times[1:]) for times in self._alone.values()]
        slowest = dict(zip(self._alone, map(max, zip(*self._of_all(medians), strict=True)), strict=True))
        fastest = min(slowest, key=lambda way: slowest[way])
        self._way = fastest if slowest[fastest] < (1 - GAIN) * slowest[PLAIN] else PLAIN
        self._tried = self._agreed(1 if slowest[self._way] > SLOW else evenly(TRIED, self._steps_of_epoch()))
        if self._tried == 1:
            self._number = 1
        if len(slowest) > 1:
            self._announce("; ".join(f"{1000 * seconds:.2f} ms {way}" for way, seconds in slowest.items()))

    def _worth_trying(self, left: int | None) -> list[str]:
        """Returns the other ways to make a step whose numbers are the same, if enough steps are left."""
        model, per_epoch, times = self._model, self._epoch_iterator.num_batches, self._alone[PLAIN]
        steps = self._epochs_left * (per_epoch or 0) + (left or 0)
        if steps * statistics.median(times[1:]) < WORTH * times[0] or not self._backend.uses_xla:
            return []
        # With several replicas a large update is compiled in any case.
        has_update = self._backend.num_replicas == 1 and isinstance(model.optimizer, keras.Optimizer)
        ways = [UPDATE] if has_update and is_large(model.trainable_variables) else []
        return [*ways, ALL] if self._may_compile() else ways

    def _may_compile(self) -> bool:
        """True if XLA can compile all of a step, and draws no random numbers: it would draw others."""
        model, leaves = self._model, tf.nest.flatten(keras_fit.distributed_dataset(self._epoch_iterator).element_spec)
        return (
            not model.jit_compile
            and not list(keras_random.seed_generators(model))
            and all(layer.supports_jit for layer in keras_model.flatten_layers(model))
            and not is_in_step(model, "train")
            and all(isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string for leaf in leaves)
        )

    def _choose_number(self) -> None:
        alone, together = statistics.median(self._alone[self._way][1:]), statistics.median(self._together[1:])
        needed = number_for(alone, together, self._tried)
        # The functions for what was tried exist already.
        is_tried = 1 < needed <= self._tried
        self._number = self._agreed(self._tried if is_tried else evenly(needed, self._steps_of_epoch()))
        steps_of_one = "1 step" if self._number == 1 else f"{self._number} steps"
        self._announce(
            f"{steps_of_one} in one execution. A step took {1000 * alone:.2f} ms alone, and "
            f"{1000 * together:.2f} ms among {self._tried}"
        )

    def _steps_of_epoch(self) -> int | None:
        return self._epoch_iterator.steps_per_epoch or keras_fit.batches_of_data(self._epoch_iterator)

    def _announce(self, text: str) -> None:
        if self._backend.topology.is_chief:
            announce(f"keras_dist: {text}.")

    def _of_all(self, value: Any) -> list[Any]:
        return self._backend.all_gather_object("model.fit (tune=True)", value)

    def _agreed(self, number: int) -> int:
        return int(self._of_all(number)[0])  # the chief's


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that the script passed, see `kd.distribute`; `None` for an option that it did not pass."""

    data: str | None = None
    batch: str | None = None
    scale_learning_rate: str | None = None
    exact: bool | None = None
    verify: bool | Literal["auto"] | None = None
    tune: bool | None = None

    def __post_init__(self) -> None:
        for name, choices, also in (
            ("data", sources.MODES, ""),
            ("batch", ("global", "per_replica"), ""),
            ("verify", ("auto", True, False), ""),
            ("scale_learning_rate", RULES, ", or None"),
            ("tune", (True, False), ""),
        ):
            if (value := getattr(self, name)) is not None:
                check_choice("option", name, value, choices, also=also)

    def verifies_on(self, backend: Backend) -> bool:
        """True if the script or the environment asks for a verification.

        Raises `NotSupportedError` if the script asks for it, and steps are not meant to be those of one process. What
        the environment asks for is for any script.
        """
        from_environment = environment.get(environment.VERIFY) not in (None, "0", "auto")
        is_asked = from_environment if self.verify is None else self.verify is True
        if not is_asked or (reason := backend.not_of_one_process) is None:
            return is_asked
        if self.verify:
            raise NotSupportedError(
                f"A verification compares steps with those of one process, but {reason}.",
                f"verify=True on the backend {backend.name!r}",
                "Leave `verify` out, or verify the script with another mode or backend.",
            )
        if backend.topology.is_chief:
            warn_once("%s is ignored: %s.", environment.VERIFY, reason)
        return False

    def checks_own_code(self, backend: Backend) -> bool:
        """True if the first steps that run code of the script are compared with one process on a few rows."""
        asked = environment.get(environment.VERIFY, "auto") if self.verify is None else self.verify
        return asked == "auto" and backend.not_of_one_process is None

    def tuning(self, model: keras.Model, backend: Backend) -> Tuning | None:
        """Returns what chooses how steps are made, `None` if the script does not ask for it."""
        if not self.tune or backend.puts_steps_together:
            return None
        return Tuning(model, backend, self.verifies_on(backend))

    def scale(self, optimizer: Any, num_replicas: int) -> None:
        if self.scale_learning_rate is not None and num_replicas > 1:
            scale(optimizer, self.scale_learning_rate, num_replicas)

    @property
    def passed(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def check_again(self, later: Options) -> None:
        """Raises `ConfigurationError` if a later call of `kd.distribute` passes other options."""
        changed = {name: value for name, value in later.passed.items() if value != getattr(self, name)}
        if changed:
            raise ConfigurationError(
                "The model is already distributed, with other options.",
                ", ".join(f"{name}={value!r} after {name}={getattr(self, name)!r}" for name, value in changed.items()),
                "Call kd.distribute(model) once, or with the same options.",
            )

    def check_for_optimizer(self) -> None:
        """Raises `ConfigurationError` if an option does not apply to a custom training loop."""
        for name, remedy in (
            ("batch", "pass kd.shard batches that are kd.num_replicas() times as large."),
            ("tune", "put several calls of kd.run into one tf.function, with `jit_compile` where it is faster."),
        ):
            if (value := getattr(self, name)) is not None:
                raise ConfigurationError(
                    f"The option `{name}` is for models only: it changes `fit`.",
                    f"{name}={value!r} for an optimizer",
                    f"In a custom training loop, {remedy}",
                )
