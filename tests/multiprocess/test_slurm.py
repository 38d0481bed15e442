"""`srun keras-dist run` under a real Slurm: slurmctld, and slurmd on two hosts. `make test-slurm` runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiprocess.launches import ADDRESSES, ETC_HOSTS, TRAIN, assert_close, found, inside, two_hosts, until
from tests.multiprocess.launches import RUN as OURS

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "munge")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
MISSING = ", ".join(name for name in PROGRAMS if shutil.which(name, path=PATH) is None)
pytestmark = [
    pytest.mark.full,
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
NodeName={first},{second} CPUs=4 State=UNKNOWN
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
    environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(conf)}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            on(0, *command), cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=200,
        )  # fmt: skip

    with two_hosts(NAMES, ETC_HOSTS["lan"]):
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
    return sorted((line.partition("] ")[2] for line in done.stdout.splitlines()), key=lambda line: line.split()[1])


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


def test_a_rank_that_fails_ends_the_step_with_its_code(slurm: Run, tmp_path: Path) -> None:
    source = "import os, time\nos.environ['HOROVOD_RANK'] == '1' and os._exit(5)\ntime.sleep(60)\n"
    done = slurm("srun", "-N2", "-n2", *OURS, script(tmp_path, source))
    message = f"keras-dist: rank 1 on node 1 (kdslurm1, {ADDRESSES[1]}) exited with code 5. All ranks have ended."
    assert (done.returncode, done.stderr.count(message)) == (5, 2)


def test_inside_an_allocation_a_launcher_is_alone_and_python_is_serial(slurm: Run, tmp_path: Path) -> None:
    here = f"{OURS[0]} {script(tmp_path, 'import keras_dist as kd; kd.init(); print(kd.size())')}"
    assert slurm("salloc", "-N2", "-n2", "sh", "-c", here).stdout == "1\n"
    ours = " ".join([*OURS, "-np", "2", "--output", "all", script(tmp_path, TELL)])
    assert told(slurm("salloc", "-N2", "-n2", "sh", "-c", f"cd / && {ours}"))[1].endswith(" 1 2 1 2 0 1 lo")


@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
def test_the_numbers_are_those_of_one_process(slurm: Run, tmp_path: Path, backend: str) -> None:
    path = script(tmp_path, TRAIN)
    one = found(slurm(sys.executable, path).stdout)[1]
    done = slurm("srun", "-N2", "-n2", *OURS, "--backend", backend, path)
    assert done.returncode == 0, done.stderr
    places, weights = found(done.stdout)
    assert places == [[0, 0, 1], [1, 0, 1]]
    assert_close(weights, one)
