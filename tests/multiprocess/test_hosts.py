"""Each launcher over two hosts: network namespaces with names, files /etc/hosts and interfaces of their own.

Only root may make them. In CI runs one training of each launcher; the other hosts, and the faults that take as long as
Gloo or a launcher waits for an answer, run in the tier `full`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from keras_dist.launcher.nodes import free_ports
from tests.forks import ForkServer
from tests.limits import limit
from tests.multiprocess.launches import (
    ADDRESSES,
    CONTRACT_SECONDS,
    ETC_HOSTS,
    HOROVODRUN,
    KERAS_DIST,
    NETNS,
    RUN,
    SMALL_MODEL,
    TRAIN,
    Commands,
    assert_close,
    finished,
    found,
    hosts_of,
    inside,
    ip,
    last_line,
    output_of,
    processes_of,
    until,
    wait_for,
)
from tests.multiprocess.test_nodes import PLACE, SECRET, TASK, WAIT, finish, line_about, script

pytestmark = pytest.mark.timeout(300)
SSHD = shutil.which("sshd", path="/usr/sbin")
NAMES = tuple(f"kd{os.getpid()}-{index}" for index in range(2))
# What differs between the hosts of the files `ETC_HOSTS`. Each Docker has the same address on all hosts.
INTERFACES = {"debian": ("eth0", "eth0"), "red hat": ("eth0", "ens5"), "lan": ("eth0", "eth0")}
HAS_DOCKER = {"debian"}


class Hosts(NamedTuple):
    """Two hosts."""

    called: Sequence[str]  # the names by which they know each other, or else their addresses
    interfaces: Sequence[str]

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Pulls the cable."""
        ip("-n", NAMES[1], "link", "set", self.interfaces[1], "down")
        try:
            yield
        finally:
            ip("-n", NAMES[1], "link", "set", self.interfaces[1], "up")
            until(_are_connected)


def _are_connected() -> bool:
    """False for some seconds after the cable is back: the kernel says `No route to host` until it asks again."""
    program = "import errno, socket, sys; sys.exit(socket.socket().connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)"
    return subprocess.run(inside(NAMES[0], sys.executable, "-c", program, ADDRESSES[1])).returncode == 0


