"""Devices of one machine, by name, and when they are chosen. The GPUs are simulated."""

from __future__ import annotations

import pytest
import tensorflow as tf

from keras_dist.backends import choose
from keras_dist.comm.devices import describe_devices, short_name, warn_of_unused_gpus
from keras_dist.environment import Launch, Topology
from keras_dist.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("GPU:1", "GPU:1"),
        ("gpu:1", "GPU:1"),
        ("/gpu:1", "GPU:1"),
        ("/device:CPU:0", "CPU:0"),
        ("/job:localhost/replica:0/task:0/device:GPU:12", "GPU:12"),
        ("host", "host"),
        ("GPU", "GPU"),
    ],
)
def test_any_spelling_has_one_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_devices_as_text() -> None:
    assert describe_devices(["/device:GPU:0", "/device:GPU:1"]) == "2 GPUs"
    assert describe_devices(["CPU:0"]) == "1 CPU"


@pytest.mark.parametrize(
    ("used", "unused"),
    [
        (["GPU:0"], "GPU:1, GPU:2, GPU:3"),
        (["/job:localhost/replica:0/task:0/device:GPU:1", "gpu:3"], "GPU:0, GPU:2"),
        (["CPU:0"], "GPU:0, GPU:1, GPU:2, GPU:3"),
        ([f"GPU:{index}" for index in range(4)], None),
    ],
)
def test_gpus_that_are_seen_and_not_used_are_named(
    used: list[str], unused: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(4)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: found)
    warn_of_unused_gpus(used)
    expected = f"this process sees GPU:0, GPU:1, GPU:2, GPU:3 and does not use {unused}, of which TensorFlow"
    assert [record.getMessage()[: len(expected)] for record in caplog.records] == ([expected] if unused else [])


@pytest.mark.parametrize(("gpus", "chosen"), [(0, "serial"), (1, "serial"), (2, "mirrored"), (8, "mirrored")])
def test_several_gpus_and_no_launcher_are_mirrored(gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(gpus)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: found if kind == "GPU" else [])
    backend, affinity = choose(None)
    assert backend.name == chosen
    if chosen == "mirrored":
        assert affinity.reason == f"{gpus} GPUs on this machine, and no launcher found"


def test_a_launched_process_has_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: found if kind == "GPU" else [])
    launch = Launch(Topology(0, 2, 0, 2), "TF_CONFIG", workers=("localhost:1", "localhost:2"))
    assert choose(launch)[0].name == "multi_worker"


def test_a_tpu_is_found_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    backend, affinity = choose(None)
    assert (backend.name, affinity.reason) == ("tpu", "found by TPU_NAME")


def test_a_tpu_whose_name_can_not_be_read_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "my tpu")
    backend, _ = choose(None)
    assert backend.name == "tpu"
    with pytest.raises(ConfigurationError) as raised:
        backend().start(None)
    assert raised.value.received == "TPU_NAME='my tpu'"
