"""`srun` of `keras-dist run` or `python` under a real Slurm: slurmctld, and slurmd on two hosts. `make test-slurm`."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiprocess.launches import (
    ADDRESSES,
    ETC_HOSTS,
    KERAS_DIST,
    ROOT,
    SMALL_MODEL,
    TRAIN,
    assert_close,
    found,
    hosts_of,
    inside,
    until,
)
from tests.multiprocess.launches import RUN as OURS

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "munge")
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
MISSING = ", ".join(name for name in PROGRAMS if shutil.which(name, path=PATH) is None)
FULL = pytest.mark.full
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {MISSING}: apt-get install slurmctld slurmd munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start slurmd, and make network namespaces"),
]
NAMES = ("kdslurm0", "kdslurm1")
CONF = """\
ClusterName=keras_dist
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%h.pid
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
GresTypes=gpu
NodeName={first},{second} CPUs=4 Gres=gpu:4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


def on(index: int, *command: str) -> tuple[str, ...]:
    """Returns the command that runs on one of the hosts."""
    return inside(NAMES[index], *command)


@pytest.fixture(scope="module")
def munge() -> Iterator[None]:
    """Starts the daemon of MUNGE, unless it runs, and stops it again."""
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        yield
        return
    for folder in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        os.makedirs(folder, mode=0o755, exist_ok=True)
        shutil.chown(folder, "munge", "munge")
    daemon = ["runuser", "-u", "munge", "--", "/usr/sbin/munged"]
    subprocess.run(daemon, check=True)
    yield
    subprocess.run([*daemon, "--stop"], check=True)


