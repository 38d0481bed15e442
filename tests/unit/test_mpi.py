"""What is decided before ranks send by MPI; `tests/multiprocess/test_mpi.py` has the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from keras_dist.environment import Topology, detect_launch
from keras_dist.errors import ConfigurationError
from keras_dist.launcher import cluster
from keras_dist.launcher.cluster import HorovodCluster

RANK = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"))}
RANK |= {f"OMPI_COMM_WORLD_LOCAL_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"))}


@pytest.mark.parametrize(
    ("ours", "launcher", "rendezvous", "binds"),
    [
        ({}, "mpirun", None, True),
        (
            {"KERAS_DIST_LAUNCHER": "local", "KERAS_DIST_STORE": "127.0.0.1:2222"},
            "keras-dist run",
            ("127.0.0.1", 2222),
            False,
        ),
    ],
    ids=["mpirun", "ours"],
)
def test_who_has_started_a_rank_of_mpi(
    ours: Mapping[str, str], launcher: str, rendezvous: tuple[str, int] | None, binds: bool
) -> None:
    launch = detect_launch({**RANK, **ours})
    assert launch is not None
    assert (launch.launcher, launch.rendezvous, launch.binds, launch.is_mpi) == (launcher, rendezvous, binds, True)
    assert launch.topology == Topology(1, 2, 1, 2)


def test_mpi_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="(?s)how the ranks send.*'udp'.*gloo or mpi"):
        HorovodCluster.make(2, {"HOROVOD_CONTROLLER": "udp"})
    monkeypatch.setattr(cluster, "built_with_mpi", lambda: False)
    with pytest.raises(ConfigurationError, match="(?s)built without MPI.*install-horovod --mpi"):
        HorovodCluster.make(2, {"HOROVOD_CONTROLLER": "mpi"})
    monkeypatch.setattr(cluster, "built_with_mpi", lambda: True)
    with pytest.raises(ConfigurationError, match="(?s)`mpirun` is not on the PATH.*openmpi-bin libopenmpi-dev"):
        HorovodCluster.make(2, {"HOROVOD_CONTROLLER": "mpi", "PATH": "/nowhere"})
