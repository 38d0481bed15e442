"""Another user of the machine tries the ports of a job: nothing is read, nothing written, no job ended."""

import codecs
import http.client
import json
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keras_dist import environment, store
from keras_dist.comm.backend import Rendezvous
from keras_dist.comm.watchdog import why_no_grpc
from keras_dist.launcher.cluster import Cluster, HorovodCluster, MultiWorkerCluster
from tests.multiprocess.launches import KERAS_DIST, ROOT

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
    pytest.mark.timeout(60),
]
STRANGER = "nobody"
KEY = "/keras_dist_failed/v"
BODY = b"1 ValueError: a stranger"


def as_a_stranger(function: Callable[[], Any]) -> Any:
    """Calls a function in a process of another user, and returns what it returns."""
    codecs.lookup("idna")  # which connecting needs, and the other user may not be allowed to read
    reader, writer = os.pipe()
    user = pwd.getpwnam(STRANGER)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        try:
            answer = [os.geteuid(), function()]
        except BaseException as error:
            answer = [os.geteuid(), type(error).__name__]
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        user_id, answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert user_id == user.pw_uid
    return answer


def asked(port: int, method: str, body: bytes | None = None) -> list[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, KEY, body=body)
    answer = connection.getresponse()
    return [answer.status, answer.read().decode()]


def put_and_close(port: int) -> str:
    """The kernel forgets whose a socket was that is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"PUT %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (KEY.encode(), len(BODY), BODY))
    return "sent"


# The store closes the connection: before, while or after the stranger sends.
REFUSED = ("RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")


@pytest.mark.parametrize("kind", [HorovodCluster, MultiWorkerCluster])
def test_the_launchers_store(kind: type[Cluster]) -> None:
    with kind(2, environment.current()) as cluster:
        own = Rendezvous(("127.0.0.1", cluster.nodes[0].port))
        own.put("failed", "0 TypeError: the rank's own")
        assert as_a_stranger(lambda: asked(cluster.nodes[0].port, "PUT", BODY)) in REFUSED
        assert as_a_stranger(lambda: asked(cluster.nodes[0].port, "GET")) in REFUSED
        for _ in range(20):
            as_a_stranger(lambda: put_and_close(cluster.nodes[0].port))
        assert own.get("failed") == "0 TypeError: the rank's own"


def listening() -> list[list[Any]]:
    """Returns the ports on which this process listens, each with the interface to which it is bound."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    interface = one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode()
                    found.append([one.getsockname()[1], interface])
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "backend",
    ["horovod", *(pytest.param(name, marks=pytest.mark.full) for name in ("mirrored", "central_storage", "tpu"))],
)
def test_nothing_listens_once_the_ranks_have_joined(pools: Any, backend: str) -> None:
    found = pools.get(backend, 1 if backend == "tpu" else 2).run(listening)
    assert found == [[]] * len(found)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("multi_worker", marks=pytest.mark.full), pytest.param("parameter_server", marks=pytest.mark.ci)],
)
def test_tensorflows_servers_listen_on_the_loopback_interface_only_and_for_all_its_users(
    pools: Any, backend: str
) -> None:
    found = pools.get(backend, 2).run(listening)
    assert [interface for ports in found for _, interface in ports] == ["lo"] * len(found)
    port = found[0][0][0]
    assert as_a_stranger(lambda: why_no_grpc(f"127.0.0.1:{port}")) == ""  # docs/security.md says so, and what helps


SHOW_PORT_AND_WAIT = """
import json, os, sys
import keras_dist as kd
kd.init()
if kd.is_chief():
    with open(sys.argv[1], "w") as ports:
        ports.write(json.dumps(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]))
    open(sys.argv[2]).read()
kd.barrier()
print("together", kd.size())
"""


@pytest.mark.full
def test_a_network_of_its_own_keeps_strangers_out(tmp_path: Path) -> None:
    (line,) = re.findall(r"^unshare (.*)$", (ROOT / "docs/security.md").read_text(), re.M)
    if subprocess.run(["unshare", "--user", "--net", "true"], check=False).returncode != 0:
        pytest.skip("this system lets nobody make a network namespace")
    script, shown, tried = tmp_path / "train.py", tmp_path / "ports.fifo", tmp_path / "tried.fifo"
    script.write_text(SHOW_PORT_AND_WAIT)
    os.mkfifo(shown)
    os.mkfifo(tried)
    command = line.replace("keras-dist", shlex.join(KERAS_DIST)).replace("train.py", f"{script} {shown} {tried}")
    with subprocess.Popen(f"exec unshare {command}", shell=True, stdout=subprocess.PIPE, text=True) as job:
        addresses = json.loads(shown.read_text())
        answers = [as_a_stranger(lambda: why_no_grpc(address)) for address in addresses]  # noqa: B023
        tried.write_text("")
        output, _ = job.communicate(timeout=60)
    assert answers == ["Connection refused"] * 2
    assert "together 2" in output


def test_a_store_for_other_hosts_takes_signed_requests_only() -> None:
    server = store.Server("", secret="known to the ranks")
    address = "127.0.0.1", server.port
    own, other, none = Rendezvous(address, "known to the ranks"), Rendezvous(address, "guessed"), Rendezvous(address)
    own.put("failed", "the rank's own")
    for stranger in (other, none):
        stranger.put("failed", "a stranger's")
        assert stranger.get("failed") is None
    assert own.get("failed") == "the rank's own"
    server.close()


def test_the_kernel_is_asked_for_one_connection_as_the_list_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ends = client.getsockname(), server.getsockname()
        assert store._looked_up(*ends) == store._listed(*ends) == os.geteuid()
    assert store._looked_up(*ends) is store._listed(*ends) is None
    assert not store.is_of_this_user(*ends)
