"""What all tests share: pools of live ranks, the time limit, the search for what a test left behind, the results."""

import gc
import hashlib
import os
import pickle
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the ranks import test modules by name

from tests.forks import ForkedPool, ForkServer  # noqa: E402
from tests.leaks import LeftBehind  # noqa: E402
from tests.quick_start import sitecustomize  # noqa: E402, F401 - for this process; those that it starts have PYTHONPATH
from tests.results import CASE, Recorder, parse_shard  # noqa: E402

MARK = "KERAS_DIST_TEST_SESSION"


class Pools:
    """Pools by backend and size, started when they are first asked for; at most two are alive."""

    def __init__(self, forks: ForkServer, temporary: Path) -> None:
        self._forks = forks
        # Most of the time ranks wait for the next function: Horovod looks for work less often than by default.
        self._environ = {**os.environ, "TMPDIR": str(temporary), "HOROVOD_CYCLE_TIME": "1"}
        self._pools: dict[tuple[str, int], ForkedPool] = {}

    def get(self, backend: str, size: int) -> ForkedPool:
        """Returns the pool. The serial one, which computes what is expected, is kept beside any other."""
        key = backend, size
        if key not in self._pools:
            for other in [other for other in self._pools if other != ("serial", 1) and key != ("serial", 1)]:
                self._pools.pop(other).close()
            from tests.contract.clusters import REPLICAS_OF_A_RANK

            replicas = REPLICAS_OF_A_RANK.get(key, 1)
            self._pools[key] = ForkedPool(self._forks, size // replicas, backend, self._environ, replicas)
        return self._pools[key]

    def pids(self) -> set[int]:
        return {pid for pool in self._pools.values() for pid in pool.pids}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


@pytest.fixture(scope="session")
def pools(forks: ForkServer, worker_temporary: Path) -> Iterator[Pools]:
    """Live ranks for all tests of the session."""
    pools = Pools(forks, worker_temporary)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """What starts processes that have TensorFlow already."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def worker_temporary() -> Iterator[Path]:
    """The ranks' folder for temporary files, which are to be gone after each test."""
    with tempfile.TemporaryDirectory(prefix="keras_dist-tests-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, Callable[[], Any]], Any]:
    """Returns a result of the plain process, computed once for all clusters and all processes of `-n 3`."""
    folder, found = tmp_path_factory.getbasetemp(), dict[Any, Any]()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def result(key: Any, compute: Callable[[], Any]) -> Any:
        file = folder / f"golden-{hashlib.sha256(repr(key).encode()).hexdigest()}"
        if key not in found:
            found[key] = pickle.loads(file.read_bytes()) if file.exists() else compute()
            (own := file.with_suffix(f".{os.getpid()}")).write_bytes(pickle.dumps(found[key]))
            own.rename(file)
        return found[key]

    return result


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a listening port, a thread or a temporary file of ours."""
    if not {"contract", "multiprocess"} & set(request.path.parts):
        yield
        return
    pools: Pools = request.getfixturevalue("pools")
    forks: ForkServer = request.getfixturevalue("forks")
    temporary: Path = request.getfixturevalue("worker_temporary")
    left_behind = LeftBehind(MARK, os.environ[MARK], temporary, lambda: pools.pids() | forks.pids())
    yield
    left_behind.check()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FOLDER", type=Path, help="append a line for each test, and go on")
    parser.addoption("--shard", metavar="2/8", type=parse_shard, help="run a part of the tests: the second of eight")


def pytest_configure(config: pytest.Config) -> None:
    # A job in the background ignores Ctrl-C, one under nohup ignores SIGHUP, and all that it starts inherits this: the
    # tests of these would wait for ever. What is caught here is the default again in processes started from here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    os.environ[MARK] = uuid.uuid4().hex
    if not hasattr(config, "workerinput"):
        paths = [str(ROOT / "tests/quick_start"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    config.addinivalue_line("markers", "row(id, ...): the promised case that it proves")
    is_first = not hasattr(config, "workerinput")  # not one of the processes of `-n 2`
    folder: Path | None = config.getoption("--results") if is_first else None
    config.pluginmanager.register(Recorder(folder, config.getoption("--shard")))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test of a promised case on every registered backend, or where its tier runs it; others on all."""
    if "cluster" not in metafunc.fixturenames:
        return
    from tests.contract.clusters import clusters, clusters_of

    mark = metafunc.definition.get_closest_marker("row")
    chosen = clusters(mark.kwargs.get("sizes", ()) if mark else (3, 4))
    asked = metafunc.config.getoption("markexpr")
    if mark and "not full" in asked and "or not full" not in asked:  # to make all takes seconds
        chosen = [cluster for cluster in chosen if "{}-{}".format(*cluster) in clusters_of(mark)] or chosen[:1]
    metafunc.parametrize("cluster", chosen, ids=[f"{backend}-{size}" for backend, size in chosen])


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` doesn't ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one cluster follow one another, so that its ranks are started once."""
    from tests.contract.clusters import clusters_of

    for item in items:
        if (mark := item.get_closest_marker("row")) is not None:
            backend, size = cluster_of(item)
            item.user_properties.append((CASE, [mark.args[0], backend, size]))
            if f"{backend}-{size}" not in clusters_of(mark):
                item.add_marker("full")
    items.sort(key=lambda item: (cluster_of(item)[0] not in ("", "serial"), cluster_of(item)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: it needs no search for garbage, which takes half a second each time."""
    gc.collect()
    gc.freeze()


def cluster_of(item: pytest.Item) -> tuple[str, int]:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("cluster", ("", 0)) if callspec else ("", 0)


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]
    """What `-n 3` hands to one process as a whole: the cases of one backend, of horovod in two halves; else a file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in ("tests/multiprocess/test_resume.py", "tests/multiprocess/test_fault_table.py"):
            return nodeid
        backend = re.search(r"\[(\w+)-\d", nodeid) if file.startswith("tests/contract/") else None
        if backend is None:
            return file
        is_first = backend[1] == "horovod" and file < "tests/contract/test_losses.py"
        return f"contract of {backend[1]}, {'first' if is_first else 'second'} half"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SideBySide:
    return SideBySide(config, log)
