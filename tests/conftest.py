"""What all tests share: pools of live ranks, the time limit, the search for what a test left behind, the results."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import test modules by name

from keras_dist.testing import WorkerPool  # noqa: E402
from tests.leaks import LeftBehind  # noqa: E402
from tests.results import SCHEDULE, Results  # noqa: E402

MARK = "KERAS_DIST_TEST_SESSION"
RESULTS = pytest.StashKey[Results]()
CASE = "promised case"
FAULT = "fault"


class Pools:
    """Pools by backend and size, started when they are first asked for; at most two are alive."""

    def __init__(self, temporary: Path) -> None:
        self._environ = {**os.environ, "TMPDIR": str(temporary)}
        self._pools: dict[tuple[str, int], WorkerPool] = {}

    def get(self, backend: str, size: int) -> WorkerPool:
        """Returns the pool. The serial one, which computes what is expected, is kept beside any other."""
        key = backend, size
        if key not in self._pools:
            for other in [other for other in self._pools if other != ("serial", 1) and key != ("serial", 1)]:
                self._pools.pop(other).close()
            self._pools[key] = WorkerPool(size, backend, environ=self._environ)
        return self._pools[key]

    def pids(self) -> set[int]:
        return {pid for pool in self._pools.values() for pid in pool.pids}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@pytest.fixture(scope="session")
def pools(worker_temporary: Path) -> Iterator[Pools]:
    """Live ranks for all tests of the session."""
    pools = Pools(worker_temporary)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def worker_temporary() -> Iterator[Path]:
    """The ranks' folder for temporary files, which are to be gone after each test."""
    with tempfile.TemporaryDirectory(prefix="keras_dist-tests-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a listening port, a thread or a temporary file of ours."""
    if not {"contract", "multiprocess"} & set(request.path.parts):
        yield
        return
    pools: Pools = request.getfixturevalue("pools")
    temporary: Path = request.getfixturevalue("worker_temporary")
    left_behind = LeftBehind(os.environ[MARK], temporary, pools.pids)
    yield
    left_behind.check()


# --- Hooks ---


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FILE", help="write what is found of cases and faults to a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    # A job in the background ignores Ctrl-C, one under nohup ignores SIGHUP, and all that it starts inherits this: the
    # tests of these would wait for ever. What is caught here is the default again in processes started from here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    os.environ[MARK] = uuid.uuid4().hex
    config.addinivalue_line("markers", "row(id, sizes): the promised case of tests/contract/rows.py that it proves")
    config.stash[RESULTS] = Results()
    config.pluginmanager.register(Recorder(config.stash[RESULTS]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test of a promised case on every registered backend."""
    if "cluster" not in metafunc.fixturenames:
        return
    from tests.contract.clusters import clusters

    mark = metafunc.definition.get_closest_marker("row")
    chosen = clusters(mark.kwargs.get("sizes", ()) if mark else ())
    metafunc.parametrize("cluster", chosen, ids=[f"{backend}-{size}" for backend, size in chosen])


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` doesn't ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one cluster follow one another, so that its ranks are started once."""
    from tests.contract.clusters import run_of

    for item in items:
        if (mark := item.get_closest_marker("row")) is not None:
            row, cluster = mark.args[0], cluster_of(item)
            item.user_properties.append((CASE, [row, *cluster]))
            if (run := run_of(item.path.stem, row, cluster)) != "usual":
                item.add_marker(run)
    items.sort(key=lambda item: (cluster_of(item)[0] not in ("", "serial"), cluster_of(item)))


def cluster_of(item: pytest.Item) -> tuple[str, int]:
    callspec = getattr(item, "callspec", None)
    cluster: tuple[str, int] = callspec.params.get("cluster", ("", 0)) if callspec else ("", 0)
    return cluster


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]
    """What `-n 2` hands to one process as a whole: the cases of one backend, whose ranks live there; else a file.

    Schedules of faults share nothing and take long.
    """

    def _split_scope(self, nodeid: str) -> str:
        backend = re.search(r"\[(\w+)-\d", nodeid) if nodeid.startswith("tests/contract/") else None
        if nodeid.startswith("tests/multiprocess/test_resume.py"):
            return nodeid
        return f"contract of {backend[1]}" if backend else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SideBySide:
    return SideBySide(config, log)


class Recorder:
    """Hands the outcomes to `Results`: of this process, or of all that run tests side by side."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = dict(report.user_properties).get(CASE)
        if case is not None:
            row, backend, size = case
            self._results.add(row, (backend, size), report)
        fault = dict(report.user_properties).get(FAULT)
        if fault is not None:
            self._results.add_fault(*fault, report)
        schedule = dict(report.user_properties).get(SCHEDULE)
        if schedule is not None:
            self._results.add_schedule(*schedule, report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--results")
    if target and not hasattr(session.config, "workerinput"):  # the processes of `-n 2` send theirs to the first
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(session.config.stash[RESULTS].as_json(), indent=1) + "\n")
