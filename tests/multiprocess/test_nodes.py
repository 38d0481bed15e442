"""`keras-dist run` on several nodes: launchers on this machine; two hosts, by ssh too, if root may make them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keras_dist.launcher.nodes import free_ports
from tests.limits import limit
from tests.multiprocess.launches import (
    ADDRESSES,
    CONTRACT_SECONDS,
    KERAS_DIST,
    PREAMBLE,
    RUN,
    SMALL_MODEL,
    Commands,
    assert_close,
    finished,
    found,
    ip,
    last_line,
    output_of,
    processes_of,
    two_hosts,
    until,
    wait_for,
)

NAME = socket.gethostname()
SECRET = "0123456789abcdef-of-this-test"
pytestmark = pytest.mark.timeout(300)

WAIT = "mark(f'ready{rank}'); time.sleep(60)"
PLACE = """
names = ('SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE', 'HOSTNAME', 'GLOO_IFACE')
print(rank, *(os.environ['HOROVOD_' + name] for name in names), 'KERAS_DIST_SECRET' in os.environ, Path.cwd())
"""
TASK = "print(*config['task'].values(), 'of', len(tasks), flush=True)"
TRAIN = f"""
import json, sys
{SMALL_MODEL}
print("trains", flush=True)
model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
from keras_dist.cluster import current_backend
place = current_backend().topology
told = current_backend().all_gather_object("places", [place.rank, place.local_rank, place.local_size])
if kd.is_chief():
    print("found:", json.dumps([told, [weight.tolist() for weight in model.get_weights()]]))