@pytest.fixture(scope="module", params=["debian"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts, by default as Debian makes them: the name of each leads to 127.0.1.1 on the host itself."""
    kind = request.param
    with hosts_of(NAMES, ETC_HOSTS[kind], INTERFACES[kind], kind in HAS_DOCKER):
        yield Hosts(ADDRESSES if kind == "red hat" else NAMES, INTERFACES[kind])


@pytest.fixture(scope="module")
def client(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """The configuration of a client that may log in at the sshd of each host; on the hosts, all clients have it."""
    if SSHD is None or shutil.which("ssh") is None:
        yield None
        return
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nUsePAM no\nStrictModes no\n"
        # What this user's shell does at its start, and says, is not that of the hosts.
        f"PermitRootLogin yes\nPasswordAuthentication no\nSetEnv HOME={folder}\n"
    )
    known = "".join(f"{host} {(folder / 'host.pub').read_text()}" for host in (*ADDRESSES, *NAMES))
    (folder / "known").write_text(known)
    (folder / "config").write_text(f"Host *\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n")
    for name in NAMES:
        (NETNS / name / "ssh").mkdir()
        shutil.copy(folder / "config", NETNS / name / "ssh" / "ssh_config")
    os.makedirs("/run/sshd", exist_ok=True)
    command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    daemons = [subprocess.Popen(inside(name, *command), stderr=subprocess.DEVNULL) for name in NAMES]

    def can_log_in() -> bool:
        login = inside(NAMES[0], "ssh", "-o", "BatchMode=yes")
        tried = [subprocess.run([*login, host, "true"], capture_output=True) for host in hosts.called]
        return not any(done.returncode for done in tried)

    try:
        until(can_log_in)
        yield folder / "config"
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(10)


@pytest.fixture
def ssh(client: Path | None) -> Path:
    if client is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    return client


# --- Each launcher ---

Start = Callable[..., list[subprocess.Popen[str]]]


def by_nodes(
    hosts: Hosts | None, sizes: Sequence[int], options: Sequence[str], file: str, names: Sequence[str] = NAMES
) -> Iterator[Any]:
    port = free_ports(1)[0]
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        place = ["--nnodes", str(len(names)), "--node-rank", str(index), "--rendezvous", f"{ADDRESSES[0]}:{port}"]
        number = () if "--workers" in options else ("-np", str(size))
        yield inside(name, *RUN, *place, *number, *options, file), {"KERAS_DIST_SECRET": SECRET}


def by_ssh(hosts: Hosts, sizes: Sequence[int], options: Sequence[str], file: str) -> Iterator[Any]:
    places = ",".join(f"{host}:{size}" for host, size in zip(hosts.called, sizes, strict=True))
    yield inside(NAMES[0], *RUN, "-H", places, *options, file), {}


def by_horovodrun(hosts: Hosts, sizes: Sequence[int], options: Sequence[str], file: str) -> Iterator[Any]:
    places = ",".join(f"{host}:{size}" for host, size in zip(hosts.called, sizes, strict=True))
    ours = ["--disable-cache", "--start-timeout", "120", "-np", str(sum(sizes)), "-H", places]
    yield inside(NAMES[0], str(HOROVODRUN), *ours, sys.executable, file), {}


def by_tf_config(hosts: Hosts, sizes: Sequence[int], options: Sequence[str], file: str) -> Iterator[Any]:
    places = [index for index, size in enumerate(sizes) for _ in range(size)]
    ports = free_ports(len(places))
    workers = [f"{ADDRESSES[place]}:{port}" for place, port in zip(places, ports, strict=True)]
    for rank, place in enumerate(places):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        yield inside(NAMES[place], sys.executable, file), {"TF_CONFIG": json.dumps(config)}


LAUNCHERS = {"nodes": by_nodes, "ssh": by_ssh, "horovodrun": by_horovodrun, "tf-config": by_tf_config}


@pytest.fixture
def launch(
    hosts: Hosts, client: Path | None, commands: Commands, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Start]:  # fmt: skip
    """Starts a script on both hosts. On the other one, processes may end after the launcher."""

    def start(
        launcher: str, source: str, *options: str, sizes: Sequence[int] = (1, 1), **variables: str
    ) -> list[subprocess.Popen[str]]:
        if launcher in ("ssh", "horovodrun"):
            request.getfixturevalue("ssh")
        job = LAUNCHERS[launcher](hosts, sizes, options, str(script(tmp_path, source)))
        return [commands(*command, **own, **variables) for command, own in job]

    yield start
    with contextlib.suppress(AssertionError):
        until(lambda: not processes_of(tmp_path), limit(CONTRACT_SECONDS))


@pytest.fixture(scope="module")
def weights_of_one_process(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return found(forks.run(TRAIN, tmp_path_factory.mktemp("one")).stdout)[1]


BACKENDS = {
    "nodes": ("horovod", "multi_worker"), "ssh": ("horovod", "multi_worker"), "horovodrun": ("horovod",),
    "tf-config": ("multi_worker",),
}  # fmt: skip
IN_CI = [("lan", "horovodrun", "horovod")]  # `--nnodes` between hosts: a Job of Kubernetes, and Slurm
CASES = [
    pytest.param(*case, marks=pytest.mark.ci if case in IN_CI else pytest.mark.full)
    for kind in ETC_HOSTS
    for launcher, backends in BACKENDS.items()
    for case in ((kind, launcher, backend) for backend in backends)
    if (kind, launcher) != ("red hat", "horovodrun")  # which needs interfaces of the same name
]


@pytest.mark.parametrize(("hosts", "launcher", "backend"), CASES, indirect=["hosts"])
def test_two_hosts_have_the_numbers_of_one_process(
    launch: Start, hosts: Hosts, weights_of_one_process: Any, tmp_path: Path, launcher: str, backend: str
) -> None:
    sizes = (1, 1) if hosts.called == NAMES else (1, 2)
    options = ["--backend", backend] if launcher in ("nodes", "ssh") else []
    options += ["--log-dir", "logs"] if launcher == "nodes" else []
    (code, out, err), *others = finish(*launch(launcher, TRAIN, *options, sizes=sizes), seconds=200)
    assert [code, *(other[0] for other in others)] == [0] * (1 + len(others)), (out, err, others)
    places, weights = found(out.replace("[0]<stdout>:", ""))  # of horovodrun
    local = [(local_rank, size) for size in sizes for local_rank in range(size)]
    assert places == [[rank, *place] for rank, place in enumerate(local)]
    assert_close(weights, weights_of_one_process)
    if (launcher, backend) == ("nodes", "multi_worker"):
        assert_one_warning(tmp_path, sum(sizes))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
def test_ranks_talk_over_the_interface_that_is_named(
    launch: Start, hosts: Hosts, weights_of_one_process: Any, backend: str
) -> None:
    """The launchers meet on the other one."""
    ip("-n", NAMES[0], "link", "add", "fast", "type", "veth", "peer", "name", "fast", "netns", NAMES[1])
    try:
        for number, name in enumerate(NAMES, 1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "fast")
            ip("-n", name, "link", "set", "fast", "up")
        started = launch("nodes", TRAIN, "--backend", backend, "--interface", "fast")
        (code, out, err), *others = finish(*started, seconds=200)
        (link,) = json.loads(output_of("ip", "-n", NAMES[1], "-s", "-j", "link", "show", "fast"))
    finally:
        ip("-n", NAMES[0], "link", "del", "fast")
    assert (code, [other[0] for other in others]) == (0, [0]), (out, err, others)
    assert_close(found(out)[1], weights_of_one_process)
    assert link["stats64"]["rx"]["bytes"] > 20_000  # a connection that sends nothing needs some hundreds


@pytest.mark.full
@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
def test_four_hosts_have_the_numbers_of_one_process(
    commands: Commands, weights_of_one_process: Any, tmp_path: Path, backend: str
) -> None:
    names = [f"{NAMES[0]}-{index}" for index in range(4)]
    job = by_nodes(None, [1] * 4, ["--backend", backend], str(script(tmp_path, TRAIN)), names)
    with hosts_of(names, ETC_HOSTS["debian"], has_docker=True):
        (code, out, err), *others = finish(*(commands(*command, **own) for command, own in job), seconds=200)
    assert [code, *(other[0] for other in others)] == [0] * 4, (out, err, others)
    places, weights = found(out)
    assert places == [[rank, 0, 1] for rank in range(4)]
    assert_close(weights, weights_of_one_process)


def assert_one_warning(folder: Path, size: int) -> None:
    """One of all processes says before it trains that anyone may connect to TensorFlow's servers."""
    texts = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(size)]
    assert "".join(texts).count("TensorFlow's servers listen on all interfaces") == 1
    first = texts[0]
    assert first.index("TensorFlow's servers listen on all interfaces") < first.index("trains"), first


WHEN_TOLD = """callbacks=[keras.callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs: (mark(f"begun{epoch}"), epoch and wait_for("go")))])"""


@pytest.mark.full
def test_parameter_servers_on_two_hosts_have_the_numbers_of_one_process(
    launch: Start, weights_of_one_process: Any, tmp_path: Path
) -> None:
    """A worker on the other host is killed between the epochs."""
    tell = "(here / f'pid{rank}').write_text(str(os.getpid()))\n"
    source = tell + TRAIN.replace("verbose=0)", f"verbose=0, {WHEN_TOLD}")
    both = launch("nodes", source, "--workers", "2", "--ps", "1", "--log-dir", "logs")
    wait_for(tmp_path, "begun1")
    os.kill(int((tmp_path / "pid2").read_text()), signal.SIGKILL)
    killed = f"keras-dist: rank 2 on node 1 ({NAMES[1]}, {ADDRESSES[1]}) was killed by SIGKILL"
    assert line_about("killed", both[1]).startswith(killed)
    (tmp_path / "go").touch()
    (code, out, err), (code_1, _, _) = finish(*both, seconds=150)
    assert (code, code_1) == (0, 0), err
    assert_close(found(out)[1], weights_of_one_process)
    assert_one_warning(tmp_path, 4)


@pytest.mark.full
@pytest.mark.usefixtures("hosts")
def test_a_standing_cluster_on_two_hosts(commands: Commands, weights_of_one_process: Any, tmp_path: Path) -> None:
    """`keras-dist serve` for each process."""
    places = {"chief": [0], "worker": [0, 1], "ps": [1]}
    ports = iter(free_ports(4))
    jobs = {job: [f"{ADDRESSES[host]}:{next(ports)}" for host in places[job]] for job in places}
    (tmp_path / "cluster.json").write_text(json.dumps(jobs))
    served = [
        commands(
            *inside(NAMES[host], *KERAS_DIST, "serve", "--role", job, "--index", str(index)), "--cluster",
            "cluster.json",
        )
        for job in ("worker", "ps") for index, host in enumerate(places[job])
    ]  # fmt: skip
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "cluster.json", tmp_path / "copy")  # as on a machine that does not have the logs
    source = TRAIN.replace("kd.init()", "kd.init(kd.ParameterServer(cluster='copy/cluster.json'))")
    code, out, err = finished(commands(*inside(NAMES[0], sys.executable, "-c", source)), 150)
    assert code == 0, err
    assert_close(found(out)[1], weights_of_one_process)
    elsewhere = ("worker-0", ADDRESSES[0]), ("worker-1", ADDRESSES[1]), ("server-0", ADDRESSES[1])
    assert f"not shown: {', '.join(f'cluster.{name}.log on {address}' for name, address in elsewhere)}\n" in err
    for process in served:
        process.send_signal(signal.SIGINT)
    assert [code for code, _, _ in finish(*served)] == [130] * 3


