"""State between steps: checksums, combined metrics, compared weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_dist.errors import MismatchError, NotSupportedError
from keras_dist.state import weights


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int32", "uint8", "bool"])
def test_a_checksum_sees_one_bit(dtype: str) -> None:
    values = np.zeros([3, 5])
    plain = keras.Variable(values, dtype=dtype, trainable=False)
    values[2, 4] = 1
    changed = keras.Variable(values, dtype=dtype, trainable=False)
    first, second, again = weights.checksums([plain, changed, plain])
    assert first == again
    assert first != second


def test_a_checksum_sees_the_order() -> None:
    forwards, backwards = keras.Variable([1.0, 2.0]), keras.Variable([2.0, 1.0])
    first, second = weights.checksums([forwards, backwards])
    assert first != second


def test_checksums_of_several_models_in_one_process() -> None:
    """With variables, TensorFlow reused one model's trace for another model's shapes."""
    for width in (8, 6, 4, 3):
        kernel = keras.Variable(np.ones([4, width]), dtype="float64")
        bias = keras.Variable(np.ones([width]), dtype="float64")
        alone = weights.checksums([kernel])[0], weights.checksums([bias])[0]
        assert tuple(weights.checksums([kernel, bias])) == alone


def test_no_variables_no_checksums() -> None:
    assert weights.checksums([]).shape == (0,)


def test_sums_of_metrics_start_from_the_reset_state() -> None:
    """A variable that is 10 after a reset holds 10 + what was counted, on each rank."""
    values = [np.float32([11, 10]), np.float32([13, 10]), np.float32([10, 15])]
    total = weights.combine_states(values, np.float32([10, 10]), "sum", "count")
    np.testing.assert_array_equal(total, np.float32([14, 15]))
    assert total.dtype == np.float32


def test_many_small_parts_are_added_in_double_precision() -> None:
    values = [np.float32(2**24)] + [np.float32(1)] * 8
    assert weights.combine_states(values, np.float32(0), "sum", "count") == np.float32(2**24 + 8)


def test_means_and_chiefs_states() -> None:
    values = [np.float64(1), np.float64(2)]
    assert weights.combine_states(values, np.float64(0), "mean", "v") == 1.5
    assert weights.combine_states(values, np.float64(0), "only_first_replica", "v") == 1


def test_a_state_that_does_not_add_up_is_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="variable 'latest/value' with aggregation='none'"):
        weights.combine_states([np.float64(1)], np.float64(0), "none", "latest/value")


def test_different_weights_are_named_with_the_odd_rank() -> None:
    variables = [keras.Variable([0.0], name="kernel"), keras.Variable([0.0], name="bias")]
    weights.check_weights(variables, np.int64([[1, 2], [1, 2], [1, 2]]))
    with pytest.raises(MismatchError, match=r"rank 1 differ\(s\) in bias"):
        weights.check_weights(variables, np.int64([[1, 2], [1, 3], [1, 2]]))