"""

Start = Callable[..., subprocess.Popen[str]]


def script(folder: Path, source: str) -> Path:
    (folder / "script.py").write_text(PREAMBLE + source)
    return folder / "script.py"


@pytest.fixture
def launch(commands: Commands, tmp_path: Path) -> Start:
    """Starts the launcher of a node."""
    port = free_ports(1)[0]

    def start(
        source: str, node: int, *options: str, count: int = 2, host: str = "127.0.0.1", within: tuple[str, ...] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        place = ["--nnodes", str(count), "--node-rank", str(node), "--rendezvous", f"{host}:{port}"]
        size = () if {"-np", "--workers"} & {*options} else ("-np", "1")
        command = [*within, *RUN, *place, *size, *options, script(tmp_path, source)]
        return commands(*command, **{"KERAS_DIST_SECRET": SECRET, **variables})

    return start


def line_about(what: str, launcher: subprocess.Popen[str]) -> str:
    """Returns the next line that a launcher prints about something."""
    assert launcher.stderr is not None
    return next(line for line in launcher.stderr if what in line)


def finish(*launchers: subprocess.Popen[str], seconds: float = 60) -> list[tuple[int, str, str]]:
    return [finished(launcher, seconds) for launcher in launchers]


def test_the_ranks_of_two_nodes_on_one_host_are_local_to_each_other(launch: Start, tmp_path: Path) -> None:
    (code, out, err), other = finish(launch(PLACE, 1, "-np", "2", "--output", "all"), launch(PLACE, 0))
    place = "3 {0} 3 0 1 127.0.0.1 lo False"
    assert other == (0, f"0 {place.format(0)} {tmp_path}\n", "")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} {place.format(rank)} {tmp_path}" for rank in (1, 2)]


@pytest.mark.alone
def test_a_killed_rank_of_one_node_ends_all(launch: Start, tmp_path: Path) -> None:
    source = "mark(f'ready{rank}'); wait_for('ready0')\n" + (
        "if rank == 1:\n    print('last words', flush=True); fail_by(lambda: os.kill(os.getpid(), 9))\ntime.sleep(60)\n"
    )
    both = launch(source, 0), launch(source, 1, "-np", "2")
    wait_for(tmp_path, "failed")
    for code, _, err in finish(*both, seconds=limit(CONTRACT_SECONDS)):
        assert code == 137
        assert "\n[1] last words\n" in f"\n{err}"
        assert last_line(err).startswith(f"keras-dist: rank 1 on node 1 ({NAME}, 127.0.0.1) was killed by SIGKILL")


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_on_one_node_ends_all(launch: Start, tmp_path: Path, node: int) -> None:
    both = launch(WAIT, 0), launch(WAIT, 1)
    wait_for(tmp_path, "ready0", "ready1")
    both[node].send_signal(signal.SIGINT)
    for code, _, err in finish(*both):
        assert (code, last_line(err)) == (130, "keras-dist: stopped by SIGINT.")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.alone
def test_a_launcher_that_is_killed_ends_all(launch: Start, tmp_path: Path, lost: int) -> None:
    both = launch(WAIT, 0), launch(WAIT, 1)
    wait_for(tmp_path, "ready0", "ready1")
    both[lost].kill()
    code, _, err = finish(both[1 - lost], seconds=limit(CONTRACT_SECONDS))[0]
    assert code == 137
    expected = (
        "has closed the connection (its launcher has ended). All ranks of this node have ended."
        if lost == 0
        else f"rank 1 on node 1 ({NAME}, 127.0.0.1) is lost: its node has closed the connection"
    )
    assert expected in last_line(err)
    until(lambda: not processes_of(tmp_path), limit(CONTRACT_SECONDS))


def test_all_nodes_start_again(launch: Start, tmp_path: Path) -> None:
    source = (
        "again = (here / 'failed').exists()\n"
        "mark(f'ready{rank}')\n"
        "if rank == 1 and not again:\n    wait_for('ready0'); fail_by(lambda: os._exit(3))\n"
        "if not again:\n    time.sleep(60)\n"
        "print('again', rank)\n"
    )
    both = launch(source, 0, "--max-restarts", "1"), launch(source, 1, "--output", "all")
    (code_0, out_0, err_0), (code_1, out_1, err_1) = finish(*both)
    assert (code_0, out_0, code_1, out_1) == (0, "again 0\n", 0, "[1] again 1\n")
    for err in (err_0, err_1):
        assert "keras-dist: starts all ranks again (restart 1 of 1)" in err


def test_parameter_servers_of_two_nodes(launch: Start, tmp_path: Path) -> None:
    """A worker that is killed is named on both nodes, and the coordinator continues."""
    source = f"{TASK}\nmark(f'ready{{rank}}')\nrank == 3 and fail_by(lambda: os.kill(os.getpid(), 9))\nwait_for('go')"
    both = [launch(source, node, "--workers", "3", "--ps", "1", "--output", "all") for node in (0, 1)]
    lines = [line_about("killed", launcher) for launcher in both]
    wait_for(tmp_path, "ready4")
    (tmp_path / "go").touch()
    (code, out, _), (code_1, out_1, _) = finish(*both)
    assert (code, code_1) == (0, 0)
    assert sorted(out.splitlines()) == ["[0] chief 0 of 5", "[1] worker 0 of 5", "[2] worker 1 of 5"]
    assert sorted(out_1.splitlines()) == ["[3] worker 2 of 5", "[4] ps 0 of 5"]
    for line in lines:
        assert line.startswith(f"keras-dist: rank 3 on node 1 ({NAME}, 127.0.0.1) was killed by SIGKILL")
        assert line.endswith("Rank 0, the coordinator, continues.\n")


def test_a_missing_node_is_named(launch: Start) -> None:
    first = launch(WAIT, 0, count=3, KERAS_DIST_JOIN_TIMEOUT="10")
    last = launch(WAIT, 2, count=3)
    for code, _, err in finish(first, last):
        assert code == 2
        assert "Not all nodes have joined within 10 s.\nReceived: missing: node 1 of 3\n" in err


def test_ctrl_c_while_a_node_is_missing(launch: Start) -> None:
    first, last = launch(WAIT, 0, count=3), launch(WAIT, 2, count=3)
    for launcher in (first, last):
        assert launcher.stderr is not None
        assert "for node 1 of 3." in launcher.stderr.readline()
    last.send_signal(signal.SIGINT)
    for code, _, err in finish(first, last):
        assert (code, last_line(err)) == (130, "keras-dist run: stopped by Ctrl-C")


@pytest.mark.parametrize("node", [0, 1])
def test_process_1_of_a_pod_is_stopped_while_a_node_is_missing(launch: Start, node: int) -> None:
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("only root can make a process 1")
    launcher = launch(WAIT, node, within=apart)
    assert launcher.stderr is not None
    assert f"keras-dist: {'waits at' if node == 0 else 'node 1 waits for node 0'}" in launcher.stderr.readline()
    (process_1,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(process_1), signal.SIGTERM)
    code, _, err = finished(launcher)
    assert (code, err) == (143, "keras-dist run: stopped by SIGTERM\n")


def test_node_0_is_missing(launch: Start) -> None:
    ((code, _, err),) = finish(launch(WAIT, 1, KERAS_DIST_JOIN_TIMEOUT="0.5"))
    assert code == 2
    assert "Node 0 was not reached within 0.5 s." in err
    assert "Connection refused" in err


def test_node_0_can_not_listen(launch: Start) -> None:
    # 192.0.2.1 belongs to nobody: as an address it is wrong, a name may still lead to the pod that this one replaces.
    for host, message in {
        "192.0.2.1": "Node 0 can't listen at the rendezvous.\nReceived: --rendezvous 192.0.2.1:",
        "train-0.invalid": "Node 0 could not listen at the rendezvous within 4 s.\nReceived: --rendezvous train-0.inv",
    }.items():
        ((code, _, err),) = finish(launch(WAIT, 0, host=host, KERAS_DIST_JOIN_TIMEOUT="4"))
        assert code == 2
        assert message in err
        assert f"node 0 ({NAME}) has lo 127.0.0.1" in err
        assert ("keras-dist: node 0 waits to listen at train-0.invalid:" in err) == (host == "train-0.invalid")


def test_nodes_that_do_not_fit_are_refused(launch: Start, tmp_path: Path) -> None:
    first, second = (launch(WAIT, 0, count=3), launch(WAIT, 2, count=3))
    assert first.stderr is not None
    assert first.stderr.readline().startswith("keras-dist: waits at 127.0.0.1:")  # for node 1
    wrong = {
        "another secret": launch(WAIT, 1, count=3, KERAS_DIST_SECRET="another-secret-of-someone"),
        "backend multi_worker there, horovod on node 0": launch(WAIT, 1, "--backend", "multi_worker", count=3),
        "backend parameter_server (--workers 2 --ps 1) there, horovod": launch(WAIT, 1, "--workers", "2", count=3),
        "count 2 there, 3 on node 0": launch(WAIT, 1, count=2),
        f"--node-rank 2 of 3 nodes, and node 2 ({NAME}, 127.0.0.1) has it": launch(WAIT, 2, count=3),
    }
    for why, launcher in wrong.items():
        code, _, err = finish(launcher)[0]
        assert code == 2
        assert f"has refused this node.\nReceived: {why}" in err
    right = launch(WAIT, 1, count=3)
    wait_for(tmp_path, "ready0", "ready1", "ready2")
    right.send_signal(signal.SIGTERM)
    codes = [code for code, _, _ in finish(first, second, right)]
    assert codes == [143] * 3


@pytest.mark.parametrize(
    ("host", "secret", "message"),
    [
        ("192.0.2.1", "", "KERAS_DIST_SECRET not set\nRemedy: Make one, and set it on every node: export KERAS"),
        ("192.0.2.1", "short", "KERAS_DIST_SECRET of 5 characters"),
        (NAME, SECRET, "The name of the rendezvous leads to the loopback interface here"),
    ],
)
def test_an_unsafe_rendezvous_is_refused(launch: Start, host: str, secret: str, message: str) -> None:
    try:
        is_local = socket.gethostbyname(host).startswith("127.")
    except OSError:
        is_local = False
    if host == NAME and not is_local:
        pytest.skip("the name of this host does not lead to its loopback interface")
    for node in (0, 1):
        code, _, err = finish(launch(WAIT, node, host=host, KERAS_DIST_SECRET=secret))[0]
        assert code == 2
        assert message in err


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two network namespaces on one network. As on Debian, the name of each host leads to 127.0.1.1."""
    names = [f"kd{os.getpid()}-{index}" for index in range(2)]
    with two_hosts(names, f"127.0.0.1 localhost\n127.0.1.1 {NAME}\n"):
        yield names