COMMITTED = f"""
{SMALL_MODEL}
class FailOnce(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and rank == 1 and not (here / "failed").exists():
            fail_by(lambda: os._exit(3))
commit = kd.callbacks.Commit(here / "commits", every=2)
model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[commit, FailOnce()])
if kd.is_chief():
    print("found:", json.dumps([weight.tolist() for weight in model.get_weights()]))
"""


@pytest.mark.full
@pytest.mark.parametrize("backend", ["horovod", "multi_worker"])
def test_ranks_that_are_started_again_resume(launch: Start, weights_of_one_process: Any, backend: str) -> None:
    (code, out, err), (code_1, _, err_1) = finish(
        *launch("nodes", COMMITTED, "--backend", backend, "--max-restarts", "1"), seconds=200
    )
    assert (code, code_1) == (0, 0), err + err_1
    for text in (err, err_1):
        assert "keras-dist: restarts all ranks (restart 1 of 1), from the commit of step 4." in text
    assert_close(found(out), weights_of_one_process)


# --- Faults ---

FIT = f"""
{SMALL_MODEL}
class Mark(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            mark(f"ready{{rank}}")
        time.sleep(0.01)
model.fit(x, y, batch_size=16, epochs=10**6, shuffle=False, verbose=0, callbacks=[Mark()])
"""
ANSWER_SECONDS = 30.0  # of launchers, and of Gloo
NO_LAUNCHER = r"its launcher does not answer any more \(it has ended, or one of the machines is cut off\)"


