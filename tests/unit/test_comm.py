"""How ranks talk: waits for each other and for servers, objects and tensors on the wire, devices and cores."""

import pickle
import random
import socket
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keras_dist.comm import watchdog
from keras_dist.comm.processes import decode, encode
from keras_dist.comm.watchdog import LoopWaits, Wait, call_of, counterpart
from keras_dist.data import sources
from keras_dist.errors import ConfigurationError
from keras_dist.step.step import Stopwatch
from tests.limits import examples

CALLS = {1: "kd.init()", 2: "model.fit (start)", 3: "kd.barrier()"}


def wait(made: int, loop_number: int = 0, loop_call: str = "", **other: str) -> Wait:
    before = [(number, call) for number, call in CALLS.items() if number < made]
    return Wait([*before, (made, other.get("call", CALLS[made]))], loop_number, loop_call)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        # Calls of the same number.
        (wait(2), wait(2), "model.fit (start)"),
        (wait(2), wait(2, call="kd.barrier()"), "kd.barrier()"),
        # The other rank is behind, or ahead.
        (wait(3), wait(2), None),
        (wait(2), wait(3), "model.fit (start)"),
        # Both ranks are in loops.
        (wait(2, 7, "kd.run()"), wait(2, 7, "kd.reduce()"), "kd.reduce()"),
        (wait(2, 7, "kd.run()"), wait(2, 6, "kd.reduce()"), None),
        (wait(2, 7, "kd.run()"), wait(2, 7, "kd.run()"), "kd.run()"),
        # One rank is in a loop, the other one in a call that the first one hasn't begun.
        (wait(2, 7, "kd.run()"), wait(3, 6), "kd.barrier()"),
        (wait(3, 6), wait(2, 7, "kd.run()"), "kd.run()"),
        # The call came before the loop, so the other rank may still make it; and the loop before the call.
        (wait(3, 7, "kd.run()"), wait(3, 6), None),
        (wait(2, 7, "kd.run()"), wait(3, 7), None),
        (wait(3, 7), wait(2, 7, "kd.run()"), None),
    ],
)
def test_the_call_of_another_rank_in_place_of_this_ones(own: Wait, other: Wait, expected: str | None) -> None:
    assert counterpart(own, other) == expected


def test_only_collectives_of_loops_are_counted() -> None:
    assert call_of("keras_dist_loop_total") == "kd.run()"
    assert call_of("keras_dist_loop_reduce_2") == "kd.reduce()"
    assert call_of("keras_dist_predictions_0") is None
    assert call_of("keras_dist_count_3") is None


def test_operations_record_where_a_rank_is() -> None:
    waits, seen = LoopWaits(), []

    def collective(given: Any) -> Any:
        def look(number: Any) -> Any:
            seen.append(waits.position())
            return number

        return [tf.numpy_function(look, [given[0].values], tf.float32), given[1]]

    @tf.function
    def step(values: Any) -> Any:
        slices = tf.IndexedSlices(values, tf.constant([0]), tf.constant([1]))
        first = waits.track("kd.run()", [slices, values], collective)
        return waits.track("kd.reduce()", [slices, first[0]], collective)[0]

    for _ in range(2):
        assert step(tf.constant([3.0])).numpy().tolist() == [3.0]
        assert waits.position()[1] == ""
    assert seen == [(1, "kd.run()"), (2, "kd.reduce()"), (3, "kd.run()"), (4, "kd.reduce()")]


def test_a_server_of_tensorflows_answers() -> None:
    server = tf.distribute.Server({"worker": ["localhost:0"]}, job_name="worker", task_index=0)
    address = server.target.removeprefix("grpc://")
    assert watchdog.listens(address)
    assert watchdog.answers(address)


def test_a_process_that_hangs_listens_but_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0.2)
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        address = f"127.0.0.1:{hanging.getsockname()[1]}"
        assert watchdog.listens(address)
        assert not watchdog.answers(address)
    assert not watchdog.answers(address)


def test_a_call_that_waits_forever_is_abandoned() -> None:
    until = threading.Event()

    def check() -> None:
        raise TimeoutError("long enough")

    with pytest.raises(TimeoutError, match="long enough"):
        watchdog.call_in_thread(until.wait, check)
    until.set()