def on(host: str) -> dict[str, Any]:
    return {"within": ("ip", "netns", "exec", host), "host": ADDRESSES[0]}


@pytest.fixture(scope="module")
def weights_of_one_process() -> Any:
    return found(output_of(sys.executable, "-c", TRAIN))[1]


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        pytest.param("horovod", (1, 1), marks=pytest.mark.ci),
        pytest.param("multi_worker", (1, 1), marks=pytest.mark.full),
        pytest.param("horovod", (2, 2), marks=pytest.mark.full),
        pytest.param("multi_worker", (1, 2), marks=pytest.mark.full),
    ],
)
def test_two_hosts_have_the_numbers_of_one_process(
    launch: Start, hosts: list[str], weights_of_one_process: Any, tmp_path: Path, backend: str, sizes: tuple[int, int]
) -> None:
    both = [
        launch(TRAIN, index, "-np", str(sizes[index]), "--backend", backend, "--log-dir", "logs", **on(host))
        for index, host in enumerate(hosts)
    ]
    (code, out, err), (code_1, _, err_1) = finish(*both, seconds=150)
    assert (code, code_1) == (0, 0), err + err_1
    places, weights = found(out)
    local = [(local_rank, size) for size in sizes for local_rank in range(size)]
    assert places == [[rank, *place] for rank, place in enumerate(local)]
    assert_close(weights, weights_of_one_process)
    if backend == "multi_worker":
        assert_one_warning(tmp_path, sum(sizes))