def pull_the_cable(hosts: Hosts, job: list[subprocess.Popen[str]], folder: Path) -> list[tuple[int, str, str]]:
    """Cuts the hosts off when both ranks are ready. Returns how all processes of the job have ended."""
    ready = [folder / f"ready{rank}" for rank in range(2)]
    until(lambda: all(mark.exists() for mark in ready) or any(process.poll() is not None for process in job))
    assert all(mark.exists() for mark in ready), [process.communicate() for process in job]
    with hosts.cut():
        ended = finish(*job, seconds=limit(ANSWER_SECONDS + CONTRACT_SECONDS))
        until(lambda: not processes_of(folder), limit(ANSWER_SECONDS + CONTRACT_SECONDS))
    return ended


def check_lost(ended: list[tuple[int, str, str]], seconds: float) -> None:
    (code, _, err), (code_1, _, err_1) = ended
    assert (code, code_1) == (137, 137), err + err_1
    place = f"rank 1 on node 1 ({NAMES[1]}, {ADDRESSES[1]})"
    assert f"{place} is lost: its node has not answered for {seconds:g} s." in last_line(err)
    assert f"keras-dist: node 0 at {ADDRESSES[0]}:" in last_line(err_1)
    assert f"has not answered for {seconds:g} s. All ranks of this node have ended." in last_line(err_1)


def test_a_host_that_is_cut_off_is_lost(launch: Start, hosts: Hosts, tmp_path: Path) -> None:
    """In `make test`: without TensorFlow."""
    check_lost(pull_the_cable(hosts, launch("nodes", WAIT, KERAS_DIST_ANSWER_TIMEOUT="2"), tmp_path), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "gloo_seconds"), [("horovod", "300"), ("horovod", "10"), ("multi_worker", "30")],
    ids=["the launcher sees it first", "Gloo sees it first", "TensorFlow sees it first"],
)  # fmt: skip
def test_a_cable_that_is_pulled_in_fit(
    launch: Start, hosts: Hosts, tmp_path: Path, backend: str, gloo_seconds: str
) -> None:
    job = launch("nodes", FIT, "--backend", backend, HOROVOD_GLOO_TIMEOUT_SECONDS=gloo_seconds)
    check_lost(pull_the_cable(hosts, job, tmp_path), ANSWER_SECONDS)


