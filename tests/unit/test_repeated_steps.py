"""Synchronous steps on parameter servers: they are repeated until the shares agree on what they tell each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from keras_dist.backends.parameter_server.engine import SyncEngine
from keras_dist.backends.parameter_server.exchange import Outputs, of_all_shares
from keras_dist.errors import NotSupportedError

SHARES = (1.0, 2.0)
Told = Callable[[float, Any], list[Any]]


def repeated(told: Told) -> tuple[list[Outputs], int]:
    """Runs a step on two shares. Returns its outputs, and how often it was run."""
    engine = object.__new__(SyncEngine)
    engine._runs = 1
    runs = []

    def run(gathered: Any) -> list[Outputs]:
        runs.append(gathered)
        return [Outputs({}, [], [], [], told=list(map(tf.constant, told(share, gathered)))) for share in SHARES]

    return engine._repeat(run(()), run), len(runs)


def sums(gathered: Any, own: float) -> list[float]:
    return [float(tf.reduce_sum(tensor)) for tensor in gathered] or [own] * 3


def test_independent_tensors_take_two_runs() -> None:
    _, runs = repeated(lambda share, gathered: [[share], [2 * share], [math.nan]])
    assert runs == 2


def test_a_chain_takes_a_run_for_each_tensor() -> None:
    def told(share: float, gathered: Any) -> list[Any]:
        first, second, _ = sums(gathered, share)
        return [[share], [share * first], [share * second]]

    outputs, runs = repeated(told)
    assert runs == 4
    assert [[float(tensor[0]) for tensor in output.told] for output in outputs] == [[1, 3, 9], [2, 6, 18]]


def test_a_tensor_may_change_its_shape() -> None:
    """The rows of all shares are known in the second run."""

    def told(share: float, gathered: Any) -> list[Any]:
        own = [share] * int(share)
        rows = gathered[0].numpy().tolist() if gathered else own
        return [own, [rows], [0.0]]

    outputs, runs = repeated(told)
    assert runs == 3
    assert [output.told[1].numpy().tolist() for output in outputs] == [[[1, 2, 2]], [[1, 2, 2]]]


def test_what_has_no_common_shape_fits_none() -> None:
    (whole,) = of_all_shares([[tf.ones([1, 2])], [tf.ones([1, 3])]])
    assert whole.shape == (0, 0)


def test_a_step_that_draws_other_numbers_each_time_is_refused() -> None:
    numbers = itertools.count(1.0)
    with pytest.raises(NotSupportedError, match="computes something else each time"):
        repeated(lambda share, gathered: [[next(numbers)]])


def test_other_rounding_is_accepted() -> None:
    numbers = itertools.count(1.0)
    _, runs = repeated(lambda share, gathered: [[1.0 + 1e-6 * next(numbers)], [share]])
    assert runs == 3
