"""Runs of a coordinator, workers and servers of which some are killed, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_dist import environment
from keras_dist.launcher.cluster import ParameterServerCluster
from tests.forks import POLL_SECONDS, SECONDS, ForkServer
from tests.multiprocess.launches import SCRIPTS

SCRIPT = SCRIPTS / "parameter_server_fault.py"
END_SECONDS = 20.0  # on a busy machine, for workers and servers after the coordinator has gone

# So that who hangs is found out soon. Steps are short here: a server takes frequent pings for an attack only while no
# data flow.
_QUICK_PINGS = {
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


def make_plan(case: str, number: int, seed: int) -> dict[str, Any]:
    """Returns when a fault is to happen: another moment in each round and for each case, and at random within it."""
    rng = random.Random(f"{case} {seed}")
    moment = list(MOMENTS)[(number + seed) % len(MOMENTS)]
    longest, times = MOMENTS[moment]
    return {"moment": moment, "times": rng.randrange(times), "delay": rng.uniform(0, longest), "seed": seed}


class Run:
    """A coordinator, two workers and a server, which run a script in a folder where they find the plan."""

    def __init__(self, forks: ForkServer, folder: Path, plan: dict[str, Any], script: Path = SCRIPT) -> None:
        with ParameterServerCluster(2, {}) as cluster:
            configs = [cluster.environment(rank)[environment.TF_CONFIG] for rank in range(cluster.size)]
        self._forks, self._folder, self._plan, self._script = forks, folder, plan, script
        self.moment = plan["moment"]
        self._configs = {_name_of(config): config for config in configs}
        self._pids: dict[str, int] = {}
        (folder / "plan.json").write_text(json.dumps(plan))
        for name in reversed(self._configs):  # the coordinator last: it needs to know who the others are
            self._start(name)

    @staticmethod
    def plain(forks: ForkServer, folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
        """Returns what one plain process computes."""
        (folder / "plan.json").write_text(json.dumps(plan))
        log = folder / "plain.log"
        assert forks.wait(forks.start([str(SCRIPT), str(folder)], {}, folder, log, log)) == 0, log.read_text()
        return _result(folder)

    def _start(self, name: str) -> None:
        own = {environment.TF_CONFIG: self._configs[name], environment.JOIN_TIMEOUT: str(self._plan["join"])}
        own |= _QUICK_PINGS if self._plan.get("hangs") else {}
        command, log = [str(self._script), str(self._folder)], self._folder / f"{name}.log"
        self._pids[name] = self._forks.start(command, own, self._folder, log, log)
        (self._folder / "pids.new").write_text(json.dumps(self._pids))
        os.replace(self._folder / "pids.new", self._folder / "pids.json")

    def code(self, name: str) -> int | None:
        """Returns how a process has ended, `None` if it still runs."""
        return self._forks.exit_code(self._pids[name])

    def report(self) -> str:
        """Returns what is needed to understand a failure, and to repeat it."""
        logs = [f"--- {name}\n{self.output(name)}" for name in self._configs]
        codes = {name: self.code(name) for name in self._configs}
        return "\n".join([f"FAULT_SEED={self._plan['seed']}: {self._plan}, exit codes {codes}", *logs])

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Adds the report to what fails while it is entered."""
        try:
            yield
        except BaseException as error:
            error.add_note(self.report())
            raise

    def output(self, name: str = "chief-0") -> str:
        file = self._folder / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, restart: Sequence[str] = ()) -> int:
        """Waits for the coordinator; starts processes again that were killed, where that is asked for."""
        deadline = time.monotonic() + SECONDS
        left = list(restart)
        while (code := self.code("chief-0")) is None:
            assert time.monotonic() < deadline, self._stuck()
            for name in [name for name in left if self.code(name) is not None]:
                assert self.code(name) == -signal.SIGKILL, self.report()
                self._start(name)
                left.remove(name)
            time.sleep(POLL_SECONDS)
        return code

    def _stuck(self) -> str:
        """Returns the report of a run that does not end, with where its coordinator is."""
        os.kill(self._pids["chief-0"], signal.SIGUSR1)
        time.sleep(1.0)  # while it writes that
        return f"still running\n{self.report()}"

    def codes_of_others(self) -> dict[str, int | None]:
        """Returns how workers and servers ended, which have to within some seconds unless they hang."""
        deadline = time.monotonic() + END_SECONDS
        hanging = self._plan["who"] if self._plan.get("hangs") else []
        names = [name for name in self._configs if name not in ("chief-0", *hanging)]
        while None in (codes := {name: self.code(name) for name in names}).values() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return codes

    def seconds_since_fault(self) -> float:
        return time.monotonic() - float((self._folder / "fault").read_text())

    def epochs_left(self) -> int:
        """Returns how many epochs a run had to make that went on from the last checkpoint."""
        return int((self._folder / "left").read_text())

    def result(self) -> dict[str, Any]:
        return _result(self._folder)

    def close(self) -> None:
        """Kills what is left."""
        for name, pid in self._pids.items():
            if self.code(name) is None:
                os.kill(pid, signal.SIGKILL)
                while self.code(name) is None:
                    time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def in_mode(mode: str, max_staleness: int | None = None) -> Iterator[None]:
    """Lets the coordinator of a pool, which is in `"sync"` mode, train in another mode while this is entered."""
    from keras_dist.cluster import current_backend

    backend: Any = current_backend()
    backend._options.update(mode=mode, max_staleness=max_staleness)
    try:
        yield
    finally:
        backend._options.update(mode="sync", max_staleness=None)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares what two runs have written; one that was resumed knows its own epochs only."""
    for key, values in expected["history"].items():
        own = result["history"].get(key, [])
        np.testing.assert_allclose(own, values[-len(own) :] if own else [], rtol=1e-9, atol=1e-12, err_msg=key)
    for key in {"evaluated", "predictions"} & expected.keys():
        np.testing.assert_allclose(result[key], expected[key], rtol=1e-9, atol=1e-12, err_msg=key)
    for own, weight in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-9, atol=1e-12)
    assert result["iterations"] == expected["iterations"]


def _result(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _name_of(config: str) -> str:
    task = json.loads(config)["task"]
    return f"{task['type']}-{task['index']}"
