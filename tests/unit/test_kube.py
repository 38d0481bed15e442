"""`keras-dist kube`: Kubernetes's own schemas accept the manifests, and launchers that get their variables meet."""

from __future__ import annotations

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from keras_dist.cli import main
from keras_dist.launcher.nodes import told_by

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
    jobs = ["Job"] * 3 if "--ps" in options else ["Secret", "Job"]
    assert [manifest["kind"] for manifest in manifests] == ["Service", "NetworkPolicy", *jobs]
    assert "&id" not in text  # an alias of YAML
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_job_has_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    service, policy, secret, job = printed(capsys, *ALL, "train.py", "--epochs", "3")[1]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == [
        "keras-dist", "run", "-np", "2", "--backend", "horovod", "--grace", "45", "train.py", "--epochs", "3",
    ]  # fmt: skip
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (4, 4, 12)
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": "16Gi", "nvidia.com/gpu": 2}
    assert pod["terminationGracePeriodSeconds"] > 45
    variables = {each["name"]: each.get("value") for each in container["env"]} | {"JOB_COMPLETION_INDEX": "2"}
    assert told_by(variables) == {"nnodes": "4", "node_rank": "2", "rendezvous": "digits-0.digits:29400"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
    assert [*mounts.values()] == ["/dev/shm", "/data", "/runs"]
    assert [claims[name] for name in mounts] == [None, {"claimName": "data"}, {"claimName": "runs"}]
    labels = {"app.kubernetes.io/instance": "digits"}
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert job["spec"]["template"]["metadata"]["labels"] == labels
    assert {manifest["metadata"]["namespace"] for manifest in (service, policy, secret, job)} == {"ml"}
    (drawn,) = secret["stringData"].items()
    source = next(each["valueFrom"] for each in container["env"] if each["name"] == "KERAS_DIST_SECRET")
    assert source == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": drawn[0]}}
    assert re.fullmatch(r"[0-9a-f]{32}", drawn[1])
    assert printed(capsys, *ALL, "train.py")[1][2]["stringData"][drawn[0]] != drawn[1]


def test_an_argument_that_kubectl_would_read_as_a_number_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    text, (*_, job) = printed(capsys, "train.py", "--rate", "1e-3", "--steps", "0o17")
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][-4:] == ["--rate", "1e-3", "--steps", "0o17"]
    assert re.findall(r"- ('.*')", text) == ["'1'", "'30'", "'1e-3'", "'0o17'"]


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
        assert json.loads(config["value"].replace("$(JOB_COMPLETION_INDEX)", "7"))["task"]["index"] == 7
        cluster = json.loads(config["value"].replace("$(JOB_COMPLETION_INDEX)", "0"))["cluster"]
        addresses = [name for each in cluster.values() for name in each]
        assert addresses == [f"ads{pod}.ads:29400" for pod in ("-0", "-worker-0", "-worker-1", "-ps-0")]
    assert "secret" not in text


def test_the_models_of_kubeflow_accept_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "the models of Kubeflow are not installed: pip install kubeflow-trainer-api"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    policy, secret, runtime, job = printed(capsys, *ALL, "--kubeflow", "train.py")[1]
    for manifest in (policy, secret):
        kubernetes_validate.validate(manifest, LATEST, strict=True)
    for model, manifest in ((models.TrainerV1alpha1TrainingRuntime, runtime), (models.TrainerV1alpha1TrainJob, job)):
        assert model.from_dict(manifest).to_dict() == manifest  # it leaves out what it doesn't know
        assert f"TrainerV1alpha1{manifest['kind']}" == model.__name__
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert [each["name"] for each in container["env"]] == ["KERAS_DIST_SECRET"]  # Kubeflow tells a pod its place


def test_kubeflow_has_a_tf_job_for_parameter_servers(capsys: pytest.CaptureFixture[str]) -> None:
    policy, job = printed(capsys, *SERVERS, "--kubeflow", "train.py")[1]
    kubernetes_validate.validate(policy, LATEST, strict=True)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    assert job["spec"]["runPolicy"] == {"backoffLimit": 6}
    replicas = job["spec"]["tfReplicaSpecs"]
    found = {kind: (each["replicas"], each["restartPolicy"]) for kind, each in replicas.items()}
    assert found == {"Chief": (1, "Never"), "Worker": (2, "OnFailure"), "PS": (1, "Never")}
    for each in replicas.values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(pod, LATEST, strict=True)
        (container,) = pod["spec"]["containers"]
        assert (container["name"], container["env"], container["command"]) == ("tensorflow", [], ["python", "train.py"])
