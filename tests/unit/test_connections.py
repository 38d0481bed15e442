"""Whether a process listens and answers at an address; calls that can be abandoned."""

from __future__ import annotations

import socket
import threading

import pytest
import tensorflow as tf

from keras_dist.comm import watchdog


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


def test_a_call_in_a_thread_is_a_call() -> None:
    def fails() -> None:
        raise KeyError("raised")

    assert watchdog.call_in_thread(lambda: 7, check=lambda: None) == 7
    with pytest.raises(KeyError, match="raised"):
        watchdog.call_in_thread(fails, check=lambda: None)


def test_a_call_that_waits_forever_is_abandoned() -> None:
    until = threading.Event()

    def check() -> None:
        raise TimeoutError("long enough")

    with pytest.raises(TimeoutError, match="long enough"):
        watchdog.call_in_thread(until.wait, check)
    until.set()
