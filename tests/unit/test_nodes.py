"""Several nodes: what ranks are told, what schedulers tell, what is refused; restarts; the manifests of Kubernetes."""

import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from keras_dist import environment
from keras_dist.backends import choose
from keras_dist.cli import main
from keras_dist.environment import Topology, detect_launch, expand_hosts, tasks_per_node
from keras_dist.errors import ConfigurationError, NotSupportedError
from keras_dist.launcher.cluster import HorovodCluster, MultiWorkerCluster, ParameterServerCluster
from keras_dist.launcher.job import Outcome, Restarts
from keras_dist.launcher.nodes import Channel, ChannelError, Node, address_of, free_ports, interface_of, told_by
from keras_dist.launcher.output import Console
from keras_dist.launcher.processes import rank_environment

NODES = (1, "10.0.0.1", "eth0"), (3, "10.0.0.2", "ib0"), (2, "10.0.0.3", "eth0"), (1, "10.0.0.2", "ib0")


def nodes() -> list[Node]:
    return [Node(*place, port=1000 + index) for index, place in enumerate(NODES)]


def test_what_horovod_is_told_of_nodes_of_different_sizes() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GLOO_IFACE")
    with HorovodCluster(1, {"KERAS_DIST_SECRET": "x"}, nodes()) as cluster:
        found = [[cluster.variables(rank)[f"HOROVOD_{name}"] for name in names] for rank in range(cluster.size)]
        ports = [cluster.variables(rank)["HOROVOD_GLOO_RENDEZVOUS_PORT"] for rank in range(cluster.size)]
        assert "KERAS_DIST_SECRET" not in cluster.environment(0)
        assert cluster.environment(0)["NCCL_SOCKET_IFNAME"] == "eth0"
    assert found == [
        ["0", "7", "0", "1", "0", "3", "eth0"],
        ["1", "7", "0", "4", "1", "3", "ib0"],
        ["2", "7", "1", "4", "0", "2", "ib0"],
        ["3", "7", "2", "4", "0", "1", "ib0"],
        ["4", "7", "0", "2", "2", "3", "eth0"],
        ["5", "7", "1", "2", "1", "2", "eth0"],
        ["6", "7", "3", "4", "0", "1", "ib0"],  # two launchers on one host
    ]
    assert ports[1:] == ["1001"] * 3 + ["1002"] * 2 + ["1003"]  # each of its own launcher


def test_the_memory_of_a_rank_is_in_large_pages_unless_the_user_has_set_it() -> None:
    own = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert rank_environment(own, "lo", {})["GLIBC_TUNABLES"] == own["GLIBC_TUNABLES"]
    program = "b = bytearray(b'x') * 2**26; print(open('/proc/self/smaps_rollup').read())"
    environ = rank_environment(environment.current(), "lo", {})
    told = subprocess.check_output([sys.executable, "-c", program], env=environ, text=True)
    pages = re.search(r"AnonHugePages: +(\d+) kB", told)
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    assert pages is not None
    assert int(pages[1]) > 2**15 or "[never]" in mode


