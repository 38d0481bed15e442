"""Backends with several replicas in one process: placement and refusals; connecting to a TPU that isn't there."""

import ast
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keras_dist.launcher.nodes import free_ports
from keras_dist.testing import WorkerError
from tests.contract.harness import (
    FLOAT64,
    assert_close,
    assert_identical,
    flat,
    folder,
    reference_in_worker,
    run_in_worker,
)
from tests.forks import ForkedPool, ForkServer
from tests.multiprocess.launches import SCRIPTS, Commands, output_of
from tests.multiprocess.test_parameter_server import own_step

Run = Callable[[str], subprocess.CompletedProcess[str]]
HEAD = """
import keras, numpy as np, tensorflow as tf
import keras_dist as kd
"""


@pytest.fixture
def run(forks: ForkServer, tmp_path: Path) -> Run:
    return lambda body: forks.run(HEAD + body, tmp_path)


GRADIENTS = 64 * 512 + 512 + 512 * 8  # numbers; the last bias is too small to be listed
ROWS = 4 * 64  # of the share of a batch of 12, on 3 devices


@pytest.fixture
def crossing(forks: ForkServer, tmp_path: Path) -> Callable[[str], list[str]]:
    """Returns the lines that `scripts/crossing.py` prints of a backend."""

    def lines(backend: str) -> list[str]:
        done = forks.run((SCRIPTS / "crossing.py").read_text(), tmp_path, backend)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return lines


@pytest.mark.parametrize(
    ("backend", "first", "others"),
    [
        pytest.param("mirrored", 0, (1, 2), marks=pytest.mark.ci),
        pytest.param("others", 1, (0, 2), marks=pytest.mark.full),
    ],
)
def test_no_device_reads_the_weights_of_another(
    crossing: Callable[[str], list[str]], backend: str, first: int, others: tuple[int, ...]
) -> None:
    """Only gradients, their sums and rows of the batch go between devices, and all copies are alike."""
    places, sent, *copies = crossing(backend)
    assert places == f"['CPU:{first}']"  # of the variables, and of the batch
    expected = {f"other CPU:{other}->CPU:{first}": GRADIENTS for other in others}
    expected |= {f"other CPU:{first}->CPU:{other}": GRADIENTS + ROWS for other in others}
    assert ast.literal_eval(sent) == expected
    assert copies[:2] == ["after fit: []", "after assignments: []"]
    assert copies[2] == "The devices have different weights, so they no longer train the same model."


@pytest.mark.full
def test_central_storage_holds_everything_on_the_host_and_sends_weights_in_each_step(
    crossing: Callable[[str], list[str]],
) -> None:
    places, sent = crossing("central_storage")
    assert places == "['CPU:0']"
    assert {pair: size for pair, size in ast.literal_eval(sent).items() if pair.startswith("weight")} == {
        "weight CPU:0->CPU:1": GRADIENTS, "weight CPU:0->CPU:2": GRADIENTS,
    }  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("test_fit_float64", marks=pytest.mark.full),
        pytest.param("test_batchnorm_synchronized", marks=pytest.mark.ci),
    ],
)
def test_two_ranks_of_horovod_with_two_devices_each(
    case: str, forks: ForkServer, pools: Any, tmp_path: Path
) -> None:
    """In `make test` and on all cases multi_worker does the same."""
    case_of = "tests.contract.test_training", case
    (plain,) = pools.get("serial", 1).run(reference_in_worker, *case_of, folder(tmp_path, "plain"))
    with ForkedPool(forks, 2, "horovod", os.environ, replicas=2) as pool:
        first, second = pool.run(run_in_worker, *case_of, folder(tmp_path, "distributed"))
        assert pool.run(_replicas) == [(2, 4), (2, 4)]
    assert_identical(flat(first), flat(second), "ranks 0 and 1")
    assert_close(flat(first), flat(plain), FLOAT64)


def _replicas() -> tuple[int, int]:
    import keras_dist as kd

    return kd.size(), kd.num_replicas()


def test_central_storage_refuses_a_model_from_before(run: Run) -> None:
    finished = run(
        "devices = tf.config.list_physical_devices('CPU')\n"
        "tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 3)\n"
        "model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])\n"
        "kd.init(kd.CentralStorage(compute_devices=['CPU:1', 'CPU:2'], parameter_device='CPU:1'))\n"
        "kd.distribute(model)\n"
    )
    assert finished.returncode == 1
    assert (
        "The model has variables that are not on CPU:1, where this backend keeps them.\n"
        "Received: sequential/dense/kernel on CPU:0, 2 in all\n"
        "Remedy: Move `kd.init()` above the code that builds or loads the model"
    ) in finished.stderr