WHEN_TOLD = """callbacks=[keras.callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs: (mark(f"begun{epoch}"), epoch and wait_for("go")))])"""


@pytest.mark.full
def test_parameter_servers_on_two_hosts_have_the_numbers_of_one_process(
    launch: Start, hosts: list[str], weights_of_one_process: Any, tmp_path: Path
) -> None:
    """A worker on the other host is killed between the epochs. Takes a minute: a whole training, so tier full."""
    tell = "(here / f'pid{rank}').write_text(str(os.getpid()))\n"
    source = tell + TRAIN.replace("verbose=0)", f"verbose=0, {WHEN_TOLD}")
    both = [
        launch(source, index, "--workers", "2", "--ps", "1", "--log-dir", "logs", **on(host))
        for index, host in enumerate(hosts)
    ]
    wait_for(tmp_path, "begun1")
    os.kill(int((tmp_path / "pid2").read_text()), signal.SIGKILL)
    killed = f"keras-dist: rank 2 on node 1 ({NAME}, {ADDRESSES[1]}) was killed by SIGKILL"
    assert line_about("killed", both[1]).startswith(killed)
    (tmp_path / "go").touch()
    (code, out, err), (code_1, _, _) = finish(*both, seconds=150)
    assert (code, code_1) == (0, 0), err
    assert_close(found(out)[1], weights_of_one_process)
    assert_one_warning(tmp_path, 4)


def assert_one_warning(folder: Path, size: int) -> None:
    """One of all processes says before it trains that anyone may connect to TensorFlow's servers."""
    texts = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(size)]
    assert "".join(texts).count("TensorFlow's servers listen on all interfaces") == 1
    first = texts[0]
    assert first.index("TensorFlow's servers listen on all interfaces") < first.index("trains"), first


@pytest.mark.full
def test_a_standing_cluster_on_two_hosts(
    hosts: list[str], commands: Commands, weights_of_one_process: Any, tmp_path: Path
) -> None:
    """`keras-dist serve` for each process. Takes a minute: a whole training, so tier full."""
    places = {"chief": [0], "worker": [0, 1], "ps": [1]}
    ports = iter(free_ports(4))
    jobs = {job: [f"{ADDRESSES[host]}:{next(ports)}" for host in places[job]] for job in places}
    (tmp_path / "cluster.json").write_text(json.dumps(jobs))
    served = [
        commands(
            *on(hosts[host])["within"], *KERAS_DIST, "serve", "--role", job, "--index", str(index), "--cluster",
            "cluster.json",
        )
        for job in ("worker", "ps") for index, host in enumerate(places[job])
    ]  # fmt: skip
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "cluster.json", tmp_path / "copy")  # as on a machine that does not have the logs
    source = TRAIN.replace("kd.init()", "kd.init(kd.ParameterServer(cluster='copy/cluster.json'))")
    code, out, err = finished(commands(*on(hosts[0])["within"], sys.executable, "-c", source), 150)
    assert code == 0, err
    assert_close(found(out)[1], weights_of_one_process)
    elsewhere = ("worker-0", ADDRESSES[0]), ("worker-1", ADDRESSES[1]), ("server-0", ADDRESSES[1])
    assert f"not shown: {', '.join(f'cluster.{name}.log on {address}' for name, address in elsewhere)}\n" in err
    for process in served:
        process.send_signal(signal.SIGINT)
    assert [code for code, _, _ in finish(*served)] == [130] * 3


