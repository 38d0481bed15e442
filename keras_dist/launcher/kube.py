"""`keras-dist kube`: Indexed Jobs of Kubernetes; the pods are nodes of `keras-dist run` or tasks of `TF_CONFIG`."""

import argparse
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.job import COMMIT_SECONDS, WITH_RANKS, command_of
from keras_dist.launcher.nodes import JOB_INDEX

PORT = 29400
_KEY = "secret"  # of the Secret
_GPU, _LABEL = "nvidia.com/gpu", "app.kubernetes.io/instance"
_INDEX_OF_POD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,43}[a-z0-9])?")  # of a DNS label, with room for the kind and the index of a pod
_LIKE_A_NUMBER = re.compile(r"[-+.]?\d")

EPILOG = """\
examples:
  keras-dist kube --image my/image --workers 4 train.py | kubectl apply -f -
  keras-dist kube --image my/image --workers 2 --gpus 8 --claim data:/data train.py --epochs 10 > train.yaml
  keras-dist kube --image my/image --workers 4 --ps 2 train.py          parameter servers

It prints YAML and changes nothing. The Service gives the pods names, the NetworkPolicy lets only pods of the job reach
them, and the Job runs `keras-dist run` in each pod. The pods recognize each other by the Secret, a new one each time:
keep the output where nobody else can read it. The image needs keras_dist, Horovod (docker/ has an example) and the
script.

With --kubeflow it prints a TrainJob of Kubeflow's Trainer and its TrainingRuntime, with --ps a TFJob of the Training
Operator, with --mpi an MPIJob of the MPI Operator, whose image needs sshd, Open MPI and a Horovod with MPI. Kubeflow
names the pods and tells them their places, so there is no Service.

With --ps there is a Job for the coordinator, one for the workers and one for the servers. All pods run the script with
a TF_CONFIG; `kd.init()` makes servers of the workers and parameter servers, which end with the coordinator.
"""
HEAD = """\
# By `keras-dist kube`.
# kubectl apply -f THIS_FILE    Output: kubectl logs -f {first}    End: kubectl delete -f THIS_FILE
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "keras-dist kube --image IMAGE [options] (script.py | -m module | -- program) [arguments]"
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--image", required=True, help="the container image")
    add("--name", default="train", help="of the job, the Service and the Secret (default: train)")
    add("--namespace", help="of all of them (default: that of kubectl)")
    add("--workers", type=int, default=1, metavar="N", help="number of pods (default: 1)")
    add("--ps", type=int, metavar="N", help="parameter servers: number of their pods, beside workers and a coordinator")
    ranks = "ranks of each pod (default: one for each GPU, or one)"
    add("-np", "--num-processes", type=int, metavar="N", help=ranks)
    add("--gpus", type=int, default=0, metavar="N", help="GPUs of each pod, with --ps of each worker")
    add("--cpus", metavar="N", help="cores of each pod, as Kubernetes writes it: 4, 500m")
    add("--memory", metavar="SIZE", help="memory of each pod, as Kubernetes writes it: 16Gi")
    claims = "mount a PersistentVolumeClaim: for data, commits and checkpoints; can be repeated"
    add("--claim", action="append", default=[], metavar="NAME:/PATH", help=claims)
    backends = ["auto", *WITH_RANKS]
    add("--backend", default="auto", choices=backends, help="how the ranks communicate (default: auto)")
    restarts = "how often failed pods are made again, with --ps those of workers (default: 0)"
    add("--max-restarts", type=int, default=0, metavar="N", help=restarts)
    grace = f"how long ranks may take to commit after SIGTERM (default: {COMMIT_SECONDS:g})"
    add("--grace", type=int, default=int(COMMIT_SECONDS), metavar="SECONDS", help=grace)
    add("--kubeflow", action="store_true", help="print what Kubeflow runs: a TrainJob, with --ps a TFJob")
    add("--mpi", action="store_true", help="with --kubeflow: an MPIJob, in which mpirun starts the ranks by ssh")
    add("-m", dest="module", action="store_true", help="run a module, as `python -m` does; comes last")
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes what kubectl would read as a number, and Python's YAML not: `1e-3`."""

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _LIKE_A_NUMBER, [*"-+.0123456789"])
    _check(args)
    plain = json.loads(json.dumps(manifests(args)))  # nothing is twice in it: YAML would write an alias
    kubeflows = f"pod/{args.name}-chief-0" if args.ps else f"job/{args.name}-{'launcher' if args.mpi else 'node-0'}"
    head = HEAD.format(first=kubeflows if args.kubeflow else f"job/{args.name}")
    print(head + yaml.dump_all(plain, Dumper=Dumper, sort_keys=False), end="")
    return 0