STEP = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "6", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[05-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3", "SLURMD_NODENAME": "gpu07",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "2"}
TRAIN_JOB = {
    "PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "auto",
}  # fmt: skip
OURS = {"KERAS_DIST_NNODES": "4", "KERAS_DIST_RENDEZVOUS": "train-0.train:29400"}


def told(nnodes: str, node_rank: str, rendezvous: str, **options: str) -> dict[str, str]:
    return {"nnodes": nnodes, "node_rank": node_rank, "rendezvous": rendezvous, **options}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (STEP, told("8", "3", "gpu07:22347", num_processes="1")),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu07", "SLURM_STEP_TASKS_PER_NODE": "8"},
         told("8", "3", "127.0.0.1:22347", num_processes="1")),
        ({**STEP, "KERAS_DIST_RENDEZVOUS": "a:1"}, told("8", "3", "a:1", num_processes="1")),
        # The script of sbatch, the shell of salloc.
        ({name: value for name, value in STEP.items() if "STEP" not in name}, {}),
        ({**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}, {}),
        ({**POD, **OURS}, told("4", "2", "train-0.train:29400")),
        ({**STEP, **OURS, "KERAS_DIST_LAUNCHER": "local"}, {}),  # a rank of ours that starts others
        ({**POD, **OURS, "KERAS_DIST_NODE_RANK": "1"}, told("4", "1", "train-0.train:29400")),
        ({**POD, **TRAIN_JOB}, told("4", "2", "train-node-0-0.train:29500")),
        ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "8"}, told("4", "2", "train-node-0-0.train:29500", num_processes="8")),
        (POD, {}),  # an Indexed Job whose pods have nothing to do with each other
    ],
)
def test_what_schedulers_tell(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert told_by(environ) == expected


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("alone", "alone"), ("a,b", "a b"), ("gpu[07-09,12],login1", "gpu07 gpu08 gpu09 gpu12 login1"),
        ("rack[2-3]n[1-2]x", "rack2n1x rack2n2x rack3n1x rack3n2x"), ("n[098-101]", "n098 n099 n100 n101"),
        ("n[5],n[8]", "n5 n8"), ("node-1.example.org,b", "node-1.example.org b"),
    ],
)  # fmt: skip
def test_slurms_list_of_hosts(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "a,", "gpu[", "gpu[a-b]", "gpu[1-]", "gpu[1-2", "gpu1-2]"])
def test_a_list_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="(?s)can't be read.*--rendezvous HOST:PORT.*SLURM_STEP_ID unset"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,3(x2)", [1, 3, 3]), ("2(x", []), ("", [])]
)
def test_slurms_list_of_tasks(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


TASK = {
    "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08],x1", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_PROCID": "2",
    "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "gpu08", "SLURM_CPU_BIND_LIST": "",
    "SLURM_JOB_NODELIST": "gpu[05-08],x1", "SLURM_TASKS_PER_NODE": "8(x4),2",  # the job is larger than the step
}  # fmt: skip
ONE_NODE = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_TASKS_PER_NODE": "4",
            "SLURM_NODEID": "0", "SLURM_LOCALID": "3", "SLURM_PROCID": "3"}  # fmt: skip
OF_JOB = {name: value for name, value in TASK.items() if not name.endswith(("STEP_NODELIST", "STEP_TASKS_PER_NODE"))}


@pytest.mark.parametrize(
    ("environ", "place", "workers"),
    [
        (TASK, (2, 4, 0, 1), "gpu07:25546 gpu07:25547 gpu08:25546 x1:25546"),
        # The first component of a heterogeneous step is on the last node.
        ({**TASK, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "x1"}, (3, 4, 0, 1),
         "gpu07:25546 gpu07:25547 gpu08:25546 x1:25546"),
        # Dealt out to the nodes in turn (`-m cyclic`): the second one of gpu07 is Slurm's task 3.
        ({**TASK, "SLURM_PROCID": "3", "SLURM_NODEID": "0", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "gpu07"},
         (1, 4, 1, 2), "gpu07:25546 gpu07:25547 gpu08:25546 x1:25546"),
        ({**TASK, **ONE_NODE}, (3, 4, 3, 4), "127.0.0.1:21400 127.0.0.1:21401 127.0.0.1:21402 127.0.0.1:21403"),
        ({**OF_JOB, "SLURM_JOB_NODELIST": "gpu[07-08],x1", "SLURM_TASKS_PER_NODE": "2,1(x2)"}, (2, 4, 0, 1),
         "gpu07:25546 gpu07:25547 gpu08:25546 x1:25546"),
    ],
)  # fmt: skip
def test_tasks_of_srun_are_ranks(environ: dict[str, str], place: tuple[int, ...], workers: str) -> None:
    launch = detect_launch(environ)
    assert (launch.launcher, launch.topology, launch.rendezvous) == ("srun", Topology(*place), None)
    assert launch.workers == tuple(workers.split())
    assert choose(launch)[0].name == "multi_worker"


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": str(0xFFFFFFFB)}, {"SLURM_STEP_ID": ""},
        {"KERAS_DIST_LAUNCHER": "local"},
    ],
)  # fmt: skip
def test_one_task_and_the_scripts_of_sbatch_and_salloc_are_serial(changed: dict[str, str]) -> None:
    assert detect_launch({**TASK, **changed}) is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"SLURM_STEP_NUM_TASKS": "5"}, "do not fit each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "do not fit each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "do not fit each other"),
        ({"SLURMD_NODENAME": ""}, "do not fit each other"),
        ({"SLURM_LOCALID": "1"}, "do not fit each other"),
        ({"SLURM_LOCALID": ""}, "do not fit each other"),
        ({"SLURM_JOB_ID": ""}, "do not fit each other"),
        ({"SLURMD_NODENAME": "gpu05"}, "do not fit each other"),
        ({"SLURM_STEP_NODELIST": "gpu["}, "can't be read"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(changed: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){problem}.*Received: .*SLURM_STEP.*SLURM_STEP_ID unset"):
        detect_launch({**TASK, **changed})


def test_a_node_without_ranks_needs_no_ports() -> None:
    """The launcher of `-H` is one."""
    assert free_ports(0) == []
    assert len(set(free_ports(3))) == 3


def test_an_interface_and_its_address() -> None:
    assert (interface_of("127.0.0.1"), address_of("lo")) == ("lo", "127.0.0.1")
    with pytest.raises(ConfigurationError, match="(?s)no such network interface.*Received: --interface no-such.*lo"):
        address_of("no-such")
    with pytest.raises(ConfigurationError, match="(?s)No network interface.*192.0.2.1"):
        interface_of("192.0.2.1")


def both_ends(secrets: tuple[str, str]) -> tuple[Channel, Channel]:
    called: list[Any] = []
    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: called.append(Channel(server.accept()[0], secrets[0], False)))
    thread.start()
    dialed = Channel(socket.create_connection(server.getsockname()), secrets[1], True)
    thread.join()
    server.close()
    return dialed, called[0]