CAN_NOT_BE = {
    "kd.Mirrored(devices=['CPU:0', 'CPU:1'], all_reduce='nccl')": (
        "The option all_reduce='nccl' works between GPUs only.\nReceived: devices=['CPU:0', 'CPU:1']\n"
        "Remedy: Use all_reduce='reduce_to_one'."
    ),
    "kd.Mirrored(devices=['CPU:0', 'GPU:7'])": (
        "There is no such device.\nReceived: 'GPU:7' (there are CPU:0, CPU:1)\nRemedy: Name devices that exist"
    ),
    "kd.Mirrored(devices=['CPU:0', '/device:cpu:0'])": (
        "A device is named twice.\nReceived: devices=['CPU:0', '/device:cpu:0']\nRemedy: Name each once."
    ),
    "kd.Mirrored(devices='GPU:0')": (
        "Devices must be a list of names.\nReceived: 'GPU:0'\nRemedy: For example ['GPU:0', 'GPU:1']."
    ),
    "kd.Mirrored(all_reduce='ring')": (
        "Unknown value for the option `all_reduce`.\nReceived: all_reduce='ring'\n"
        "Remedy: Use one of 'auto', 'nccl', 'hierarchical_copy', 'reduce_to_one'."
    ),
    "kd.CentralStorage(parameter_device='host')": "There is no such device.\nReceived: 'host' (there are CPU:0, CPU:1)",
}


def test_devices_that_can_not_be(run: Run) -> None:
    """In one process: the first backend creates a second CPU, which the others find."""
    tries = f"""
told = []
for backend in {list(CAN_NOT_BE)}:
    try:
        kd.init(eval(backend))
    except kd.ConfigurationError as error:
        told.append(str(error))
print(told)
"""
    for message, expected in zip(ast.literal_eval(run(tries).stdout), CAN_NOT_BE.values(), strict=True):
        assert message.startswith(expected)


def test_one_of_several_processes_is_refused(forks: ForkServer, tmp_path: Path) -> None:
    cluster = {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": 0}}
    program = "import keras_dist as kd; kd.init('mirrored')"
    done = forks.run(program, tmp_path, TF_CONFIG=json.dumps(cluster))
    assert done.returncode == 1
    assert "The backend 'mirrored' needs one process for all devices, but several were started." in done.stderr


@pytest.mark.full
def test_a_train_step_that_is_a_function_of_its_own_is_refused(pools: Any) -> None:
    says = "The replicas of one process can only reduce in the step itself, not in a tf.function"
    with pytest.raises(WorkerError, match=f"(?s){says}.*Remove @tf.function from `train_step`"):
        pools.get("mirrored", 2).run(own_step, True)


def test_a_cpu_is_divided_for_a_script_that_asks(run: Run) -> None:
    finished = run("kd.init('mirrored', devices=['CPU:0', 'CPU:1'])\nprint(kd.num_replicas())")
    assert finished.stdout == "2\n"
    assert "keras_dist: mirrored (2 CPUs; chosen by the script)" in finished.stderr


# Connecting to a TPU that isn't there: every way ends in time, with an error of ours. Real servers of TensorFlow.

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


def errors_of(*names: str, **variables: str) -> list[str]:
    return output_of(sys.executable, "-c", CONNECT, *names, **variables).split("\n--\n")[:-1]


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


@pytest.mark.ci
def test_nothing_waits_for_ever() -> None:
    """No TPU on this machine; nobody at a port, somebody who never answers, and somebody who is no TPU's worker."""
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    with listener(b"") as mute, listener(b"220 mail.example.org ESMTP\r\n") as mail:
        endpoints = f"grpc://{nobody},grpc://{mute},grpc://{mail}"
        local, unanswered = errors_of("local", endpoints, KERAS_DIST_JOIN_TIMEOUT="4")
    assert "The installed TensorFlow can't use a TPU." in local
    assert "TPU 'local', chosen by the script" in local
    assert "make setup TF=tpu" in local
    assert unanswered.splitlines()[:2] == [
        "PeerLostError: Not all workers of the TPU answer; waited 4 s.",
        f"Received: {nobody} (Connection refused), {mute} (no answer), {mail} (not a server of TensorFlow); "
        "0 of 3 answer",
    ]


@pytest.mark.full
def test_a_pod_of_two_servers_without_tpu(commands: Commands) -> None:
    """The connection is made; what the workers lack is then told by name."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    servers = [commands(sys.executable, "-c", SERVE, str(index), *addresses) for index in range(2)]
    for server in servers:
        assert server.stdout.readline() == "serves\n"
    endpoints = ",".join(f"grpc://{address}" for address in addresses)
    (error,) = errors_of("", KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS=endpoints, KERAS_DIST_JOIN_TIMEOUT="60")
    for server in servers:
        server.kill()
        server.wait()
    assert error.startswith("ConfigurationError: There is no TPU at the workers.")
    assert f"found by KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, connected to {addresses[0]}, {addresses[1]}" in error
