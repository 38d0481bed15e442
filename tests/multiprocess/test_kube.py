"""What `keras-dist kube` prints is run as Kubernetes runs it: a pod is a host with a network and processes of its own.

Tier: the Job of two nodes costs half a minute, so it is in CI; the others are in `make test-full`.
"""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forks import ForkServer
from tests.multiprocess.launches import (
    KERAS_DIST,
    NETNS,
    NETWORK,
    QUIET,
    RUN,
    RUN_SECONDS,
    SMALL_MODEL,
    assert_close,
    found,
    hosts_of,
    ip,
    output_of,
    until,
)

pytestmark = pytest.mark.timeout(300)

# With an argument, rank 1 of the first start waits after step 7: to be killed, or to be told to go.
TRAIN = f"""
import json, sys, time
from pathlib import Path
{SMALL_MODEL}
here = Path(__file__).parent

class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 7 and kd.rank() == 1 and not (here / "waits").exists():
            (here / "waits").touch()
            while not (here / "go").exists():
                time.sleep(0.1)

callbacks = [kd.callbacks.Commit(sys.argv[1], every=2), *[Wait() for _ in sys.argv[2:]]]
history = model.fit(x, y, batch_size=16, epochs=4, verbose=0, callbacks=callbacks).history
if kd.is_chief():
    print("found:", json.dumps([history, [weight.tolist() for weight in model.get_weights()]]))
"""
# What a pod has of its own: its host name, and its processes, which end with its process 1.
APART = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
NAMED = ("sh", "-c", 'hostname "$0" && exec "$@"')
NAMELESS_SECONDS = 5.0