def test_another_secret_is_noticed_by_both_ends() -> None:
    dialed, called = both_ends(("the job's", "a stranger's"))
    dialed.send("hello")
    called.send("hello")
    for end in (called, dialed):
        with pytest.raises(ChannelError):
            end.receive()
        end.close()


def test_a_message_that_is_repeated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dialed, called = both_ends(("the same", "the same"))
    plain = socket.socket.sendall
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "sendall", lambda self, data: plain(self, 2 * bytes(data)), raising=False)
        dialed.send("hello", 1)
    assert called.receive() == {"kind": "hello", "content": [1], "question": None}
    with pytest.raises(ChannelError):
        called.receive()
    for end in (dialed, called):
        end.close()


RANK = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"))}
RANK |= {f"OMPI_COMM_WORLD_LOCAL_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"))}


def test_a_rank_of_mpirun() -> None:
    launch = detect_launch(RANK)
    assert (launch.launcher, launch.rendezvous, launch.is_mpi) == ("mpirun", None, True)
    assert launch.topology == Topology(1, 2, 1, 2)


def test_ranks_of_ours_send_by_gloo() -> None:
    with pytest.raises(NotSupportedError, match="(?s)send by Gloo.*HOROVOD_CONTROLLER=mpi.*`mpirun -np 4"):
        HorovodCluster(2, {"HOROVOD_CONTROLLER": "mpi"})