@pytest.fixture(scope="module")
def slurm(munge: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command on the first host of a Slurm of two hosts."""
    folder = tmp_path_factory.mktemp("slurm")
    conf = folder / "slurm.conf"
    (folder / "state").mkdir()
    conf.write_text(CONF.format(first=NAMES[0], second=NAMES[1], folder=folder))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    for index in range(4):  # Slurm deals out files of devices, whatever they are
        os.mknod(folder / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(conf)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            on(0, *command), cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=200,
        )  # fmt: skip

    with hosts_of(NAMES, ETC_HOSTS["lan"]):
        daemons = []
        try:
            for index, program in ((0, "slurmctld"), (0, "slurmd"), (1, "slurmd")):
                with (folder / f"{program}-{index}.log").open("w") as log:
                    command = on(index, program, "-D", "-f", str(conf))
                    daemons.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log))
            until(lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == "2")
            yield run
        finally:
            for daemon in daemons:
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(30)


TELL = """
import os, socket
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GLOO_IFACE")
print(socket.gethostname(), *(os.environ["HOROVOD_" + name] for name in names))
"""


def script(folder: Path, source: str) -> str:
    (folder / "train.py").write_text(source)
    return str(folder / "train.py")


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(lines_of(done.stdout), key=lambda line: line.split()[1])


def lines_of(output: str) -> list[str]:
    """Returns the lines without the ranks that a launcher puts before them."""
    return [re.sub(r"^\[\d+\] ", "", line) for line in output.splitlines()]


@pytest.mark.ci
def test_a_task_for_each_rank_or_for_each_node(slurm: Run, tmp_path: Path) -> None:
    assert told(slurm("srun", "-N2", "-n3", *OURS, "--output", "all", script(tmp_path, TELL))) == [
        "kdslurm0 0 3 0 2 0 2 eth0",
        "kdslurm0 1 3 1 2 0 1 eth0",
        "kdslurm1 2 3 0 1 1 2 eth0",
    ]
    assert told(slurm("srun", "-N2", "-n2", *OURS, "-np", "2", "--output", "all", script(tmp_path, TELL))) == [
        "kdslurm0 0 4 0 2 0 2 eth0",
        "kdslurm0 1 4 1 2 0 2 eth0",
        "kdslurm1 2 4 0 2 1 2 eth0",
        "kdslurm1 3 4 1 2 1 2 eth0",
    ]


PLACE = """
import socket
from keras_dist.environment import detect_launch
launch = detect_launch()
hosts = [worker.partition(":")[0] for worker in launch.workers]
place = launch.topology
print(socket.gethostname(), place.rank, place.size, place.local_rank, place.local_size, *hosts)
"""


@FULL
@pytest.mark.parametrize(
    ("step", "places"),
    [
        # SLURM_STEP_TASKS_PER_NODE is 2(x2).
        ([("-N2", "--ntasks-per-node=2")],
         ["kdslurm0 0 4 0 2", "kdslurm0 1 4 1 2", "kdslurm1 2 4 0 2", "kdslurm1 3 4 1 2"]),
        # Two components; the nodes are numbered as they come, the list of their names is sorted.
        ([("-w", "kdslurm0", "-n2"), ("-w", "kdslurm1", "-n1")],
         ["kdslurm0 0 3 0 2", "kdslurm0 1 3 1 2", "kdslurm1 2 3 0 1"]),
        ([("-w", "kdslurm1", "-n2"), ("-w", "kdslurm0", "-n1")],
         ["kdslurm0 0 3 0 1", "kdslurm1 1 3 0 2", "kdslurm1 2 3 1 2"]),
    ],
)  # fmt: skip
def test_the_places_of_a_step_also_of_a_heterogeneous_one(
    slurm: Run, tmp_path: Path, step: list[tuple[str, ...]], places: list[str]
) -> None:
    def srun(*command: str) -> list[str]:
        components = [[":", *options, *command] for options in step]
        return told(slurm("srun", *sum(components, [])[1:]))

    hosts = " ".join(place.split()[0] for place in places)
    assert srun(sys.executable, script(tmp_path, PLACE)) == [f"{place} {hosts}" for place in places]
    ranks = srun(*OURS, "--output", "all", script(tmp_path, TELL))
    assert [" ".join(rank.split()[:5]) for rank in ranks] == places


@FULL
def test_a_rank_that_fails_ends_the_step_with_its_code(slurm: Run, tmp_path: Path) -> None:
    source = "import os, time\nos.environ['HOROVOD_RANK'] == '1' and os._exit(5)\ntime.sleep(60)\n"
    done = slurm("srun", "-N2", "-n2", *OURS, script(tmp_path, source))
    message = f"keras-dist: rank 1 on node 1 (kdslurm1, {ADDRESSES[1]}) exited with code 5. All ranks have ended."
    assert (done.returncode, done.stderr.count(message)) == (5, 2)


@FULL
def test_inside_an_allocation_a_launcher_is_alone_and_python_is_serial(slurm: Run, tmp_path: Path) -> None:
    path = script(tmp_path, "import keras_dist as kd; kd.init(); print(kd.size())")
    assert slurm("salloc", "-N2", "-n2", "sh", "-c", f"{sys.executable} {path}").stdout == "1\n"
    assert slurm("srun", "-n2", "env", "KERAS_DIST_BACKEND=serial", sys.executable, path).stdout == "1\n1\n"
    ours = " ".join([*OURS, "-np", "2", "--output", "all", script(tmp_path, TELL)])
    assert told(slurm("salloc", "-N2", "-n2", "sh", "-c", f"cd / && {ours}"))[1].endswith(" 1 2 1 2 0 1 lo")


@FULL
@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
def test_the_numbers_are_those_of_one_process(slurm: Run, tmp_path: Path, backend: str) -> None:
    path = script(tmp_path, TRAIN)
    one = found(slurm(sys.executable, path).stdout)[1]
    done = slurm("srun", "-N2", "-n2", "-c1", "env", "KERAS_DIST_LOG=debug", *OURS, "--backend", backend, path)
    assert done.returncode == 0, done.stderr
    places, weights = found(done.stdout)
    assert places == [[0, 0, 1], [1, 0, 1]]
    assert_close(weights, one)
    # Nobody binds the tasks here, so each has the threads of the core that it asked for.
    assert os.cpu_count() == 1 or re.search(r"cores: [\d,]+ of \d+, and 1 threads within the limit", done.stderr)


# The GPUs that Slurm shows this task are CPUs, as many, once keras_dist takes them.
STAND_INS = """
import os
import tensorflow as tf
gpus = [tf.config.PhysicalDevice(f"GPU:{name}", "GPU") for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
plain = tf.config.list_physical_devices

def take(chosen, kind):
    print("takes", *(gpu.name for gpu in chosen), flush=True)
    logical = [tf.config.LogicalDeviceConfiguration() for _ in chosen]
    tf.config.set_logical_device_configuration(plain("CPU")[0], logical)

tf.config.list_physical_devices = lambda kind=None: gpus if kind == "GPU" else plain(kind)
tf.config.set_visible_devices = take
tf.config.experimental.set_memory_growth = lambda gpu, enable: None
tf.config.get_logical_device_configuration = lambda device: None
"""


@FULL
@pytest.mark.parametrize("launcher", [[sys.executable], [*OURS, "--output", "all"]], ids=["python", "horovod"])
def test_a_task_uses_all_gpus_that_slurm_shows_it(slurm: Run, tmp_path: Path, launcher: list[str]) -> None:
    one = found(slurm(sys.executable, script(tmp_path, TRAIN)).stdout)[1]
    path = script(tmp_path, STAND_INS + TRAIN + "\nprint('replicas', kd.num_replicas(), flush=True)\n")
    done = slurm("srun", "-N1", "-n2", "--gpus-per-task=2", *launcher, path)
    assert done.returncode == 0, done.stderr
    lines = sorted(lines_of(done.stdout))
    assert [line for line in lines if line.startswith(("takes", "replicas"))] == [
        "replicas 4", "replicas 4", "takes GPU:0 GPU:1", "takes GPU:2 GPU:3",
    ]  # fmt: skip
    places, weights = found("\n".join(lines))
    assert sorted(places) == [[0, 0, 2], [1, 1, 2]]
    assert_close(weights, one)


@FULL
def test_parameter_servers_on_two_nodes_have_the_numbers_of_one_process(slurm: Run, tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    done = slurm("srun", "--nodes=2", "--ntasks-per-node=1", *OURS, "--workers", "2", "--ps", "1", path)
    assert done.returncode == 0, done.stderr
    assert "parameter_server (2 workers, 1 servers, sync; started by keras-dist run)" in done.stderr
    assert_close(found(done.stdout)[1], found(slurm(sys.executable, path).stdout)[1])


# As Debian makes /etc/hosts: on each host its own name leads to the loopback interface.
DEBIAN = 'file=$0-$(hostname); (echo "127.0.1.1 $(hostname)"; cat /etc/hosts) > $file; mount --bind $file /etc/hosts'


@FULL
def test_tasks_of_plain_python_are_ranks(slurm: Run, tmp_path: Path) -> None:
    """In the tier `full`, as all of this file: it needs Slurm."""
    path = script(tmp_path, TRAIN)
    one = found(slurm("srun", "-n1", sys.executable, path).stdout)
    assert one[0] == [[0, 0, 1]]
    host = ("unshare", "--mount", "sh", "-c", f'{DEBIAN} && exec "$@"', str(tmp_path / "hosts"))
    done = slurm("srun", "-N2", "-n3", "-m", "cyclic", *host, sys.executable, path)
    assert done.returncode == 0, done.stderr
    places, weights = found(done.stdout)
    assert sorted(places) == [[0, 0, 2], [1, 1, 2], [2, 0, 1]]
    assert_close(weights, one[1])
    assert "keras_dist: multi_worker (3 ranks, CPU; started by srun)" in done.stderr
    assert done.stderr.count("listen on all interfaces") == 1
    assert "can't connect to a second port" not in done.stderr


@FULL
def test_a_task_of_plain_python_that_fails_ends_all(slurm: Run, tmp_path: Path) -> None:
    source = "import os, keras_dist as kd\nkd.init()\nkd.rank() == 1 and os._exit(5)\nkd.barrier()\n"
    done = slurm("srun", "-N2", "-n2", sys.executable, script(tmp_path, source))
    assert done.returncode != 0
    assert f"rank 1 at {NAMES[1]}:" in done.stderr


@FULL
def test_a_node_whose_name_has_no_address_is_named(slurm: Run, tmp_path: Path) -> None:
    path = script(tmp_path, "import keras_dist as kd; kd.init()")
    host = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /etc/hosts && exec "$@"', "sh")
    done = slurm("srun", "-N2", "-n2", *host, sys.executable, path)
    assert done.returncode == 1
    assert f"ConfigurationError: The name of a node of this step has no address: {NAMES[0]} (" in done.stderr


@FULL
def test_a_task_that_is_no_rank_is_named(slurm: Run, tmp_path: Path) -> None:
    path = script(tmp_path, "import keras_dist as kd; kd.init()")
    one = f"[ $SLURM_PROCID = 1 ] || KERAS_DIST_JOIN_TIMEOUT=3 {sys.executable} {path}"
    done = slurm("srun", "-N1", "-n2", "sh", "-c", one)
    assert done.returncode == 1
    assert re.search(r"Received: missing: rank 1 at 127\.0\.0\.1:2\d{4}\n.*KERAS_DIST_BACKEND=serial", done.stderr)


@FULL
def test_the_self_test_has_our_launchers(slurm: Run) -> None:
    done = slurm("srun", "-N2", "-n2", *KERAS_DIST, "selftest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok      end: all ranks have ended with exit code 0") == 1


# The first run waits in the middle of an epoch until the chief has received the signal.
REQUEUED = f"""
import json, os, signal, time
from pathlib import Path
{SMALL_MODEL}
class WaitForSignal(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if kd.is_chief() and int(self.model.optimizer.iterations) == 6 and not Path("ready").exists():
            plain, received = signal.getsignal(signal.SIGTERM), []
            signal.signal(signal.SIGTERM, lambda *given: (received.append(given), plain(*given)))
            Path("ready").touch()
            while not received:
                time.sleep(0.01)

callbacks = [kd.callbacks.Commit("commits", every="300s"), WaitForSignal()]
history = model.fit(x, y, batch_size=16, epochs=4, verbose=0, callbacks=callbacks).history
if kd.is_chief():
    Path("part").write_text(json.dumps([os.environ.get("SLURM_RESTART_COUNT"), history]))
    Path("part").rename("result.json")
"""


@FULL
@pytest.mark.timeout(600)
def test_the_script_of_the_page_for_sbatch_is_requeued_and_resumes(slurm: Run, tmp_path: Path) -> None:
    script(tmp_path, REQUEUED)
    fence = re.search(r"```sh\n(#!/bin/sh\n#SBATCH.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    (tmp_path / "train.sh").write_text(fence[1])
    here = ("--chdir", str(tmp_path), "--ntasks-per-node=1")
    # The signal comes 45 to 75 s after the start: Slurm looks every half minute.
    limits = ("--time=2", "--signal=TERM@45")
    job = slurm("sbatch", "--parsable", *here, *limits, str(tmp_path / "train.sh")).stdout.strip()
    try:
        until((tmp_path / "ready").exists)
        until((tmp_path / "result.json").exists, 300)
        until(lambda: slurm("squeue", "-h").stdout == "")
    finally:
        slurm("scancel", job)
    log = (tmp_path / f"train-{job}.log").read_text()
    assert "resumes after step 6 (epoch 2, batch 2), from a commit in commits" in log
    starts, history = json.loads((tmp_path / "result.json").read_text())
    assert starts == "1"
    shutil.rmtree(tmp_path / "commits")
    assert slurm("srun", "-N2", *here, *OURS, "train.py").returncode == 0
    assert json.loads((tmp_path / "result.json").read_text()) == [None, history]
