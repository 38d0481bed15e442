"""`keras-dist kube`: Kubernetes's own schemas accept the manifests, and launchers that get their variables meet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from keras_dist.cli import main
from keras_dist.launcher.nodes import free_ports
from tests.multiprocess.launches import SMALL_MODEL

LATEST = kubernetes_validate.latest_version()
VERSIONS = (LATEST, *(pytest.param(version, marks=pytest.mark.ci) for version in ("1.31", "1.34")))  # read in seconds
ALL = [
    "--name", "digits", "--namespace", "ml", "--workers", "4", "--gpus", "2", "--cpus", "500m", "--memory", "16Gi",
    "--claim", "data:/data", "--claim", "runs:/runs", "--backend", "horovod", "--max-restarts", "3", "--grace", "45",
]  # fmt: skip
SERVERS = ["--name", "ads", "--workers", "2", "--ps", "1", "--gpus", "1", "--max-restarts", "3"]


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, list[dict[str, Any]]]:
    assert main(["kube", "--image", "my/image", *options]) == 0
    text = capsys.readouterr().out
    return text, list(yaml.safe_load_all(text))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "options",
    [["train.py"], [*ALL, "-m", "project.train", "--epochs", "3"], [*SERVERS, "train.py"]],
    ids=["few", "all", "servers"],
)
def test_the_schemas_of_kubernetes_accept_all_manifests(
    options: list[str], version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, manifests = printed(capsys, *options)
    jobs = ["Job"] * (3 if "--ps" in options else 1)
    assert [manifest["kind"] for manifest in manifests] == ["Service", "NetworkPolicy", *jobs]
    assert "&id" not in text  # an alias of YAML
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_refuse_a_manifest_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    job = printed(capsys, "train.py")[1][2]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError, match="completionsMode"):
        kubernetes_validate.validate(job, LATEST, strict=True)


def test_the_job_has_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text, (service, policy, job) = printed(capsys, *ALL, "train.py", "--epochs", "3")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [
        "keras-dist", "run", "-np", "2", "--backend", "horovod", "--grace", "45", "train.py", "--epochs", "3",
    ]  # fmt: skip
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (4, 4, 12)
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": "16Gi", "nvidia.com/gpu": 2}
    assert pod["terminationGracePeriodSeconds"] > 45
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    assert [*mounts.values()] == ["/dev/shm", "/data", "/runs"]
    assert [claims[name] for name in mounts] == [None, {"claimName": "data"}, {"claimName": "runs"}]
    labels = {"app.kubernetes.io/instance": "digits"}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert job["spec"]["template"]["metadata"]["labels"] == labels
    assert {manifest["metadata"]["namespace"] for manifest in (service, policy, job)} == {"ml"}
    assert "kubectl create secret generic digits " in text


def test_pods_that_get_these_variables_are_the_nodes_of_one_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, os\n"
        "told = [os.environ['HOROVOD_' + name] for name in ('RANK', 'SIZE')]\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + told[0]).write_text(' of '.join(told))\n"
    )
    job = printed(capsys, "--workers", "2", "-np", "2", "--backend", "horovod", str(script))[1][2]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert re.fullmatch(r"train-0\.train:\d+", variables["KERAS_DIST_RENDEZVOUS"])  # Kubernetes's name of the first pod
    variables["KERAS_DIST_RENDEZVOUS"] = f"127.0.0.1:{free_ports(1)[0]}"
    variables["KERAS_DIST_SECRET"] = "of-this-test-0123456789"
    command = [sys.executable, "-m", "keras_dist", *container["command"][1:]]
    pods = [
        subprocess.Popen(command, env={**os.environ, **variables, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(job["spec"]["completions"])
    ]
    try:
        assert [pod.wait(60) for pod in pods] == [0, 0]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert sorted(path.read_text() for path in tmp_path.glob("rank*")) == [f"{rank} of 4" for rank in range(4)]


def test_parameter_servers_have_a_job_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    text, (service, _, *jobs) = printed(capsys, *SERVERS, "-m", "project.train", "--epochs", "3")
    assert [(job["metadata"]["name"], job["spec"]["completions"]) for job in jobs] == [
        ("ads", 1), ("ads-worker", 2), ("ads-ps", 1),
    ]  # fmt: skip
    assert [job["spec"]["backoffLimit"] for job in jobs] == [0, 6, 0]  # a worker may come back
    for job in jobs:
        assert job["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["python", "-m", "project.train", "--epochs", "3"]
        has_gpu = job["metadata"]["name"] == "ads-worker"
        assert container["resources"]["limits"] == ({"nvidia.com/gpu": 1} if has_gpu else {})
        index, config = container["env"]
        assert (index["name"], config["name"]) == ("JOB_COMPLETION_INDEX", "TF_CONFIG")
        assert json.loads(in_pod(config["value"], 7))["task"]["index"] == 7
    assert "secret" not in text


@pytest.mark.parametrize(
    ("target", "command"),
    [
        (["--", "train.py", "--epochs", "3"], ["python", "train.py", "--epochs", "3"]),
        (["--", "python3", "-X", "dev", "train.py"], ["python3", "-X", "dev", "train.py"]),
    ],
)
def test_what_the_pods_of_parameter_servers_run(
    target: list[str], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for job in printed(capsys, *SERVERS, *target)[1][2:]:
        assert job["spec"]["template"]["spec"]["containers"][0]["command"] == command


def in_pod(value: str, index: int) -> str:
    """Returns the value of a variable with what Kubernetes puts in."""
    return value.replace("$(JOB_COMPLETION_INDEX)", str(index))


@pytest.mark.ci
def test_pods_with_these_variables_train_with_parameter_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    trained = tmp_path / "trained.keras"
    script.write_text(f"{SMALL_MODEL}\nmodel.fit(x, y, batch_size=16, verbose=0)\nmodel.save({str(trained)!r})\n")
    jobs = printed(capsys, "--workers", "2", "--ps", "1", str(script))[1][2:]
    tasks = []
    for job in jobs:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["python", str(script)]
        tasks += [in_pod(container["env"][1]["value"], index) for index in range(job["spec"]["completions"])]
    # Every pod has an address of its own; here all are on one machine.
    names = [name for each in json.loads(tasks[0])["cluster"].values() for name in each]
    assert names == [f"train{pod}.train:29400" for pod in ("-0", "-worker-0", "-worker-1", "-ps-0")]
    addresses = dict(zip(names, (f"127.0.0.1:{port}" for port in free_ports(len(names))), strict=True))
    pods = []
    for task in tasks:
        for name, address in addresses.items():
            task = task.replace(name, address)
        environ = {**os.environ, "TF_CONFIG": task, "TF_CPP_MIN_LOG_LEVEL": "2"}
        pods.append(subprocess.Popen([sys.executable, str(script)], env=environ))
    try:
        assert [pod.wait(120) for pod in pods] == [0, 0, 0, 0]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert trained.is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "There is nothing to run."),
        (["--ps", "1", "--"], "There is nothing to run."),
        (["--name", "My_Job", "train.py"], "The name can't be that of a Service and of pods.\nReceived: --name My_Job"),
        (["--workers", "0", "train.py"], "--workers is at least 1.\nReceived: --workers 0"),
        (["-np", "0", "train.py"], "-np is at least 1.\nReceived: -np 0"),
        (["--ps", "0", "train.py"], "--ps is at least 1.\nReceived: --ps 0"),
        (["--ps", "1", "-np", "2", "train.py"], "Parameter servers have no ranks: each of their pods is one process."),
        (["--max-restarts", "-1", "train.py"], "--max-restarts is at least 0.\nReceived: --max-restarts -1"),
        (["--claim", "data", "train.py"], "--claim names a PersistentVolumeClaim and where it is mounted."),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kube", "--image", "my/image", *options]) == 2
    assert message in capsys.readouterr().err