CRASH = Outcome(3, "rank 1 exited with code 3.", is_final=False)
COMMIT = Outcome(75, "stopped.", is_final=False)
# Each end of all ranks with the newest commit at that time, and whether they start again after it.
SEQUENCES: dict[str, tuple[int, list[tuple[Outcome, int | None, bool]]]] = {
    "success": (3, [(Outcome(0), 100, False)]),
    "a stop": (3, [(Outcome(143), 100, False)]),
    "no restarts": (0, [(CRASH, None, False)]),
    "all used": (2, [(CRASH, 1, True), (CRASH, 2, True), (CRASH, 3, False)]),
    "never a commit": (9, [(CRASH, None, True), (CRASH, None, False)]),
    "the first commit": (9, [(CRASH, None, True), (CRASH, 100, True), (CRASH, 100, False)]),
    "a smaller step, of another fit": (9, [(CRASH, 1000, True), (CRASH, 10, True), (CRASH, 20, True)]),
    "stops do not count": (1, [(COMMIT, 1, True), (COMMIT, 2, True), (CRASH, 3, True), (CRASH, 4, False)]),
    "stops after the last restart": (1, [(CRASH, 1, True), (COMMIT, 2, False)]),
    "stops for ever": (9, [(COMMIT, 1, True), (COMMIT, 1, False)]),
    "a stop right after a crash": (9, [(CRASH, 1, True), (COMMIT, 1, True), (CRASH, 1, False)]),
    "a commit between two crashes, at a stop": (9, [(CRASH, 1, True), (COMMIT, 2, True), (CRASH, 2, True)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_ranks_start_again_as_long_as_they_come_further(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, sequence = SEQUENCES[name]
    with Restarts(limit, Console()) as restarts:
        for variable, value in restarts.variables.items():
            monkeypatch.setenv(variable, value)
        for outcome, step, expected in sequence:
            if step is not None:
                environment.note_commit(step)
            assert restarts.starts_again(outcome) is expected
    assert restarts.folder is None or not restarts.folder.exists()


def test_without_a_temporary_folder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", fail)
    Restarts(0, Console())
    with pytest.raises(ConfigurationError, match="Set TMPDIR"):
        Restarts(1, Console())


def test_a_commit_is_noted_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.COMMITTED, raising=False)
    environment.note_commit(1)  # no launcher that asks for it
    monkeypatch.setenv(environment.COMMITTED, str(tmp_path / "step"))
    for step in (100, 20):
        environment.note_commit(step)
        assert (tmp_path / "step").read_text() == str(step)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    monkeypatch.setenv(environment.COMMITTED, str(tmp_path / "nowhere" / "step"))
    environment.note_commit(3)  # the training continues


def test_what_multi_worker_is_told() -> None:
    with MultiWorkerCluster(1, {}, nodes()) as cluster:
        told = [cluster.variables(rank) for rank in range(cluster.size)]
    workers = json.loads(told[0]["TF_CONFIG"])["cluster"]["worker"]
    assert [address.rpartition(":")[0] for address in workers] == ["10.0.0.1", *["10.0.0.2"] * 3, *["10.0.0.3"] * 2,
                                                                   "10.0.0.2"]  # fmt: skip
    assert len(set(workers)) == 7
    assert told[4]["KERAS_DIST_STORE"] == "127.0.0.1:1002"


@pytest.mark.parametrize("name", ["KERAS_DIST_NNODES", "PET_NNODES"])
def test_python_alone_on_one_of_several_nodes_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("KERAS_DIST_BACKEND", raising=False)
    monkeypatch.setenv(name, "1")
    assert choose(None)[0].name == "serial"
    monkeypatch.setenv(name, "4")
    with pytest.raises(ConfigurationError, match=f"(?s)each would train alone.*{name}=4.*keras-dist run train.py"):
        choose(None)
    monkeypatch.setenv("KERAS_DIST_BACKEND", "serial")
    assert choose(None)[0].name == "serial"


def test_what_parameter_servers_are_told() -> None:
    with ParameterServerCluster(4, {}, nodes(), servers=2) as cluster:
        told = json.loads(cluster.variables(6)["TF_CONFIG"])
    hosts = {job: [address.rpartition(":")[0] for address in tasks] for job, tasks in told["cluster"].items()}
    workers = ["10.0.0.2", "10.0.0.2", "10.0.0.2", "10.0.0.3"]
    assert hosts == {"chief": ["10.0.0.1"], "worker": workers, "ps": ["10.0.0.3", "10.0.0.2"]}
    assert told["task"] == {"type": "ps", "index": 1}
    with pytest.raises(ConfigurationError, match=r"(?s)7 processes on all nodes, for 1 \+ 3 \+ 2.*Leave out -np"):
        ParameterServerCluster(3, {}, nodes(), servers=2)


# --- `keras-dist kube`: Kubernetes accepts the manifests, and launchers that get their variables meet ---

LATEST = kubernetes_validate.latest_version()
VERSIONS = (LATEST, pytest.param("1.31", marks=pytest.mark.ci), pytest.param("1.34", marks=pytest.mark.full))
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


def test_kubeflow_has_an_mpi_job(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--name", "digits", "--workers", "2", "--gpus", "4", "--max-restarts", "3", "--claim", "data:/data"]
    text, (policy, job) = printed(capsys, *options, "--kubeflow", "--mpi", "train.py", "--epochs", "3")
    assert "kubectl logs -f job/digits-launcher" in text
    assert (job["apiVersion"], job["kind"], job["spec"]["slotsPerWorker"]) == ("kubeflow.org/v2beta1", "MPIJob", 4)
    assert job["spec"]["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 3}
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {"Launcher": 1, "Worker": 2}
    pods = {kind: each["template"] for kind, each in replicas.items()}
    for pod in pods.values():
        assert pod["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod["spec"]}
        kubernetes_validate.validate(pod, LATEST, strict=True)
        assert pod["spec"]["containers"][0]["volumeMounts"][-1] == {"name": "claim-1", "mountPath": "/data"}
    launcher, worker = (pods[kind]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))
    mpirun = "mpirun --allow-run-as-root --bind-to none -np 8 -x PATH python train.py --epochs 3"
    assert launcher["command"] == mpirun.split()
    assert (launcher["resources"], worker["resources"]["limits"]) == ({}, {"nvidia.com/gpu": 4})
    assert "command" not in worker  # the operator's: sshd
    remedy = r"(?s)Received: --mpi --backend multi_worker.*Write `--kubeflow --mpi --workers 4`"
    assert main(["kube", "--image", "i", "--kubeflow", "--mpi", "--backend", "multi_worker", "train.py"]) == 2
    assert re.search(remedy, capsys.readouterr().err)
