"""What `keras-dist kube` prints, under Kubernetes' own API server, controllers and scheduler. `make test-kubernetes`.

The test stands in for what nodes have: kubelet, network and DNS. A node is a network namespace that runs one pod.
"""

import base64
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keras_dist.launcher.nodes import free_ports
from tests.multiprocess.launches import KERAS_DIST, NETWORK, RUN, RUN_SECONDS, assert_close, found, output_of, until
from tests.multiprocess.test_kube import TRAIN, first_process, hosts, set_address, set_names, started, undisturbed

assert hosts  # a fixture
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
MISSING = ", ".join(name for name in PROGRAMS if shutil.which(name) is None)
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {MISSING}: https://kubernetes.io/releases/download"),
]
TOKEN = "of-the-test"
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "test",
    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    "users": [{"name": "test", "user": {"token": TOKEN}}],
}


class ControlPlane:
    """Starts etcd, the API server, the controllers and the scheduler, and talks to the server."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._processes = folder, list[subprocess.Popen[bytes]]()
        client, peer, api, controllers, scheduler = free_ports(5)
        self.config, key, tokens = folder / "config", folder / "key", folder / "tokens"
        self._url = f"https://127.0.0.1:{api}"
        clusters = [{"name": "test", "cluster": {"server": self._url, "insecure-skip-tls-verify": True}}]
        self.config.write_text(json.dumps({**KUBECONFIG, "clusters": clusters}))
        tokens.write_text(f"{TOKEN},test,test,system:masters\n")
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        peers, clients = f"http://127.0.0.1:{peer}", f"http://127.0.0.1:{client}"
        try:
            self._start(
                "etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls={clients}", f"--listen-peer-urls={peers}",
                f"--advertise-client-urls={clients}", f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
            )  # fmt: skip
            self._start(
                "kube-apiserver", f"--etcd-servers={clients}", "--bind-address=127.0.0.1", f"--secure-port={api}",
                f"--cert-dir={folder}/certificates", f"--token-auth-file={tokens}", "--authorization-mode=AlwaysAllow",
                "--service-account-issuer=https://test", f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}", "--service-cluster-ip-range=10.96.0.0/16",
                "--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            )  # fmt: skip
            until(self._is_ready)
            every = (f"--kubeconfig={self.config}", "--leader-elect=false", "--bind-address=127.0.0.1")
            # Nobody renews the leases of the nodes.
            own = (f"--secure-port={controllers}", "--controllers=*,-node-lifecycle-controller")
            self._start("kube-controller-manager", *every, *own)
            self._start("kube-scheduler", *every, f"--secure-port={scheduler}")
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Returns the answer of the API server."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60, context=ssl._create_unverified_context()) as answer:
            return json.load(answer)

    def _is_ready(self) -> bool:
        try:
            return bool(self.ask("GET", "/version") and self.ask("GET", "/api/v1/namespaces/default"))
        except OSError:
            return False

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log))

    def end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)


@dataclasses.dataclass
class Pod:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    is_told_to_end: bool = False
    has_ended: bool = False


class Nodes:
    """Runs the pods of a namespace that the scheduler has given to the hosts, as kubelets do, and resolves names."""

    def __init__(self, control: ControlPlane, namespace: str, hosts: list[str], folder: Path) -> None:
        self._control, self._hosts, self._folder = control, hosts, folder
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._secrets = f"/api/v1/namespaces/{namespace}/secrets"
        self._slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._addresses = (f"{NETWORK}.{number}" for number in itertools.count(100))
        self.pods: dict[str, Pod] = {}  # by their names

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Waits until all Jobs are complete. Returns their status."""
        jobs: dict[str, Any] = {}

        def are_complete() -> bool:
            meanwhile()
            self._sync()
            jobs.update({each["metadata"]["name"]: each["status"] for each in self._items(self._jobs)})
            conditions = [
                {each["type"] for each in status.get("conditions", []) if each["status"] == "True"}
                for status in jobs.values()
            ]
            assert not any("Failed" in each for each in conditions), self.logs
            return all("Complete" in each for each in conditions)

        until(are_complete, 2 * RUN_SECONDS, every=0.5)  # pods may start twice; the server works for each question
        return jobs

    @property
    def logs(self) -> list[str]:
        return [pod.log.read_text() for pod in self.pods.values()]

    def pod(self, start: str) -> Pod:
        (found,) = (pod for pod in self.pods.values() if pod.name.startswith(start))
        return found

    def evict(self, pod: Pod) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name}}
        self._control.ask("POST", f"{self._pods}/{pod.name}/eviction", eviction)

    def end(self) -> None:
        for pod in self.pods.values():
            pod.process.kill()
            pod.process.wait()
        for path in (self._jobs, self._pods):  # after a failure they would keep their nodes
            self._control.ask("DELETE", path, {"gracePeriodSeconds": 0, "propagationPolicy": "Background"})

    def _items(self, path: str) -> list[Any]:
        return list(self._control.ask("GET", path)["items"])

    def _sync(self) -> None:
        for manifest in self._items(self._pods):
            name, host = manifest["metadata"]["name"], manifest["spec"].get("nodeName")
            if name in self.pods:
                self._watch(self.pods[name], manifest)
            elif host and "deletionTimestamp" not in manifest["metadata"]:
                self.pods[name] = self._start(manifest, host)
        names = {}
        for each in self._items(self._slices):
            service = each["metadata"]["labels"]["kubernetes.io/service-name"]
            for endpoint in each["endpoints"] or []:
                names[f"{endpoint['hostname']}.{service}"] = endpoint["addresses"][0]
        set_names(self._hosts, names)

    def _start(self, manifest: dict[str, Any], host: str) -> Pod:
        """Starts a pod. It never becomes ready: the Service must give it a name all the same."""
        name, (container,) = manifest["metadata"]["name"], manifest["spec"]["containers"]
        address, log = next(self._addresses), self._folder / f"{name}.log"
        set_address(host, address)
        variables = self._variables(manifest, container)
        process = started(host, manifest["spec"]["hostname"], container["command"], variables, log)
        self._report(manifest, "Running", {"running": {}}, podIP=address, podIPs=[{"ip": address}])
        return Pod(name, process, log)

    def _watch(self, pod: Pod, manifest: dict[str, Any]) -> None:
        code, is_deleted = pod.process.poll(), "deletionTimestamp" in manifest["metadata"]
        if code is None and is_deleted and not pod.is_told_to_end:
            pod.is_told_to_end = True
            os.kill(first_process(pod.process), signal.SIGTERM)
        if code is None or pod.has_ended:
            return
        pod.has_ended = True
        state = {"terminated": {"exitCode": 128 - code if code < 0 else code}}
        self._report(manifest, "Failed" if code else "Succeeded", state)
        if is_deleted:
            self._control.ask("DELETE", f"{self._pods}/{pod.name}", {"gracePeriodSeconds": 0})

    def _report(self, manifest: dict[str, Any], phase: str, state: dict[str, Any], **status: Any) -> None:
        own = {"name": manifest["spec"]["containers"][0]["name"], "image": "i", "imageID": "", "state": state}
        status |= {"phase": phase, "containerStatuses": [{**own, "ready": False, "restartCount": 0}]}
        self._control.ask("PATCH", f"{self._pods}/{manifest['metadata']['name']}/status", {"status": status})

    def _variables(self, manifest: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
        variables: dict[str, str] = {}
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if key := source.get("secretKeyRef"):
                secret = self._control.ask("GET", f"{self._secrets}/{key['name']}")
                value = base64.b64decode(secret["data"][key["key"]]).decode()
            elif field := source.get("fieldRef"):
                _, kind, name, _ = re.split(r"metadata\.|\['|'\]", field["fieldPath"])
                value = manifest["metadata"][kind][name]
            else:
                value = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], each["value"])
            variables[each["name"]] = value
        return variables


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    started = ControlPlane(tmp_path_factory.mktemp("kubernetes"))
    yield started
    started.end()


