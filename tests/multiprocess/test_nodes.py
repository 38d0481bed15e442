"""`keras-dist run` on several nodes: two launchers on this machine; two hosts in network namespaces, if root may."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_dist.launcher.nodes import free_ports
from tests.limits import limit
from tests.multiprocess.hosts import ADDRESSES, ip, two_hosts
from tests.multiprocess.launches import (
    CONTRACT_SECONDS,
    PREAMBLE,
    RUN,
    SMALL_MODEL,
    Commands,
    finished,
    found,
    last_line,
    output_of,
    processes_marked,
    until,
)

NAME = socket.gethostname()
SECRET = "0123456789abcdef-of-this-test"
pytestmark = pytest.mark.timeout(300)

WAIT = "mark(f'ready{rank}'); time.sleep(60)"
TRAIN = f"""
import json, sys
{SMALL_MODEL}
model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
from keras_dist.cluster import current_backend
place = current_backend().topology
told = current_backend().all_gather_object("places", [place.rank, place.local_rank, place.local_size])
if kd.is_chief():
    print("found:", json.dumps([told, [weight.tolist() for weight in model.get_weights()]]))
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(commands: Commands, tmp_path: Path) -> Start:
    """Starts the launcher of a node."""
    port = free_ports(1)[0]

    def start(
        source: str, node: int, *options: str, count: int = 2, host: str = "127.0.0.1", within: tuple[str, ...] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:  # fmt: skip
        script = tmp_path / "script.py"
        script.write_text(source)
        place = ["--nnodes", str(count), "--node-rank", str(node), "--rendezvous", f"{host}:{port}"]
        size = () if "-np" in options else ("-np", "1")
        environ = {"KERAS_DIST_SECRET": SECRET, "KERAS_DIST_TEST_FOLDER": str(tmp_path), **variables}
        return commands(*within, *RUN, *place, *size, *options, str(script), **environ)

    return start


def finish(*launchers: subprocess.Popen[str], seconds: float = 60) -> list[tuple[int, str, str]]:
    return [finished(launcher, seconds) for launcher in launchers]


def wait_for(folder: Path, *names: str) -> None:
    until(lambda: all((folder / name).exists() for name in names))


def test_the_ranks_of_two_nodes_on_one_host_are_local_to_each_other(launch: Start, tmp_path: Path) -> None:
    source = PREAMBLE + (
        "names = ('SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE', 'HOSTNAME', 'GLOO_IFACE')\n"
        "told = [os.environ['HOROVOD_' + name] for name in names]\n"
        "(here / f'told{rank}').write_text(json.dumps([*told, 'KERAS_DIST_SECRET' in os.environ]))\n"
    )
    both = launch(source, 1, "-np", "2"), launch(source, 0)
    assert finish(*both) == [(0, "", ""), (0, "", "")]
    assert [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(3)] == [
        ["3", str(rank), "3", "0", "1", "127.0.0.1", "lo", False] for rank in range(3)
    ]


@pytest.mark.alone
def test_a_killed_rank_of_one_node_ends_all(launch: Start, tmp_path: Path) -> None:
    source = PREAMBLE + "mark(f'ready{rank}'); wait_for('ready0')\n" + (
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
    both = launch(PREAMBLE + WAIT, 0), launch(PREAMBLE + WAIT, 1)
    wait_for(tmp_path, "ready0", "ready1")
    both[node].send_signal(signal.SIGINT)
    for code, _, err in finish(*both):
        assert (code, last_line(err)) == (130, "keras-dist: stopped by SIGINT.")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.alone
def test_a_launcher_that_is_killed_ends_all(launch: Start, tmp_path: Path, lost: int) -> None:
    both = launch(PREAMBLE + WAIT, 0), launch(PREAMBLE + WAIT, 1)
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
    until(lambda: not processes_marked(str(tmp_path)), limit(CONTRACT_SECONDS))


def test_all_nodes_start_again(launch: Start, tmp_path: Path) -> None:
    source = PREAMBLE + (
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


def test_node_0_is_missing(launch: Start) -> None:
    ((code, _, err),) = finish(launch(WAIT, 1, KERAS_DIST_JOIN_TIMEOUT="0.5"))
    assert code == 2
    assert "Node 0 was not reached within 0.5 s." in err
    assert "Connection refused" in err


def test_nodes_that_do_not_fit_are_refused(launch: Start, tmp_path: Path) -> None:
    first, second = (launch(PREAMBLE + WAIT, 0, count=3), launch(PREAMBLE + WAIT, 2, count=3))
    assert first.stderr is not None
    assert first.stderr.readline().startswith("keras-dist: waits at 127.0.0.1:")  # for node 1
    wrong = {
        "another secret": launch(WAIT, 1, count=3, KERAS_DIST_SECRET="another-secret-of-someone"),
        "backend multi_worker there, horovod on node 0": launch(WAIT, 1, "--backend", "multi_worker", count=3),
        "count 2 there, 3 on node 0": launch(WAIT, 1, count=2),
        f"--node-rank 2 of 3 nodes, and node 2 ({NAME}, 127.0.0.1) has it": launch(WAIT, 2, count=3),
    }
    for why, launcher in wrong.items():
        code, _, err = finish(launcher)[0]
        assert code == 2
        assert f"has refused this node.\nReceived: {why}" in err
    right = launch(PREAMBLE + WAIT, 1, count=3)
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
    """Two network namespaces with a cable between them. As on Debian, the name of each host leads to 127.0.1.1."""
    names = [f"kd{os.getpid()}-{index}" for index in range(2)]
    with two_hosts(names, f"127.0.0.1 localhost\n127.0.1.1 {NAME}\n"):
        yield names


def on(host: str) -> dict[str, Any]:
    return {"within": ("ip", "netns", "exec", host), "host": ADDRESSES[0]}


@pytest.fixture(scope="module")
def weights_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("one") / "one.py"
    script.write_text(TRAIN)
    return found(output_of(sys.executable, script))[1]


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
    launch: Start, hosts: list[str], weights_of_one_process: Any, backend: str, sizes: tuple[int, int]
) -> None:
    both = [
        launch(TRAIN, index, "-np", str(sizes[index]), "--backend", backend, **on(host))
        for index, host in enumerate(hosts)
    ]
    (code, out, err), (code_1, _, err_1) = finish(*both, seconds=150)
    assert (code, code_1) == (0, 0), err + err_1
    places, weights = found(out)
    local = [(local_rank, size) for size in sizes for local_rank in range(size)]
    assert places == [[rank, *place] for rank, place in enumerate(local)]
    for expected, weight in zip(weights_of_one_process, weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-9, atol=1e-9)


def test_a_host_that_is_cut_off_is_lost(launch: Start, hosts: list[str], tmp_path: Path) -> None:
    both = [
        launch(PREAMBLE + WAIT, index, KERAS_DIST_ANSWER_TIMEOUT="2", **on(host))
        for index, host in enumerate(hosts)
    ]
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
