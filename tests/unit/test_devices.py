"""Devices and cores of one machine. The GPUs are simulated."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_dist import api
from keras_dist.backends import choose
from keras_dist.backends.local.serial import Serial
from keras_dist.comm import devices
from keras_dist.comm.devices import bind, cpu_limit, part_of, pin_gpu, prepare_devices, warn_of_unused_gpus
from keras_dist.environment import Launch, Topology
from keras_dist.errors import ConfigurationError, MismatchError


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


def used_gpus(visible: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulates GPUs. Returns a list that gets the indices of those that a rank takes."""
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(visible)]
    used: list[int] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda chosen, kind: used.extend(map(gpus.index, chosen)))
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, enable: None)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    return used


ONE_LAUNCHER, ITS_OWN, SECOND_OF_TWO = (2, 4), (0, 1), (0, 2)  # the place of local rank 2 of 4
SLURM = {"SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("visible", "place", "environ", "index", "unused"),
    [
        (4, ONE_LAUNCHER, {}, 2, None),
        (2, ONE_LAUNCHER, {}, None, None),
        (1, ITS_OWN, SLURM, 0, None),  # srun --gpus-per-task=1
        (2, SECOND_OF_TWO, SLURM, 0, None),  # srun -n2 --gpus-per-task=2 keras-dist run -np 2
        (3, (0, 2), {"SLURM_GPUS_ON_NODE": "6"}, 0, "GPU:2"),
        (2, SECOND_OF_TWO, {}, 0, None),  # the same by hand
        (4, ITS_OWN, SLURM, 2, None),  # each task sees all
        (2, ITS_OWN, {"SLURM_GPUS_ON_NODE": "2"}, None, None),  # and they are too few
        (1, None, {"CUDA_VISIBLE_DEVICES": "2"}, 0, None),  # mpirun, by a script that hides the others
        (1, None, {}, None, None),
    ],
)
def test_which_gpu_the_third_of_four_ranks_of_a_host_has(
    visible: int, place: tuple[int, int] | None, environ: dict[str, str], index: int | None, unused: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    used = used_gpus(visible, monkeypatch)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if index is None:
        with pytest.raises(ConfigurationError, match=f"There are more ranks than GPUs.*\n.*4 ranks, {visible} GPU"):
            pin_gpu(Topology(6, 8, 2, 4), place)
    else:
        pin_gpu(Topology(6, 8, 2, 4), place)
        assert used == [index]
    warnings = [record.getMessage() for record in caplog.records]
    assert [f"no rank uses {unused}, since each uses one" in warning for warning in warnings] == [True] * bool(unused)


@pytest.mark.parametrize(
    ("launcher", "topology", "visible", "has_several", "taken"),
    [
        ("TF_CONFIG", Topology(1, 2, 0, 1), 4, True, [0, 1, 2, 3]),
        ("TF_CONFIG", Topology(0, 1, 0, 1), 4, True, [0, 1, 2, 3]),  # Vertex AI, one machine
        ("TF_CONFIG", Topology(1, 2, 0, 1), 1, False, [0]),
        ("TF_CONFIG", Topology(1, 2, 1, 2), 4, False, [1]),
        ("srun", Topology(1, 2, 0, 1), 4, True, [0, 1, 2, 3]),
        ("horovodrun", Topology(1, 2, 0, 1), 4, True, [0, 1, 2, 3]),
        ("keras-dist run", Topology(0, 1, 0, 1), 4, False, [0]),
        # Of 8 GPUs that the job has on the host: srun --gpus-per-task=2, or each of two tasks sees all.
        ("srun", Topology(1, 8, 1, 4), 2, True, [0, 1]),
        ("keras-dist run", Topology(1, 8, 1, 4), 2, True, [0, 1]),
        ("srun", Topology(1, 4, 1, 2), 8, False, [1]),
    ],
)
def test_the_only_rank_of_a_host_or_of_its_gpus_uses_all_that_it_sees(
    launcher: str, topology: Topology, visible: int, has_several: bool, taken: list[int],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    used = used_gpus(visible, monkeypatch)
    place = None
    if launcher in ("srun", "keras-dist run"):
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
        place = ITS_OWN
    assert prepare_devices(None, topology, Launch(launcher, topology, place=place)) == has_several
    warns = topology.size == 1 and not has_several and visible > 1
    unused = "GPU:1, GPU:2, GPU:3, since each uses one. Start a rank for each GPU"
    warnings = [record.getMessage().partition("no rank uses ")[2] for record in caplog.records]
    assert (used, warnings) == (taken, [unused] * warns)


def test_ranks_that_see_different_numbers_of_gpus_are_refused() -> None:
    class OnFourGpus(Serial):
        replicas = 4

        def all_gather_object(self, call: str, value: Any = None) -> list[Any]:
            return [value, (*value[:-1], 2)]

    expected = "All ranks must compute on equally many devices.\nReceived: rank 0: 4; rank 1: 2\nRemedy: Hide GPUs"
    with pytest.raises(MismatchError, match=re.escape(expected)):
        api._compare_ranks(OnFourGpus(), None)


@pytest.mark.parametrize(("gpus", "chosen"), [(0, "serial"), (1, "serial"), (2, "mirrored"), (8, "mirrored")])
def test_several_gpus_and_no_launcher_are_mirrored(gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(gpus)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: found if kind == "GPU" else [])
    backend, priority = choose(None)
    assert backend.name == chosen
    if chosen == "mirrored":
        assert priority.reason == f"{gpus} GPUs on this machine, and no launcher found"


def test_a_tpu_is_found_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "my-tpu")
    backend, priority = choose(None)
    assert (backend.name, priority.reason) == ("tpu", "found by TPU_NAME")


def test_a_tpu_whose_name_can_not_be_read_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_NAME", "my tpu")
    backend, _ = choose(None)
    assert backend.name == "tpu"
    with pytest.raises(ConfigurationError) as raised:
        backend().start(None)
    assert raised.value.received == "TPU_NAME='my tpu'"


@given(st.integers(1, 40), st.integers(1, 50))
def test_each_core_belongs_to_one_rank_if_there_are_enough(cores: int, ranks: int) -> None:
    parts = [part_of(range(cores), rank, ranks) for rank in range(ranks)]
    assert all(parts)
    if ranks <= cores:
        assert [core for part in parts for core in part] == [*range(cores)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert {len(part) for part in parts} == {1}
        assert {core for part in parts for core in part} == {*range(cores)}


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    received = "Received: KERAS_DIST_BIND='yes'\nRemedy: Set it to 0 or 1, or unset it for 1"
    with pytest.raises(ConfigurationError, match=received):
        bound(Topology(1, 8, 1, 8), (1, 8), 16, {"KERAS_DIST_BIND": "yes"}, monkeypatch)


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_CPUS_PER_TASK": "4"}
BOUND = {**STEP, "SLURM_CPU_BIND_LIST": "0xf,0xf0"}
SHARED = {"KERAS_DIST_BIND": "0"}


@pytest.mark.parametrize(
    ("environ", "place", "cores", "share", "own", "threads"),
    [
        ({}, (1, 8), 16, 2, [2, 3], None),  # keras-dist run -np 8
        (SHARED, (1, 8), 16, 2, None, None),
        (BOUND, (0, 1), 4, 4, None, None),  # srun -n8 -c4, with a rank for each task
        ({**BOUND, **SHARED}, (0, 1), 4, 4, None, None),
        (BOUND, (1, 2), 4, 2, [2, 3], None),  # srun -n4 -c4 keras-dist run -np 2
        (STEP, (0, 1), 64, 4, list(range(8, 16)), 4),  # Slurm binds nothing
        ({**STEP, **SHARED}, (0, 1), 64, 4, None, None),
        (STEP, (1, 4), 64, 1, list(range(8, 16)), 1),
        (STEP, (1, 8), 2, 1, [0], None),  # fewer cores than it asked for
        ({"SLURM_CPUS_PER_TASK": "4"}, (1, 8), 64, 8, list(range(8, 16)), None),  # the script of sbatch
    ],
)
def test_the_cores_of_the_second_of_eight_ranks_of_a_host(
    environ: dict[str, str], place: tuple[int, int], cores: int, share: int, own: list[int] | None,
    threads: int | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert bound(Topology(1, 8, 1, 8), place, cores, environ, monkeypatch) == (share, own, threads)


def test_one_rank_on_a_host_has_as_many_threads_as_it_asked_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(Topology(1, 8, 0, 1), (0, 1), 64, STEP, monkeypatch) == (4, [*range(64)], 4)
    assert bound(Topology(1, 8, 0, 1), (0, 1), 64, {}, monkeypatch) == (64, None, None)


def test_a_rank_that_numactl_has_bound_keeps_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    two_of = Topology(1, 2, 1, 2)
    assert bound(two_of, (1, 2), 4, {}, monkeypatch, of_parent=8) == (4, None, None)
    assert bound(two_of, (1, 2), 4, {}, monkeypatch, of_parent=4) == (2, [2, 3], None)  # numactl keras-dist run


def bound(
    topology: Topology, place: tuple[int, int], cores: int, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    of_parent: int | None = None,
) -> tuple[int, list[int] | None, int | None]:  # fmt: skip
    """Returns what `bind` returns, and to which cores and threads it has limited the process."""
    own: list[list[int]] = []
    threads: list[int] = []
    with monkeypatch.context() as patch:
        for name in (*BOUND, *SHARED):
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(devices, "_place", lambda core: (0, 0, core))
        patch.setattr(devices, "_set_threads", threads.append)
        patch.setattr(devices, "cpu_limit", lambda: None)
        of_process = {0: cores, os.getppid(): of_parent or cores}
        patch.setattr(os, "sched_getaffinity", lambda process: {*range(of_process[process])})
        patch.setattr(os, "sched_setaffinity", lambda thread, given: own.append(given))
        share = bind(Launch("keras-dist run", topology, place=place))
    return share, own[0] if own else None, threads[0] if threads else None


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("own", "above", "limit"),
    [
        ("200000 100000", "max 100000", 2.0),
        ("max 100000", "150000 100000", 1.5),
        ("400000 100000", "300000 100000", 3.0),
        ("max 100000", "max 100000", None),
        (None, None, None),
    ],
)
def test_the_smallest_limit_of_a_group_and_those_above_counts(
    tmp_path: Path, own: str | None, above: str | None, limit: float | None
) -> None:
    for group, text in (("a/b", own), ("a", above)):
        if text:
            write(tmp_path / "groups" / group / "cpu.max", text)
    write(tmp_path / "of_process", "0::/a/b")
    assert cpu_limit(tmp_path / "groups", tmp_path / "of_process") == limit