def started(host: str, name: str, command: list[str], variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the container of a pod on a host."""
    environ = {**os.environ, **QUIET, **variables, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("wb") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, *APART, *NAMED, name, *command],
            env=environ, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip


def first_process(process: subprocess.Popen[bytes]) -> int:
    """Returns the process 1 of a container."""
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(first)


def set_address(host: str, address: str) -> None:
    ip("-n", host, "addr", "flush", "dev", "eth0")
    ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")


def set_names(hosts: list[str], names: dict[str, str]) -> None:
    """Makes names lead to addresses."""
    text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
    for host in hosts:
        file = NETNS / host / "hosts"
        if file.read_text() != text:
            file.write_text(text)  # in place: it is mounted


@dataclasses.dataclass
class Pod:
    job: dict[str, Any]
    index: int
    host: str  # its network namespace
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kills its process 1."""
        os.kill(first_process(self.process), 9)


class Kubernetes:
    """Runs the Jobs among manifests: makes failed pods again as these say, each with a new address.

    The names of the Service lead to new pods only after every launcher has said that it can't find the first pod, or,
    as TensorFlow's servers say nothing, after some seconds.
    """

    def __init__(self, folder: Path, hosts: list[str], manifests: list[dict[str, Any]]) -> None:
        self._folder, self._hosts = folder, hosts
        self._secrets = {each["metadata"]["name"]: each["stringData"] for each in manifests if each["kind"] == "Secret"}
        (self._service,) = (each["metadata"]["name"] for each in manifests if each["kind"] == "Service")
        jobs = [each for each in manifests if each["kind"] == "Job"]
        self._addresses = (f"{NETWORK}.{number}" for number in itertools.count(100))
        self._number = itertools.count()
        self._address_of: dict[str, str] = {}  # of each pod
        self._started = time.monotonic()
        self.failures = {job["metadata"]["name"]: 0 for job in jobs}
        every = [(job, index) for job in jobs for index in range(job["spec"]["completions"])]
        self.pods: list[Pod] = []
        self.logs: list[Path] = []
        for (job, index), host in zip(every, hosts, strict=False):
            self.pods.append(self._start(job, index, host))

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Waits until all pods have succeeded."""

        def have_ended() -> bool:
            meanwhile()
            self._tell_names()
            self.pods = [pod for pod in self.pods if pod.process.poll() != 0]
            for number, pod in enumerate(self.pods):
                if pod.process.poll() is not None:
                    self._record(pod)
                    self.pods[number] = self._start(pod.job, pod.index, pod.host)
            return not self.pods

        until(have_ended, RUN_SECONDS)

    def end(self) -> None:
        for pod in self.pods:
            pod.process.kill()
            pod.process.wait()

    def _start(self, job: dict[str, Any], index: int, host: str) -> Pod:
        name = f"{job['metadata']['name']}-{index}"
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["subdomain"] == self._service
        self._address_of[name] = address = next(self._addresses)
        set_address(host, address)
        self.logs.append(self._folder / f"{name}.{next(self._number)}.log")
        process = started(host, name, container["command"], self._variables(container, index), self.logs[-1])
        return Pod(job, index, host, process, self.logs[-1])

    def _variables(self, container: dict[str, Any], index: int) -> dict[str, str]:
        """Returns the variables of a container, as Kubernetes sets them."""
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                assert source["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
                value = str(index)
            else:
                value = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each["value"])
            variables[each["name"]] = value
        return variables

    def _tell_names(self) -> None:
        are_waited_for = all(b" waits " in pod.log.read_bytes() for pod in self.pods)
        if not (are_waited_for if self._secrets else time.monotonic() > self._started + NAMELESS_SECONDS):
            return
        set_names(self._hosts, {f"{name}.{self._service}": address for name, address in self._address_of.items()})

    def _record(self, pod: Pod) -> None:
        """Counts the failure of a pod, unless the policy says otherwise, and fails with its Job."""
        code, spec, name = pod.process.returncode, pod.job["spec"], pod.job["metadata"]["name"]
        code = 128 - code if code < 0 else code
        rules = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        assert all(rule["operator"] == "In" for rule in rules)
        self.failures[name] += not any(code in rule["values"] for rule in rules)
        assert self.failures[name] <= spec["backoffLimit"], pod.log.read_text()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    names = [f"kdpod{os.getpid()}-{index}" for index in range(4)]
    with hosts_of(names, "127.0.0.1 localhost\n"):
        yield names


Apply = Callable[..., Kubernetes]


@pytest.fixture
def apply(hosts: list[str], tmp_path: Path) -> Iterator[Apply]:
    """Prints manifests for the script, and starts their pods. Every path is the same in a pod as here."""
    started = []
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "runs").mkdir()

    def start(*options: str, arguments: tuple[str, ...] = ()) -> Kubernetes:
        runs = str(tmp_path / "runs")
        command = [*KERAS_DIST, "kube", "--image", "our/image", "--claim", f"runs:{runs}", *options]
        printed = output_of(*command, tmp_path / "train.py", runs, *arguments)
        started.append(Kubernetes(tmp_path, hosts, [*yaml.safe_load_all(printed)]))
        return started[-1]

    yield start
    for each in started:
        each.end()


def found_by(cluster: Kubernetes) -> Any:
    (text,) = (text for log in cluster.logs if "found:" in (text := log.read_text()))
    return found(text)


def undisturbed(folder: Path, *command: str) -> Any:
    return found(output_of(*command, folder / "train.py", folder / "elsewhere"))


@pytest.mark.ci
def test_a_job_of_two_pods_has_the_numbers_of_one_process(apply: Apply, forks: ForkServer, tmp_path: Path) -> None:
    cluster = apply("--workers", "2")
    cluster.run()
    assert_close(found_by(cluster), found(forks.run(TRAIN, tmp_path, str(tmp_path / "elsewhere")).stdout))


@pytest.mark.full
def test_a_job_goes_on_after_a_pod_was_killed(apply: Apply, tmp_path: Path) -> None:
    cluster = apply("--workers", "2", "--max-restarts", "1", arguments=("wait",))

    def kill() -> None:
        if (tmp_path / "waits").exists() and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            cluster.pods[1].kill()

    cluster.run(meanwhile=kill)
    assert cluster.failures == {"train": 2}  # one of each pod
    assert "resumes after step 6" in "".join(log.read_text() for log in cluster.logs)
    assert found_by(cluster) == undisturbed(tmp_path, *RUN, "-np", "2")


@pytest.mark.full
def test_jobs_of_parameter_servers_have_the_numbers_of_one_process(apply: Apply, tmp_path: Path) -> None:
    cluster = apply("--workers", "2", "--ps", "1")
    cluster.run()
    assert_close(found_by(cluster), undisturbed(tmp_path, sys.executable))