def manifests(args: argparse.Namespace) -> list[dict[str, Any]]:
    labels = {_LABEL: args.name}
    own_pods = {"podSelector": {"matchLabels": labels}}

    def manifest(version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
        metadata = {"name": name, **({"namespace": args.namespace} if args.namespace else {})}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def job(name: str, count: int, command: Sequence[str], env: list[Any], restarts: int, gpus: int) -> dict[str, Any]:
        resources = {"cpu": args.cpus, "memory": args.memory, _GPU: gpus or None}
        needed = {kind: value for kind, value in resources.items() if value is not None}
        # A container has 64 MB of shared memory, which is too little for NCCL.
        volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
        mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        for index, claim in enumerate(args.claim, 1):
            claim_name, _, path = claim.partition(":")
            volumes.append({"name": f"claim-{index}", "persistentVolumeClaim": {"claimName": claim_name}})
            mounts.append({"name": f"claim-{index}", "mountPath": path})
        container = {
            "name": "train",
            "image": args.image,
            "command": command,
            "env": env,
            "resources": {"requests": needed, "limits": needed},
            "securityContext": {"allowPrivilegeEscalation": False},
            "volumeMounts": mounts,
        }
        pod = {
            "restartPolicy": "Never",
            "subdomain": args.name,
            "terminationGracePeriodSeconds": args.grace + 30,
            "containers": [container],
            "volumes": volumes,
        }
        rules = [
            # Evicted, or asked to stop and committed: the same command resumes.
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [environment.COMMITTED_EXIT_CODE]}},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        spec = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": restarts * count,  # all launchers fail together: one restart is one failure of each pod
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        return manifest("batch/v1", "Job", name, spec=spec)

    policy = {**own_pods, "policyTypes": ["Ingress"], "ingress": [{"from": [own_pods]}]}
    first = [manifest("networking.k8s.io/v1", "NetworkPolicy", args.name, spec=policy)]
    if args.ps:
        jobs = [job(*pods) for pods in _tasks(args)]
    else:
        jobs = [job(args.name, args.workers, *_nodes(args), args.max_restarts, args.gpus)]
        if not args.mpi:
            first.append(manifest("v1", "Secret", args.name, stringData={_KEY: secrets.token_hex(16)}))
    if args.kubeflow:
        wanted = _tf_job(jobs) if args.ps else _mpi_job(args, *jobs) if args.mpi else _train_job(*jobs)
        return [*first, *(manifest(version, kind, args.name, spec=spec) for version, kind, spec in wanted)]
    # Pods need each other's addresses before they are ready.
    service = {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True}
    return [manifest("v1", "Service", args.name, spec=service), *first, *jobs]


def _ranks(args: argparse.Namespace) -> int:
    """Returns how many ranks a pod has."""
    return int(args.num_processes or args.gpus or 1)


def _nodes(args: argparse.Namespace) -> tuple[list[str], list[Any]]:
    """Returns the command and the variables of pods that are the nodes of `keras-dist run`."""
    command = ["keras-dist", "run", "-np", str(_ranks(args))]
    command += [] if args.backend == "auto" else ["--backend", args.backend]
    command += ["--grace", str(args.grace), *(["-m"] if args.module else []), *args.target]
    return command, [
        {"name": environment.NNODES, "value": str(args.workers)},
        {"name": environment.RENDEZVOUS, "value": f"{args.name}-0.{args.name}:{PORT}"},
        {"name": environment.SECRET, "valueFrom": {"secretKeyRef": {"name": args.name, "key": _KEY}}},
    ]


def _tasks(args: argparse.Namespace) -> Iterator[tuple[str, int, Sequence[str], list[Any], int, int]]:
    """Yields pods that are the tasks of a `TF_CONFIG`: the coordinator, the workers and the servers."""
    counts = {"chief": 1, "worker": args.workers, "ps": args.ps}
    names = {task: args.name if task == "chief" else f"{args.name}-{task}" for task in counts}
    # Kubernetes calls the pods of an Indexed Job by its name and their index, within the Service.
    cluster = {
        task: [f"{names[task]}-{index}.{args.name}:{PORT}" for index in range(count)] for task, count in counts.items()
    }
    command = command_of(args.target, "python", is_module=args.module)
    index = {"name": JOB_INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX_OF_POD}}}
    for task, count in counts.items():
        own = f'{{"type": "{task}", "index": $({JOB_INDEX})}}'  # Kubernetes puts the index of the pod in
        config = {"name": environment.TF_CONFIG, "value": f'{{"cluster": {json.dumps(cluster)}, "task": {own}}}'}
        restarts, gpus = (args.max_restarts, args.gpus) if task == "worker" else (0, 0)
        yield names[task], count, command, [index, config], restarts, gpus


