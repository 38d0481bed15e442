"""What is said at the end of a job, and of which jobs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from keras_dist.backends.local.serial import Serial
from keras_dist.environment import Topology
from keras_dist.training.refusals import _Look


def said_at_exit(monkeypatch: pytest.MonkeyPatch, backend: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(_Look, "_warn", lambda self, text, *args: said.append(text % args))
    _Look(backend).at_exit()
    return said


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delattr(sys, "last_value", raising=False)
    backend = Serial()
    backend.topology = Topology(0, 2, 0, 2)
    return backend


def test_a_job_that_shared_no_work(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    assert said_at_exit(monkeypatch, backend) == [
        "nothing was distributed, so each of the 2 ranks does the whole work alone. Add `model = "
        "kd.distribute(model)` before `model.compile`; in a custom loop `optimizer = kd.distribute(optimizer)`."
    ]


@pytest.mark.parametrize("call", ["rank", "local_rank"])
def test_ranks_may_divide_the_work_themselves(monkeypatch: pytest.MonkeyPatch, backend: Any, call: str) -> None:
    from keras_dist import cluster

    monkeypatch.setattr(cluster, "_backend", backend)
    getattr(cluster, call)()
    assert said_at_exit(monkeypatch, backend) == []


def test_to_ask_for_the_chief_is_no_work(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    from keras_dist import cluster

    monkeypatch.setattr(cluster, "_backend", backend)
    assert cluster.is_chief()
    assert len(said_at_exit(monkeypatch, backend)) == 1


def test_a_job_that_failed_has_another_message(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert said_at_exit(monkeypatch, backend) == []