def test_a_host_that_is_cut_off_is_lost(launch: Start, hosts: list[str], tmp_path: Path) -> None:
    both = [launch(WAIT, index, KERAS_DIST_ANSWER_TIMEOUT="2", **on(host)) for index, host in enumerate(hosts)]
    wait_for(tmp_path, "ready0", "ready1")
    ip("-n", hosts[1], "link", "set", "eth0", "down")
    try:
        (code, _, err), (code_1, _, err_1) = finish(*both)
    finally:
        ip("-n", hosts[1], "link", "set", "eth0", "up")
    assert (code, code_1) == (137, 137)
    assert f"rank 1 on node 1 ({NAME}, {ADDRESSES[1]}) is lost: its node has not answered for 2 s." in last_line(err)
    assert f"keras-dist: node 0 at {ADDRESSES[0]}:" in last_line(err_1)
    assert "has not answered for 2 s. All ranks of this node have ended." in last_line(err_1)


# `-H a:2,b:1`: over a real sshd on each of the two hosts.

SSHD = shutil.which("sshd", path="/usr/sbin")
BOTH = f"{ADDRESSES[0]}:2,root@{ADDRESSES[1]}:1"


@pytest.fixture(scope="module")
def client(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration of a client that may log in."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\n"
    )
    known = "".join(f"{address} {(folder / 'host.pub').read_text()}" for address in ADDRESSES)
    (folder / "known").write_text(known)
    (folder / "config").write_text(f"Host *\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n")
    os.makedirs("/run/sshd", exist_ok=True)
    command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
    daemons = [subprocess.Popen(["ip", "netns", "exec", host, *command], stderr=subprocess.DEVNULL) for host in hosts]

    def can_log_in() -> bool:
        login = ["ip", "netns", "exec", hosts[0], "ssh", "-F", str(folder / "config")]
        tried = [subprocess.run([*login, address, "true"], capture_output=True) for address in ADDRESSES]
        return not any(done.returncode for done in tried)

    try:
        until(can_log_in)
        yield folder / "config"
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(10)


@pytest.fixture
def by_ssh(hosts: list[str], client: Path, commands: Commands, tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher on the first host. On the other one, processes may end after it."""
    within = ("ip", "netns", "exec", hosts[0], *RUN, "--ssh", f"ssh -F {client}")
    yield lambda source, *options: commands(*within, *options, script(tmp_path, source))
    with contextlib.suppress(AssertionError):
        until(lambda: not processes_of(tmp_path), limit(CONTRACT_SECONDS))


def test_ranks_over_ssh(by_ssh: Start, tmp_path: Path) -> None:
    code, out, err = finished(by_ssh(PLACE, "-H", BOTH, "--output", "all"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[0] 0 3 0 2 0 2 {ADDRESSES[0]} eth0 False {tmp_path}",
        f"[1] 1 3 1 2 0 1 {ADDRESSES[0]} eth0 False {tmp_path}",
        f"[2] 2 3 0 1 1 2 {ADDRESSES[1]} eth0 False {tmp_path}",
    ]


def test_parameter_servers_over_ssh(by_ssh: Start) -> None:
    code, out, err = finished(by_ssh(TASK, "-H", BOTH, "--workers", "1", "--ps", "1", "--output", "all"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] chief 0 of 3", "[1] worker 0 of 3", "[2] ps 0 of 3"]


def test_a_rank_over_ssh_that_fails_ends_all(by_ssh: Start) -> None:
    code, _, err = finished(by_ssh("rank == 2 and sys.exit(7)\ntime.sleep(60)\n", "-H", BOTH))
    assert code == 7
    place = f"rank 2 on node 2 ({NAME}, {ADDRESSES[1]})"
    assert last_line(err) == f"keras-dist: {place} exited with code 7. All ranks have ended."


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all_over_ssh(by_ssh: Start, tmp_path: Path, signum: signal.Signals) -> None:
    job = by_ssh(WAIT, "-H", BOTH)
    wait_for(tmp_path, "ready0", "ready1", "ready2")
    job.send_signal(signum)
    assert finished(job)[0] == (130 if signum == signal.SIGINT else -9)


def test_a_host_that_can_not_be_reached_is_named(by_ssh: Start) -> None:
    code, _, err = finished(by_ssh("time.sleep(60)\n", "-H", f"{ADDRESSES[0]}:1,nobody-here@{ADDRESSES[1]}:1"))
    assert code == 2
    assert f"The launcher on nobody-here@{ADDRESSES[1]} has ended before all have joined.\n" in err
    assert "Received: exit code 255 (255 is that of ssh itself)\n" in err
