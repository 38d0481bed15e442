"""Connecting to a TPU that isn't there: every way ends in time, with an error of ours. Real servers of TensorFlow."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.ci]
ROOT = Path(__file__).resolve().parents[2]
CONNECT = """
import sys
import keras_dist as kd
for name in sys.argv[1:]:
    try:
        kd.TPU(name).start(None)
    except kd.DistributionError as error:
        print(f"{type(error).__name__}: {error}\\n--", flush=True)
"""
SERVE = """
import sys
import tensorflow as tf
server = tf.distribute.Server({"worker": sys.argv[2:]}, job_name="worker", task_index=int(sys.argv[1]))
print("serves", flush=True)
server.join()
"""


def environ(**more: str) -> dict[str, str]:
    return {
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_DIST_JOIN_TIMEOUT": "4", **more
    }  # fmt: skip


def errors_of(*names: str, **more: str) -> list[str]:
    command = [sys.executable, "-c", CONNECT, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ(**more))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n--\n")[:-1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[str]]:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    commands = [[sys.executable, "-c", SERVE, str(index), *addresses] for index in range(count)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environ()) for command in commands]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serves\n"
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def listener(words: bytes) -> Iterator[str]:
    """Something that listens, and says this to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            kept = []
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    kept[-1].sendall(words)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_nothing_waits_for_ever() -> None:
    """No TPU on this machine; nobody at a port, somebody who never answers, and somebody who is no TPU's worker."""
    nobody = f"127.0.0.1:{free_port()}"
    with listener(b"") as mute, listener(b"220 mail.example.org ESMTP\r\n") as mail:
        local, unanswered = errors_of("local", f"grpc://{nobody},grpc://{mute},grpc://{mail}")
    assert "The installed TensorFlow can't use a TPU." in local
    assert "TPU 'local', chosen by the script" in local
    assert "make setup TF=tpu" in local
    assert unanswered.splitlines()[:2] == [
        "PeerLostError: Not all workers of the TPU answer; waited 4 s.",
        f"Received: {nobody} (Connection refused), {mute} (no answer), {mail} (not a server of TensorFlow); "
        "0 of 3 answer",
    ]


@pytest.mark.full
def test_a_pod_of_two_servers_without_tpu() -> None:
    """The connection is made; what the workers lack is then told by name."""
    with servers(2) as addresses:
        endpoints = ",".join(f"grpc://{address}" for address in addresses)
        (error,) = errors_of("", KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS=endpoints, KERAS_DIST_JOIN_TIMEOUT="60")
    assert error.startswith("ConfigurationError: There is no TPU at the workers.")
    assert f"found by KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, connected to {addresses[0]}, {addresses[1]}" in error
