"""The options of `kd.distribute`, and `steps_per_execution="auto"`.

Returning to Python after each step can take longer than the step, so several steps are put into one execution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras

from keras_dist import environment
from keras_dist.callbacks import Commit, defines
from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_fit, keras_model
from keras_dist.data import sources
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.logging import announce, logger
from keras_dist.step.optimizer import RULES, scale
from keras_dist.training.synchronizer import as_list, needs_single_steps

_MOST = 32


def number_of(steps: int | None, exactly: Sequence[int | None] = ()) -> int:
    """Returns how many steps of an epoch of `steps` to put into one execution.

    It must divide the numbers in `exactly`, since data may be endless.
    """
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
        self._made: dict[int, dict[str, Any]] = {}
        self.compiled(False)

    def compiled(self, is_given: bool) -> None:
        """Notes that the model was compiled, and whether the script passed `steps_per_execution`."""
        self._made.clear()
        self.asked: int = getattr(self._model, "steps_per_execution", None) or 1
        self._is_open = not is_given and self.asked == 1

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

    def set(self, number: int) -> None:
        """Puts `number` steps into one execution from now on. The functions for other numbers are kept."""
        if number != (before := self._model.steps_per_execution):
            self._made[before] = keras_fit.functions_of(self._model)
            keras_fit.set_functions(self._model, self._made.pop(number, {}))
            self._model.steps_per_execution = number


@functools.cache
def report(number: int) -> None:
    if number > 1:
        logger().warning(
            "%d steps in one execution: no callback acts between batches. compile(steps_per_execution=1) turns it off.",
            number,
        )


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


class AutoExecutions(keras.callbacks.Callback):
    """Times the first steps of `fit`, and chooses how many of them one execution has.

    All ranks choose what the chief does, after the same step. What is left over at the end of an epoch runs step by
    step, so each epoch has the steps that it would have otherwise.
    """

    async_safe = True  # it has no batch hooks

    def __init__(self, model: keras.Model, backend: Backend, spares_first_epoch: bool = False) -> None:
        super().__init__()
        self._model = model  # Keras sets `model` later
        self._backend = backend
        self._executions = Executions(model)
        self._spares_next_epoch = spares_first_epoch  # it runs step by step in any case
        self._epoch_iterator: Any = None
        self._forget()

    def _forget(self) -> None:
        self._executions.compiled(is_given=self._model.steps_per_execution > 1 if self._model.compiled else False)
        self._number: int | None = None  # what was chosen
        self._tried = TRIED
        self._alone: list[float] = []
        self._together: list[float] = []
        self._made: Any = object()  # the model's function of one step, after `fit`

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """The context of a call of `fit`."""
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
            logger().warning("steps_per_execution='auto' changes nothing here: %s.", reason)
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
        spares, self._spares_next_epoch = self._spares_next_epoch, False
        if not spares and self._number != 1:
            keras_fit.enumerate_next_epoch(self._epoch_iterator, self._in_executions)

    def _in_executions(self, steps: Iterator[Any], left: Callable[[int], int | None]) -> Iterator[Any]:
        """Puts steps of one epoch together. `left` returns how many are left with a given one, `None` if unknown."""
        try:
            for step, _, iterator in steps:  # of an execution the first and the last step, which are the same
                number, steps_left = self._number or (1 if len(self._alone) <= ALONE else self._tried), left(step)
                # `stop_training` was set before the first batch: Keras makes one step.
                if steps_left is None or self._model.stop_training or steps_left < number:
                    number = 1
                for _ in range(number - 1):
                    next(steps)
                self._put_together(number)
                began = time.perf_counter()
                yield step, step + number - 1, iterator
                self._took(number, time.perf_counter() - began)
        finally:
            self._put_together(self._executions.asked)  # as an evaluation is

    def _put_together(self, number: int) -> None:
        self._executions.set(number)
        self._model.make_train_function()

    def _took(self, number: int, seconds: float) -> None:
        if self._number is not None:
            return
        if number == 1 and len(self._alone) <= ALONE:
            self._alone.append(seconds)
            if len(self._alone) > ALONE:
                is_slow = statistics.median(self._alone[1:]) > SLOW
                steps = self._epoch_iterator.num_batches
                self._tried = self._agreed(1 if is_slow else evenly(TRIED, steps))
                self._number = 1 if self._tried == 1 else None
        elif number == self._tried:
            self._together.append(seconds / number)
            if len(self._together) <= TOGETHER:
                return
            alone, together = statistics.median(self._alone[1:]), statistics.median(self._together[1:])
            needed = number_for(alone, together, self._tried)
            # The functions for what was tried exist already.
            steps = self._epoch_iterator.num_batches
            self._number = self._agreed(self._tried if 1 < needed <= self._tried else evenly(needed, steps))
            if self._backend.topology.is_chief:
                announce(
                    f"keras_dist: {self._number} steps in one execution. A step took {1000 * alone:.2f} ms alone, and "
                    f"{1000 * together:.2f} ms among {self._tried}."
                )

    def _agreed(self, number: int) -> int:
        return int(self._backend.all_gather_object("model.fit (steps_per_execution)", number)[0])  # the chief's


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that the script passed, see `kd.distribute`; `None` for an option that it did not pass."""

    data: str | None = None
    batch: str | None = None
    scale_learning_rate: str | None = None
    exact: bool | None = None
    verify: bool | Literal["auto"] | None = None
    steps_per_execution: str | None = None

    def __post_init__(self) -> None:
        for name, choices, also in (
            ("data", sources.MODES, ""),
            ("batch", ("global", "per_replica"), ""),
            ("verify", ("auto", True, False), ""),
            ("scale_learning_rate", RULES, ", or None"),
            ("steps_per_execution", ("auto",), ". A number is for `compile`"),
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
        _note_ignored(reason, backend.topology.is_chief)
        return False

    def checks_own_code(self, backend: Backend) -> bool:
        """True if the first steps that run code of the script are compared with one process on a few rows."""
        asked = environment.get(environment.VERIFY, "auto") if self.verify is None else self.verify
        return asked == "auto" and backend.not_of_one_process is None

    def automatic_executions(self, model: keras.Model, backend: Backend) -> AutoExecutions | None:
        """Returns what chooses the number of steps in one execution, `None` if the script does not ask for it."""
        if self.steps_per_execution is None or backend.puts_steps_together:
            return None
        return AutoExecutions(model, backend, self.verifies_on(backend))

    def scale(self, optimizer: Any, num_replicas: int) -> None:
        if self.scale_learning_rate is not None and num_replicas > 1:
            scale(optimizer, self.scale_learning_rate, num_replicas)

    def check_again(self, later: Options) -> None:
        """Raises `ConfigurationError` if a later call of `kd.distribute` passes other options."""
        passed = {name: value for name, value in dataclasses.asdict(later).items() if value is not None}
        changed = {name: value for name, value in passed.items() if value != getattr(self, name)}
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
            ("steps_per_execution", "put several calls of kd.run into one tf.function."),
        ):
            if (value := getattr(self, name)) is not None:
                raise ConfigurationError(
                    f"The option `{name}` is for models only: it changes `fit`.",
                    f"{name}={value!r} for an optimizer",
                    f"In a custom training loop, {remedy}",
                )


@functools.cache
def _note_ignored(reason: str, is_chief: bool) -> None:
    if is_chief:
        logger().warning("%s is ignored: %s.", environment.VERIFY, reason)
