"""Who of the parameter servers' processes may be killed, at a random moment, which FAULT_SEED draws again."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_dist import environment
from keras_dist.launcher.cluster import ParameterServerCluster
from tests.forks import POLL_SECONDS, SECONDS, ForkServer
from tests.multiprocess.launches import SCRIPTS, assert_close, seconds_since

SCRIPT = str(SCRIPTS / "parameter_server_fault.py")
SEED = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(10**6))
END_SECONDS = 20.0  # on a busy machine, for workers and servers after the coordinator has gone
HANG_SECONDS = 4.0
FOUND_OUT_SECONDS = 90.0  # a few pings that aren't answered, each in a call that TensorFlow makes after the other
JOIN_SECONDS = 15.0  # of the coordinator, where somebody goes or hangs before he has come
RATE = 0.1  # of the script's asynchronous training
pytestmark = [pytest.mark.timeout(900), pytest.mark.full, pytest.mark.timed]

# So that who hangs is found out soon. Steps are short here: a server takes frequent pings for an attack only while no
# data flow.
QUICK_PINGS = {
    "TF_GRPC_DEFAULT_OPTIONS": "grpc.keepalive_time_ms=4000,grpc.keepalive_timeout_ms=4000,"
    "grpc.http2.ping_timeout_ms=4000,grpc.http2.max_pings_without_data=0,grpc.min_reconnect_backoff_ms=2000"
}
# After which the fault comes, and how long at most; how often the moment passes before.
MOMENTS: dict[str, tuple[float, int]] = {
    "start": (1.5, 1),  # of the coordinator, while it connects
    "placed": (0.1, 1),  # just after its first variables, while it makes the optimizer's variables on the server
    "trace": (0.5, 2),  # in the middle of the first step's trace, or the first evaluation's
    "step": (0.05, 15),
    "validation": (0.05, 9),
    "checkpoint": (0.05, 3),
    "prediction": (0.05, 5),
}
# What happens: in which mode, to whom, and who is started again.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "a worker": ("sync", ["worker-1"], []),
    "a worker that returns": ("sync", ["worker-1"], ["worker-1"]),
    "all workers": ("sync", ["worker-0", "worker-1"], ["worker-0", "worker-1"]),
    "a worker that hangs": ("sync", ["worker-0"], []),
    "the server": ("sync", ["ps-0"], []),
    "the coordinator": ("sync", ["chief-0"], []),
    "a worker, async": ("async", ["worker-0"], []),
    "all workers, async": ("async", ["worker-0", "worker-1"], ["worker-1", "worker-0"]),
    "the server that hangs": ("sync", ["ps-0"], []),
}


def make_plan(case: str) -> dict[str, Any]:
    """Returns when a fault is to happen: another moment in each round and for each case, and at random within it."""
    rng = random.Random(f"{case} {SEED}")
    moment = list(MOMENTS)[(list(CASES).index(case) + SEED) % len(MOMENTS)]
    longest, times = MOMENTS[moment]
    mode, who, _ = CASES[case]
    hangs = "hangs" in case
    return {
        "moment": moment, "times": rng.randrange(times), "delay": rng.uniform(0, longest),
        "mode": mode, "who": who, "hangs": hangs, "hang_seconds": HANG_SECONDS if hangs else 600.0,
        "join": JOIN_SECONDS if hangs or who == ["ps-0"] else 120.0,
    }  # fmt: skip


class Run:
    """A coordinator, two workers and a server, which run the script in a folder where they find the plan."""

    def __init__(self, forks: ForkServer, folder: Path, plan: dict[str, Any]) -> None:
        with ParameterServerCluster(2, {}) as cluster:
            configs = [cluster.environment(rank)[environment.TF_CONFIG] for rank in range(cluster.size)]
        tasks = [json.loads(config)["task"] for config in configs]
        self._configs = {
            f"{task['type']}-{task['index']}": config for task, config in zip(tasks, configs, strict=True)
        }
        self._forks, self._folder, self._plan = forks, folder, plan
        self.moment = plan["moment"]
        self._pids: dict[str, int] = {}
        (folder / "plan.json").write_text(json.dumps(plan))
        for name in reversed(self._configs):  # the coordinator last: it needs to know who the others are
            self._start(name)

    def _start(self, name: str) -> None:
        own = {environment.TF_CONFIG: self._configs[name], environment.JOIN_TIMEOUT: str(self._plan["join"])}
        own |= QUICK_PINGS if self._plan["hangs"] else {}
        log = self._folder / f"{name}.log"
        self._pids[name] = self._forks.start([SCRIPT, str(self._folder)], own, self._folder, log, log)
        (self._folder / "pids.new").write_text(json.dumps(self._pids))
        os.replace(self._folder / "pids.new", self._folder / "pids.json")

    def code(self, name: str) -> int | None:
        """Returns how a process has ended, `None` if it still runs."""
        return self._forks.exit_code(self._pids[name])

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Adds to what fails while it is entered what is needed to understand it, and to repeat it."""
        try:
            yield
        except BaseException as error:
            codes = {name: self.code(name) for name in self._configs}
            logs = [f"--- {name}\n{self.output(name)}" for name in self._configs]
            error.add_note("\n".join([f"FAULT_SEED={SEED}: {self._plan}, exit codes {codes}", *logs]))
            raise

    def output(self, name: str = "chief-0") -> str:
        file = self._folder / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, restart: Sequence[str] = ()) -> int:
        """Waits for the coordinator; starts processes again that were killed, where that is asked for."""
        deadline = time.monotonic() + SECONDS
        left = list(restart)
        with self.reported():
            while (code := self.code("chief-0")) is None:
                if time.monotonic() > deadline:
                    os.kill(self._pids["chief-0"], signal.SIGUSR1)
                    time.sleep(1.0)  # while it writes where it is
                    raise TimeoutError("still running")
                for name in [name for name in left if self.code(name) is not None]:
                    assert self.code(name) == -signal.SIGKILL
                    self._start(name)
                    left.remove(name)
                time.sleep(POLL_SECONDS)
        return code

    def codes_of_others(self) -> dict[str, int | None]:
        """Returns how workers and servers ended, which have to within some seconds unless they hang."""
        deadline = time.monotonic() + END_SECONDS
        hanging = self._plan["who"] if self._plan["hangs"] else []
        names = [name for name in self._configs if name not in ("chief-0", *hanging)]
        while None in (codes := {name: self.code(name) for name in names}).values() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return codes

    def seconds_since_fault(self) -> float:
        return seconds_since(self._folder / "fault")

    def result(self) -> dict[str, Any]:
        return result_in(self._folder)

    def close(self) -> None:
        """Kills what is left."""
        for name, pid in self._pids.items():
            if self.code(name) is None:
                os.kill(pid, signal.SIGKILL)
                while self.code(name) is None:
                    time.sleep(POLL_SECONDS)