# --- Kubeflow: it names the pods itself, and tells them their places ---


def _train_job(job: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields version, kind and content of a TrainJob, whose pods have the variables of torchrun, and of its runtime."""
    _leave_places_to_kubeflow(job["spec"]["template"], "node")
    version, nodes = "trainer.kubeflow.org/v1alpha1", job["spec"]["completions"]
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    replicated = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": job["spec"]}}
    runtime = {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": {"replicatedJobs": [replicated]}}}
    yield version, "TrainingRuntime", runtime
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job["metadata"]["name"]}
    yield version, "TrainJob", {"runtimeRef": reference, "trainer": {"numNodes": nodes}}


def _tf_job(jobs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields version, kind and content of a TFJob, whose pods have a `TF_CONFIG`."""
    replicas = {}
    for kind, job in zip(("Chief", "Worker", "PS"), (job["spec"] for job in jobs), strict=True):
        _leave_places_to_kubeflow(job["template"], "tensorflow")
        policy = "OnFailure" if job["backoffLimit"] else job["template"]["spec"]["restartPolicy"]
        replicas[kind] = {"replicas": job["completions"], "restartPolicy": policy, "template": job["template"]}
    limit = sum(job["spec"]["backoffLimit"] for job in jobs)
    yield "kubeflow.org/v1", "TFJob", {"runPolicy": {"backoffLimit": limit}, "tfReplicaSpecs": replicas}


def _mpi_job(args: argparse.Namespace, job: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields version, kind and content of an MPIJob. Its launcher has a file of the workers, which run sshd."""
    worker, ranks = job["spec"]["template"], _ranks(args)
    _leave_places_to_kubeflow(worker, "train")
    (container,) = worker["spec"]["containers"]
    del container["env"], container["command"]
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(ranks * args.workers), "-x", "PATH"]
    command = [*mpirun, *command_of(args.target, "python", is_module=args.module)]
    pod = {**worker["spec"], "containers": [{**container, "command": command, "resources": {}}]}
    replicas = {
        "Launcher": {"replicas": 1, "template": {**worker, "spec": pod}},
        "Worker": {"replicas": args.workers, "template": worker},
    }
    policy = {"cleanPodPolicy": "Running", "backoffLimit": args.max_restarts}
    yield "kubeflow.org/v2beta1", "MPIJob", {"slotsPerWorker": ranks, "runPolicy": policy, "mpiReplicaSpecs": replicas}


def _leave_places_to_kubeflow(template: dict[str, Any], container_name: str) -> None:
    del template["spec"]["subdomain"]
    (container,) = template["spec"]["containers"]
    container["name"] = container_name
    container["env"] = [each for each in container["env"] if each["name"] == environment.SECRET]


def _check(args: argparse.Namespace) -> None:
    if not command_of(args.target, "python", is_module=args.module):
        remedy = "Name it after the options: `keras-dist kube --image i train.py`."
        raise ConfigurationError("There is nothing to run.", "no script", remedy)
    if not _NAME.fullmatch(args.name):
        raise ConfigurationError(
            "The name can't be that of a Service and of pods.", f"--name {args.name}",
            "Use at most 45 small letters, digits and '-', with a letter first.",
        )
    if args.ps is not None and (args.num_processes is not None or args.backend != "auto"):
        raise ConfigurationError(
            "Parameter servers have no ranks: each of their pods is one process.",
            f"--ps {args.ps}, -np {args.num_processes}, --backend {args.backend}",
            "Leave out -np and --backend: `--workers 4 --ps 2`.",
        )
    if args.mpi and (args.ps is not None or not args.kubeflow or args.backend != "auto"):
        raise ConfigurationError(
            "--mpi prints a job of Kubeflow, whose ranks mpirun starts: it has no servers and no other backend.",
            f"--mpi{f' --ps {args.ps}' if args.ps else ''} --backend {args.backend}",
            "Write `--kubeflow --mpi --workers 4`, or leave out --mpi.",
        )
    options = (("workers", 1), ("ps", 1), ("gpus", 0), ("max_restarts", 0), ("grace", 1), ("num_processes", 1))
    for option, least in options:
        value = getattr(args, option)
        if value is not None and value < least:
            name = "-np" if option == "num_processes" else f"--{option.replace('_', '-')}"
            raise ConfigurationError(f"{name} is at least {least}.", f"{name} {value}", f"Use {least} or more.")
    for claim in args.claim:
        if not re.fullmatch(r"[a-z0-9.-]+:/.*", claim):
            problem = "--claim names a PersistentVolumeClaim and where it is mounted."
            raise ConfigurationError(problem, claim, "Write `--claim data:/data`.")
