"""`keras-dist selftest`, on ranks that are well and on ranks that are not."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import keras_dist as kd
from keras_dist.launcher.job import WITH_RANKS
from keras_dist.launcher.nodes import free_ports
from tests.multiprocess.launches import (
    ADDRESSES,
    ETC_HOSTS,
    HOROVODRUN,
    KERAS_DIST,
    RUN,
    Commands,
    finished,
    hosts_of,
    inside,
)
from tests.multiprocess.test_nodes import SECRET

SELFTEST = (*KERAS_DIST, "selftest")
# A rank that is not well: one of its functions is replaced before the test starts.
BROKEN = """
import sys
from keras_dist import environment
from keras_dist.comm.processes import Collectives
from keras_dist.diagnostics import selftest_ranks
if environment.detect_launch().topology.rank == 1:
    {breakage}
sys.exit(selftest_ranks.main())
"""
ROUNDED = """
    right = Collectives.all_reduce
    def rounded(self, gradients, row, name):
        sums, rows = right(self, gradients, row, name)
        return [sums[0], sums[1] + 1, *sums[2:]], rows
    Collectives.all_reduce = rounded
"""
ELSEWHERE = "selftest_ranks._own_address = lambda backend: '192.0.2.1'"  # an address of documents, not of this host

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def start(commands: Commands, tmp_path: Path) -> Iterator[Commands]:
    yield commands
    assert [path for path in tmp_path.iterdir() if path.suffix != ".py"] == [], "it has written files"


def finish(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Returns the exit code, the lines of stdout and stderr."""
    code, out, err = finished(process, 150)
    return code, out.splitlines(), err


def check_passed(
    lines: list[str], backend: str, *, with_end: bool = True, places: str = r"2 on \S+ \(127\.0\.0\.1\)"
) -> None:
    checks = [*["ranks"] * 2, "sums", "network", *["speed"] * 3, "training", *(["end"] if with_end else [])]
    assert [line.partition(":")[0] for line in lines] == [f"ok      {name}" for name in checks]
    versions = rf"keras-dist {kd.__version__} keras 3\S+ tensorflow \S+( horovod 0\S+)?, Python 3"
    assert re.search(f"ranks: {versions}", lines[0])
    assert re.search(rf"ranks: 2 have joined, {places}; {backend}, ", lines[1])
    dtypes = "float16, bfloat16, float32, float64, int32, int64 and sparse rows"
    assert lines[2] == f"ok      sums: {dtypes}, exactly as computed in one place"
    for line, count in zip(lines[4:7], ("4 bytes", "1 MB", "25 MB"), strict=True):
        assert re.search(rf"speed: {count} summed in [\d.]+ [mµ]s; the network alone takes [\d.]+ [mµ]s$", line)
    difference = re.search(r"the weights of one process; the largest difference is (\S+)$", lines[7])
    assert difference
    assert float(difference[1]) < 1e-6


@pytest.mark.timed
@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.ci if name == "horovod" else pytest.mark.full) for name in WITH_RANKS],
)
def test_ranks_that_are_well(start: Commands, backend: str) -> None:
    code, lines, err = finish(start(*SELFTEST, "--backend", backend))
    assert code == 0, (lines, err)
    check_passed(lines, backend)


@pytest.mark.skipif(not HOROVODRUN.exists(), reason="there is no horovodrun")
@pytest.mark.full  # horovodrun itself: "horovodrun" of test_fault_table and test_hosts
@pytest.mark.timed  # of time: the network is compared with what one sum needs
def test_under_another_launcher(start: Commands) -> None:
    code, lines, err = finish(start(str(HOROVODRUN), "-np", "2", *SELFTEST))
    assert code == 0, (lines, err)
    check_passed([line.partition("<stdout>:")[2] for line in lines if "<stdout>:ok" in line], "horovod", with_end=False)


@pytest.mark.full
def test_two_hosts(start: Commands) -> None:
    names, port = [f"kd{os.getpid()}-self{index}" for index in range(2)], free_ports(1)[0]
    with hosts_of(names, ETC_HOSTS["debian"]):
        place = ("--nnodes", "2", "--rendezvous", f"{ADDRESSES[0]}:{port}", "-np", "1")
        both = [
            start(*inside(name, *SELFTEST, *place, "--node-rank", str(index)), KERAS_DIST_SECRET=SECRET)
            for index, name in enumerate(names)
        ]
        (code, lines, err), (code_1, lines_1, err_1) = map(finish, both)
    assert (code, code_1, lines_1) == (0, 0, []), err + err_1
    places = (rf"1 on {name} \({re.escape(address)}\)" for name, address in zip(names, ADDRESSES, strict=True))
    check_passed(lines, "horovod", places=", ".join(places))


@pytest.mark.parametrize(
    ("breakage", "found", "remedy"),
    [
        (ROUNDED, "sums: rank 1: the sum of 1000 numbers of float16 over the ranks is wrong", "Build Horovod again"),
        pytest.param(
            ELSEWHERE,
            "network: rank 1: TCP over 192.0.2.1 does not connect this rank and its neighbours: ",
            "A firewall between the hosts must let",
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.ci
def test_ranks_that_are_not_well(start: Commands, tmp_path: Path, breakage: str, found: str, remedy: str) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(breakage=breakage))
    code, lines, err = finish(start(*RUN, "-np", "2", str(script)))
    assert code == 1, (lines, err)
    *found_lines, last = lines
    assert last.startswith(f"        Remedy: {remedy}")
    assert any(line.startswith(f"FAILED  {found}") for line in found_lines)
    passed = [line for line in found_lines if line.startswith("ok ")]
    assert passed == found_lines[: len(passed)] != []  # nothing is tested after what fails


def test_one_rank_is_refused(start: Commands) -> None:
    code, lines, err = finish(start(*SELFTEST, "-np", "1"))
    assert (code, lines) == (2, [])
    assert "keras-dist selftest needs several ranks." in err
    assert "Traceback" not in err
