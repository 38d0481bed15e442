"""Another user of the machine tries the ports of a job: nothing is read, nothing written, no job ended."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import socket
from collections.abc import Callable
from typing import Any

import pytest

from keras_dist import environment, store
from keras_dist.comm.rendezvous import Rendezvous
from keras_dist.launch.cluster import Cluster, HorovodCluster, MultiWorkerCluster
from keras_dist.testing import run_workers

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
    pytest.mark.timeout(60),
]
STRANGER = "nobody"
KEY = "/keras_dist_failed/v"


def as_a_stranger(function: Callable[[], Any]) -> Any:
    """Calls a function in a process of another user, and returns what it returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        user = pwd.getpwnam(STRANGER)
        os.setgroups([])
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        try:
            answer = [os.geteuid(), function()]
        except BaseException as error:
            answer = [os.geteuid(), f"{type(error).__name__}"]
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        user_id, answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert user_id == pwd.getpwnam(STRANGER).pw_uid
    return answer


def put(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("PUT", KEY, body=b"1 ValueError: a stranger")
    return connection.getresponse().status


def get(port: int) -> list[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", KEY)
    answer = connection.getresponse()
    return [answer.status, answer.read().decode()]


def put_and_close(port: int) -> str:
    """The kernel forgets whose a socket was that is closed."""
    body = b"1 ValueError: a stranger"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"PUT %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (KEY.encode(), len(body), body))
    return "sent"


@pytest.mark.parametrize("kind", [HorovodCluster, MultiWorkerCluster])
def test_the_launchers_store(kind: type[Cluster]) -> None:
    with kind(2, environment.current()) as cluster:
        own = Rendezvous(("127.0.0.1", cluster.port))
        own.put("failed", "0 TypeError: the rank's own")
        assert as_a_stranger(lambda: put(cluster.port)) in ("RemoteDisconnected", "ConnectionResetError")
        assert as_a_stranger(lambda: get(cluster.port)) in ("RemoteDisconnected", "ConnectionResetError")
        for _ in range(20):
            as_a_stranger(lambda: put_and_close(cluster.port))
        assert own.get("failed") == "0 TypeError: the rank's own"


def interfaces() -> str:
    """Returns the interfaces to which this process's listening sockets are bound."""
    import os
    import socket

    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(one.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0").decode())
        except OSError:
            continue
    return ",".join(sorted(found))


@pytest.mark.parametrize(("backend", "ranks"), [("multi_worker", 2), ("parameter_server", 2)])
def test_tensorflows_servers_listen_on_the_loopback_interface_only(backend: str, ranks: int) -> None:
    assert set(run_workers(interfaces, n=ranks, backend=backend)) == {"lo"}


def test_a_store_for_other_hosts_takes_signed_requests_only() -> None:
    server = store.serve("", secret="known to the ranks")
    address = "127.0.0.1", server.port
    own, other, none = Rendezvous(address, "known to the ranks"), Rendezvous(address, "guessed"), Rendezvous(address)
    own.put("failed", "the rank's own")
    for stranger in (other, none):
        stranger.put("failed", "a stranger's")
        assert stranger.get("failed") is None
    assert own.get("failed") == "the rank's own"
    server.close()