@pytest.mark.parametrize("traced", [False, True])
def test_waiting_adds_up(traced: bool) -> None:
    stopwatch = Stopwatch()
    stopwatch.restart()

    def meet(own: tf.Tensor, everyone: tf.Tensor) -> None:
        stopwatch.synchronized(own, everyone)

    run = tf.function(meet) if traced else meet
    run(tf.constant(1.0), tf.constant([1.0, 3.0, 2.0]))
    run(tf.constant(4.0), tf.constant([4.0, 0.5, 2.0]))
    run(tf.constant(1.0), tf.constant([1.0, 0.5, 1.5]))
    np.testing.assert_allclose(stopwatch.waited(), 2.5)
    stopwatch.restart()
    assert stopwatch.waited() == 0.0


@pytest.mark.parametrize(
    ("address", "warns", "records"), [("10.0.0.1:80", True, 1), ("10.0.0.1:80", False, 0), ("localhost:80", True, 0)]
)
def test_one_process_warns_of_a_server_on_a_network(
    address: str, warns: bool, records: int, caplog: pytest.LogCaptureFixture
) -> None:
    with watchdog.only_for_its_network(address, warns):
        pass
    assert len(caplog.records) == records
    assert all("here at port 80" in record.getMessage() for record in caplog.records)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
objects = st.recursive(
    plain,
    lambda items: st.lists(items) | st.dictionaries(keys, items) | st.tuples(items, items),
    max_leaves=20,
)


@settings(max_examples=examples(200), deadline=None)
@given(objects)
def test_round_trip(value: Any) -> None:
    received = decode(encode(value))
    assert received == value
    assert repr(received) == repr(value)  # True is not 1, a tuple no list


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros([0, 3]), np.asarray(3), np.asarray(["a", "ü"]),
        np.asarray([b"a"]), np.asarray([1 + 2j]), np.asarray([True]), np.asarray([np.nan, np.inf]),
        np.asarray([1.5, 2.5], ml_dtypes.bfloat16), np.arange(6).reshape(2, 3).T, np.asarray([1, 2], ">i4"),
        np.asarray(["2026-11-23"], "datetime64[D]"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)  # fmt: skip
def test_arrays(array: np.ndarray) -> None:
    received = decode(encode({"array": array, "after": 1}))
    np.testing.assert_array_equal(received["array"], array)
    assert (received["array"].dtype, received["array"].shape, received["after"]) == (array.dtype, array.shape, 1)
    received["array"][...] = array  # it can be written to


@pytest.mark.parametrize(
    ("value", "received"),
    [
        (random.Random(), "Random object"),
        ([lambda: None], "function object"),
        (np.asarray([None]), "an array of object"),
        (tf.RaggedTensor.from_row_lengths([1], [1]), "RaggedTensor object"),
    ],
)
def test_what_is_not_sent(value: Any, received: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Only numbers, texts(?s:.*)Received: {received}"):
        encode(value)


def test_a_pickle_is_not_read() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it depends on the bytes which one
        decode(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="OBJECT"):
        decode(encode(np.zeros(2)).replace(b'"<f8"', b'"|O" '))


DTYPES = [
    "float16", "float32", "float64", "int8", "uint8", "int16", "uint16",
    "int32", "uint32", "int64", "uint64", "bool",
]  # fmt: skip


def through_the_wire(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    payload = sources.pack(tensors)
    assert (payload.dtype, payload.shape.rank) == (tf.uint8, 1)
    return sources.unpack(payload, [tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype) for tensor in tensors])


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
def test_numbers_come_back_bit_for_bit(data: st.DataObject, dtypes: list[str]) -> None:
    shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    sent = [data.draw(arrays.arrays(np.dtype(dtype), shapes)) for dtype in dtypes]
    sent.append(np.array([[1.5, -2.25], [np.inf, 0.0]], ml_dtypes.bfloat16))
    received = [tensor.numpy() for tensor in through_the_wire([tf.constant(array) for array in sent])]
    assert [(one.dtype, one.shape, one.tobytes()) for one in received] == [
        (one.dtype, one.shape, one.tobytes()) for one in sent
    ]