@pytest.mark.full
def test_a_cable_that_is_pulled_in_fit_over_ssh(launch: Start, hosts: Hosts, tmp_path: Path) -> None:
    ((code, _, err),) = pull_the_cable(hosts, launch("ssh", FIT), tmp_path)
    assert code == 137
    assert f"rank 1 on node 2 ({NAMES[1]}, {ADDRESSES[1]}) is lost: its node has not answered" in last_line(err)


@pytest.mark.full
def test_a_cable_that_is_pulled_in_fit_under_horovodrun(launch: Start, hosts: Hosts, tmp_path: Path) -> None:
    """Gloo's own error, `Timed out waiting 30000ms for recv`, names no rank. Of rank 1 no output arrives any more."""
    into_file = "if rank == 1:\n    sys.stderr = (here / 'said').open('w')\n"
    ((code, out, err),) = pull_the_cable(hosts, launch("horovodrun", into_file + FIT), tmp_path)
    assert code == 1
    for rank, said, why in ((0, out + err, "rank 1 shows no life"), (1, (tmp_path / "said").read_text(), NO_LAUNCHER)):
        assert f"PeerLostError: Another rank has gone, so rank {rank} of 2 can't continue." in said
        assert re.search(rf"while this rank was in model\.fit \(.*\); {why}", said)


@pytest.mark.full
def test_a_cable_that_is_pulled_in_fit_without_a_launcher(launch: Start, hosts: Hosts, tmp_path: Path) -> None:
    """TensorFlow's connections end within seconds."""
    for rank, (code, _, err) in enumerate(pull_the_cable(hosts, launch("tf-config", FIT), tmp_path)):
        assert code == 1
        assert f"PeerLostError: Another rank has gone, so rank {rank} of 2 can't continue." in err
        assert f"Received: rank {1 - rank} at {ADDRESSES[1 - rank]}:" in err


# --- Over ssh ---

BOTH = f"{ADDRESSES[0]}:2,root@{ADDRESSES[1]}:1"


@pytest.fixture
def over_ssh(ssh: Path, launch: Start, commands: Commands, tmp_path: Path) -> Commands:
    """Starts the launcher on the first host."""
    command = inside(NAMES[0], *RUN, "--ssh", f"ssh -F {ssh}")
    return lambda source, *options: commands(*command, *options, script(tmp_path, source))


@pytest.mark.parametrize("hosts", ["debian", pytest.param("red hat", marks=pytest.mark.full)], indirect=True)
def test_ranks_over_ssh(over_ssh: Commands, hosts: Hosts, tmp_path: Path) -> None:
    code, out, err = finished(over_ssh(PLACE, "-H", BOTH, "--output", "all"))
    assert (code, err) == (0, "")
    first, second = hosts.interfaces
    assert sorted(out.splitlines()) == [
        f"[0] 0 3 0 2 0 2 {ADDRESSES[0]} {first} False {tmp_path}",
        f"[1] 1 3 1 2 0 1 {ADDRESSES[0]} {first} False {tmp_path}",
        f"[2] 2 3 0 1 1 2 {ADDRESSES[1]} {second} False {tmp_path}",
    ]


def test_parameter_servers_over_ssh(over_ssh: Commands) -> None:
    code, out, err = finished(over_ssh(TASK, "-H", BOTH, "--workers", "1", "--ps", "1", "--output", "all"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] chief 0 of 3", "[1] worker 0 of 3", "[2] ps 0 of 3"]


def test_a_rank_over_ssh_that_fails_ends_all(over_ssh: Commands) -> None:
    code, _, err = finished(over_ssh("rank == 2 and sys.exit(7)\ntime.sleep(60)\n", "-H", BOTH))
    assert code == 7
    place = f"rank 2 on node 2 ({NAMES[1]}, {ADDRESSES[1]})"
    assert last_line(err) == f"keras-dist: {place} exited with code 7. All ranks have ended."


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all_over_ssh(over_ssh: Commands, tmp_path: Path, signum: signal.Signals) -> None:
    job = over_ssh(WAIT, "-H", BOTH)
    wait_for(tmp_path, "ready0", "ready1", "ready2")
    job.send_signal(signum)
    assert finished(job)[0] == (130 if signum == signal.SIGINT else -9)


def test_a_host_that_can_not_be_reached_is_named(over_ssh: Commands) -> None:
    code, _, err = finished(over_ssh("time.sleep(60)\n", "-H", f"{ADDRESSES[0]}:1,nobody-here@{ADDRESSES[1]}:1"))
    assert code == 2
    assert f"The launcher on nobody-here@{ADDRESSES[1]} has ended before all have joined.\n" in err
    assert "Received: exit code 255 (255 is that of ssh itself)\n" in err