Apply = Callable[..., Nodes]


@pytest.fixture
def apply(control: ControlPlane, hosts: list[str], tmp_path: Path) -> Iterator[Apply]:
    """Applies what is printed for the script, in a namespace of its own, with nodes and a volume."""
    namespace, runs = f"test-{time.monotonic_ns()}", tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    nodes = Nodes(control, namespace, hosts, tmp_path)

    def start(*options: str, arguments: tuple[str, ...] = ()) -> Nodes:
        own = f"/api/v1/namespaces/{namespace}"
        access = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        size, claim = {"storage": "1Gi"}, {"namespace": namespace, "name": "runs"}
        volume = {"capacity": size, "claimRef": claim, "hostPath": {"path": str(runs)}, **access}
        wanted = {"resources": {"requests": size}, "volumeName": namespace, **access}
        control.ask("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        control.ask("POST", "/api/v1/persistentvolumes", {"metadata": {"name": namespace}, "spec": volume})
        control.ask("POST", f"{own}/persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": wanted})
        for host in hosts:
            room = {"cpu": "4", "memory": "16Gi", "pods": "1"}
            status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
            control.ask("POST", "/api/v1/nodes", {"metadata": {"name": host}})
            control.ask("PATCH", f"/api/v1/nodes/{host}/status", {"status": status})
        command = [*KERAS_DIST, "kube", "--image", "our/image", "--namespace", namespace, "--claim", f"runs:{runs}"]
        printed = output_of(*command, *options, tmp_path / "train.py", str(runs), *arguments)
        kubectl = ["kubectl", f"--kubeconfig={control.config}", "apply", "--validate=strict", "-f", "-"]
        done = subprocess.run(kubectl, input=printed, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        return nodes

    yield start
    nodes.end()
    for node in control.ask("GET", "/api/v1/nodes")["items"]:
        control.ask("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")


def found_by(nodes: Nodes) -> Any:
    (text,) = (text for text in nodes.logs if "found:" in text)
    return found(text)


def test_a_job_of_two_pods_has_the_numbers_of_one_process(apply: Apply, tmp_path: Path) -> None:
    nodes = apply("--workers", "2", "--cpus", "2", "--memory", "4Gi")
    nodes.run()
    assert_close(found_by(nodes), undisturbed(tmp_path, sys.executable))


def test_a_job_resumes_after_a_pod_was_killed(apply: Apply, tmp_path: Path) -> None:
    nodes = apply("--workers", "2", "--max-restarts", "1", arguments=("wait",))

    def kill() -> None:
        if (tmp_path / "waits").exists() and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(first_process(nodes.pod("train-1-").process), signal.SIGKILL)

    assert nodes.run(meanwhile=kill)["train"]["failed"] == 2  # one of each pod
    assert found_by(nodes) == undisturbed(tmp_path, *RUN, "-np", "2")


def test_all_commit_and_resume_when_a_pod_is_evicted(apply: Apply, tmp_path: Path) -> None:
    """All pods end with the code that the Job does not count as a failure."""
    nodes = apply("--workers", "2", arguments=("wait",))

    def evict() -> None:
        if (tmp_path / "waits").exists() and not (tmp_path / "evicted").exists():
            (tmp_path / "evicted").touch()
            nodes.evict(nodes.pod("train-1-"))
        if any(pod.is_told_to_end for pod in nodes.pods.values()):
            (tmp_path / "go").touch()

    nodes.run(meanwhile=evict)
    assert [pod.process.returncode for pod in nodes.pods.values()] == [75, 75, 0, 0]
    assert found_by(nodes) == undisturbed(tmp_path, *RUN, "-np", "2")


def test_jobs_of_parameter_servers_have_the_numbers_of_one_process(apply: Apply, tmp_path: Path) -> None:
    nodes = apply("--workers", "2", "--ps", "1")
    assert nodes.run().keys() == {"train", "train-worker", "train-ps"}
    assert_close(found_by(nodes), undisturbed(tmp_path, sys.executable))
