"""`keras-dist run` on several nodes: the launchers of nodes that are all this machine, and options that don't fit."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from keras_dist.launcher.nodes import free_ports
from tests.limits import limit
from tests.multiprocess.launches import (
    CONTRACT_SECONDS,
    PREAMBLE,
    RUN,
    Commands,
    finished,
    last_line,
    processes_of,
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
    return next(line for line in launcher.stderr if what in line)


def finish(*launchers: subprocess.Popen[str], seconds: float = 60) -> list[tuple[int, str, str]]:
    return [finished(launcher, seconds) for launcher in launchers]


def test_the_ranks_of_two_nodes_on_one_host_are_local_to_each_other(launch: Start, tmp_path: Path) -> None:
    (code, out, err), other = finish(launch(PLACE, 1, "-np", "2", "--output", "all"), launch(PLACE, 0))
    place = "3 {0} 3 0 1 127.0.0.1 lo False"
    assert other == (0, f"0 {place.format(0)} {tmp_path}\n", "")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] {rank} {place.format(rank)} {tmp_path}" for rank in (1, 2)]


@pytest.mark.timed
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
@pytest.mark.timed
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
        assert "keras-dist: restarts all ranks (restart 1 of 1)" in err


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
        (NAME, SECRET, "The name of the rendezvous resolves to the loopback interface here"),
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


def test_hosts_are_reached_by_the_interface_that_is_named(commands: Commands, tmp_path: Path) -> None:
    launcher = commands(*RUN, "-H", "localhost:2", "--interface", "lo", script(tmp_path, "print(rank)"))
    assert finish(launcher) == [(0, "0\n", "")]