def result_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares what two runs have written; one that was resumed knows its own epochs only."""
    for name, values in expected["history"].items():
        own = result["history"].get(name, [])
        assert_close(own, values[len(values) - len(own) :], atol=1e-12)
    names = {"evaluated", "predictions", "weights", "iterations"} & expected.keys()
    assert_close({name: result[name] for name in names}, {name: expected[name] for name in names}, atol=1e-12)


@pytest.fixture(scope="module")
def undisturbed(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one plain process computes, by mode."""
    results = {}
    for mode in ("sync", "async"):
        folder = tmp_path_factory.mktemp(mode)
        (folder / "plan.json").write_text(json.dumps({"mode": mode}))
        log = folder / "plain.log"
        assert forks.wait(forks.start([SCRIPT, str(folder)], {}, folder, log, log)) == 0, log.read_text()
        results[mode] = result_in(folder)
    return results


Start = Callable[..., Run]


@pytest.fixture
def start(forks: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Starts the run of a plan, whose processes are gone after the test."""
    runs: list[Run] = []

    def start(plan: dict[str, Any]) -> Run:
        runs.append(Run(forks, tmp_path, plan))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def restarted(case: str, run: Run) -> list[str]:
    """Who is started again. A worker that goes before the first step has to: all must have come once."""
    _, who, returning = CASES[case]
    return who if run.moment == "start" and not returning else returning


@pytest.mark.parametrize("case", ["a worker", "a worker that returns", "all workers", "a worker that hangs"])
def test_lost_workers_change_no_number(case: str, start: Start, undisturbed: dict[str, Any]) -> None:
    run = start(make_plan(case))
    code = run.wait([] if "hangs" in case else restarted(case, run))
    with run.reported():
        if "hangs" in case and run.moment == "start" and code:  # it had not been connected to
            assert "PeerLostError: Not all workers and servers have come within" in run.output()
            assert "missing: worker 0 at 127.0.0.1:" in run.output()
            return
        assert code == 0
        assert_same(run.result(), undisturbed["sync"])
        assert run.seconds_since_fault() > 0
        if "hangs" in case and run.moment in ("step", "validation", "checkpoint"):
            assert f"is lost (no answer for {HANG_SECONDS:g} s); 1 of 2 continue." in run.output()
        if case == "all workers" and run.moment in ("step", "validation"):
            assert " is lost (" in run.output()
            assert " is back." in run.output()


@pytest.mark.parametrize("case", ["the server", "the server that hangs"])
def test_a_lost_server_is_an_error_at_once_and_the_next_start_resumes(
    case: str, start: Start, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = start(make_plan(case))
    code = run.wait()
    with run.reported():
        assert code == 1
        assert "PeerLostError: " in run.output()
        assert "server 0 at 127.0.0.1:" in run.output()
        if "Not all workers and servers have come" not in run.output():  # it was there once, so nobody waits for it
            assert run.seconds_since_fault() < (FOUND_OUT_SECONDS if "hangs" in case else END_SECONDS)
            assert "Received: server 0 at 127.0.0.1:" in run.output()
            assert (" hangs, or is cut off" in run.output()) == ("hangs" in case)
        codes = run.codes_of_others()
        assert codes.pop("ps-0", None) == (None if "hangs" in case else -9)
        if run.moment != "start":  # else they may not have seen the coordinator, and wait for it
            assert codes == {"worker-0": 0, "worker-1": 0}
    run.close()
    assert_resumes(start(make_plan(case)), tmp_path, undisturbed)


def test_workers_and_servers_end_with_the_coordinator_and_the_next_start_resumes(
    start: Start, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = start(make_plan("the coordinator"))
    code = run.wait()
    with run.reported():
        assert code == -9
        codes = run.codes_of_others()
        assert codes.keys() == {"worker-0", "worker-1", "ps-0"}
        # At the start somebody may not have seen it yet, and waits for it.
        assert set(codes.values()) <= ({0, None} if run.moment == "start" else {0})
    run.close()
    assert_resumes(start(make_plan("the coordinator")), tmp_path, undisturbed)


def assert_resumes(again: Run, folder: Path, undisturbed: dict[str, Any]) -> None:
    code = again.wait()
    with again.reported():
        assert code == 0
        result = again.result()
        assert_same(result, undisturbed["sync"])
        assert len(result["history"].get("loss", [])) == int((folder / "left").read_text()), "it began anew"


@pytest.mark.parametrize("case", ["a worker, async", "all workers, async"])
def test_async_counts_every_example_once(case: str, start: Start, undisturbed: dict[str, Any]) -> None:
    """A step whose worker died while it applied its gradients is made again; nothing else is."""
    run = start(make_plan(case))
    code = run.wait(restarted(case, run))
    with run.reported():
        assert code == 0
        result, expected, killed = run.result(), undisturbed["async"], len(CASES[case][1])
        for key in ("counted", "val_counted"):
            np.testing.assert_allclose(result["history"][key], expected["history"][key], rtol=1e-12, err_msg=key)
        assert 0 <= result["iterations"] - expected["iterations"] <= killed
        for own, weight, largest in zip(result["weights"], expected["weights"], (3.0, 1.0), strict=True):
            np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9 + killed * RATE * largest)
            if not result["iterations"] - expected["iterations"] and run.moment != "step":
                np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def read_undisturbed(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out of data that workers read if nobody is killed."""
    run = Run(forks, tmp_path_factory.mktemp("undisturbed"), plan_of_reads("sync", "apart", moment=""))
    try:
        assert run.wait() == 0
        return run.result()
    finally:
        run.close()


def plan_of_reads(mode: str, reads: str, moment: str = "step") -> dict[str, Any]:
    """Returns the plan that kills worker 1 at a random moment of the second epoch; `"together"`, in its third step."""
    rng = random.Random(f"{mode} {reads} {SEED}")
    return {
        "moment": "" if reads == "together" else moment, "times": rng.randrange(6), "delay": rng.uniform(0, 0.03),
        "mode": mode, "reads": reads, "who": ["worker-1"], "hangs": False, "hang_seconds": 600.0, "join": 120.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "reads", "restart"),
    [("sync", "apart", []), ("sync", "apart", ["worker-1"]), ("async", "apart", []), ("async", "together", [])],
)
def test_the_part_of_a_lost_worker_is_read_on(
    mode: str, reads: str, restart: list[str], start: Start, read_undisturbed: dict[str, Any]
) -> None:
    """Each example once, by the steps that were answered; sync in the order that it had (shuffled).

    If steps are made together, the first two of the call in which worker 1 is killed are applied twice; the third one
    may have been applied in part.
    """
    run = start(plan_of_reads(mode, reads))
    code = run.wait(restart)
    with run.reported():
        assert code == 0
        assert run.result()["reads"] == [[1] * 50] * 4
        if mode == "sync":
            assert_same(run.result(), read_undisturbed)
        if reads == "together":
            assert 2 <= run.result()["iterations"] - 4 * 14 <= 3
            assert "worker 0 reads the part of worker 1, from batch 0 on" in run.output()
        elif not restart:
            assert "worker 0 reads the part of worker 1, from batch" in run.output()
