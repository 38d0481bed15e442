"""Functions on ranks: `kd.launch`, in a real kernel or without one; the pools of `keras_dist.testing`."""

import ast
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

import keras_dist as kd
from keras_dist.testing import WorkerError, WorkerPool, run_workers
from tests.forks import ForkedPool, ForkServer
from tests.multiprocess.launches import FOLDER, SERIAL_LINE, output_of, processes_of, until

SECONDS = 240
pytestmark = pytest.mark.timeout(600)

SETUP = """
import keras, numpy as np, tensorflow as tf
import keras_dist as kd
assert float(tf.constant(1) + 1) == 2  # TensorFlow is in use
"""
DATA = "x = np.random.default_rng(0).normal(size=(20, 4)); y = x.sum(axis=1, keepdims=True)"
TRAIN = """
class Wide(keras.layers.Dense):  # a class of the notebook
    pass

def build():
    keras.utils.set_random_seed(1)
    keras.config.set_floatx("float64")
    return keras.Sequential([keras.Input((4,)), Wide(5, "tanh"), keras.layers.Dense(1)])

def train(epochs):
    kd.init()
    model = kd.distribute(build())
    model.compile("sgd", "mse")
    losses = model.fit(x, y, batch_size=8, shuffle=False, epochs=epochs).history["loss"]
    return kd.size(), losses
"""


class Kernel:
    """A kernel of Jupyter, cell by cell."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.client = client
        self.pid: int = manager.provisioner.pid  # type: ignore[union-attr]

    def run(self, cell: str, when_printed: dict[str, Callable[[], object]] | None = None) -> tuple[Any, str, str]:
        """Runs a cell; does something as soon as it has printed a text. Returns the kernel's reply, stdout, stderr."""
        texts = {"stdout": "", "stderr": ""}
        left = dict(when_printed or {})

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts[message["content"]["name"]] += message["content"]["text"]
                for text in [text for text in left if text in texts["stdout"]]:
                    left.pop(text)()

        reply = self.client.execute_interactive(cell, output_hook=hook, timeout=SECONDS)
        assert not left, f"not printed: {list(left)}"
        return reply["content"], texts["stdout"], texts["stderr"]

    def value(self, expression: str) -> Any:
        reply, out, _ = self.run(f"print({expression})")
        assert reply["status"] == "ok", reply
        return ast.literal_eval(out)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    environ = {**os.environ, FOLDER: str(tmp_path)}
    manager, client = start_new_kernel(cwd=str(tmp_path), env=environ, startup_timeout=SECONDS)
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.full
def test_a_notebook_trains_on_ranks(kernel: Kernel) -> None:
    reply, _, err = kernel.run(SETUP + DATA + TRAIN)
    assert reply["status"] == "ok", (reply, err)
    reply, out, err = kernel.run("size, losses = kd.launch(train, (2,), np=2)")
    assert reply["status"] == "ok", (reply, err)
    assert "Epoch 1/2" in out
    assert re.search(r"3/3.*loss: \d", out), out  # the progress bar of rank 0
    assert out.count("Epoch 2/2") == 1
    assert "keras_dist: horovod (2 ranks" in err
    assert kernel.value("size") == 2
    # The same function in one process, as in a script.
    output = output_of(sys.executable, "-c", f"{SETUP}\n{DATA}\n{TRAIN}\nprint('\\n', train(2))")
    size, losses = ast.literal_eval(output.splitlines()[-1].strip())
    assert size == 1
    assert kernel.value("losses") == pytest.approx(losses, rel=1e-12)


INTERRUPTED = """
import os, signal
class CtrlC(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            os.kill(os.getpid(), signal.SIGINT)
model = kd.distribute(build())
model.compile("sgd", "mse")
model.fit(x, y, batch_size=8, epochs=100, verbose=0, callbacks=[CtrlC()])
"""


@pytest.mark.full
def test_a_notebook_of_one_process(kernel: Kernel) -> None:
    """Some cells twice: it says so once, and trains the same. Ctrl-C in a cell loses nothing."""
    kernel.run(SETUP + DATA + TRAIN)
    for lines in ([SERIAL_LINE], []):
        _, out, err = kernel.run("kd.init(); print(kd.size())")
        assert (out, [line for line in err.splitlines() if line.startswith("keras_dist")]) == ("1\n", lines)
    for name in ("first", "second"):
        kernel.run(f"{name} = train(2)")
    assert kernel.value("first == second")
    assert kernel.run(INTERRUPTED)[0]["ename"] == "KeyboardInterrupt"
    assert kernel.value("int(model.optimizer.iterations)") == 2
    kernel.run("model.fit(x, y, batch_size=8, epochs=2, verbose=0)")
    assert kernel.value("int(model.optimizer.iterations)") == 2 + 2 * 3


FAIL = """
import os, time
def fail(rank):
    if int(os.environ["HOROVOD_RANK"]) == rank:
        raise ValueError(f"of rank {rank}")
    time.sleep(600)
import keras_dist as kd
kd.launch(fail, (1,), np=2)
"""
ENDLESS = """
import time
import keras_dist as kd
def train():
    try:
        print("trains")
        time.sleep(600)
    except KeyboardInterrupt:
        print("saved")
        raise
kd.launch(train, np=2)
"""
LIVE = """
import pathlib, time
import keras_dist as kd
def wait():
    print("first", end="")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return pathlib.Path.cwd().name
kd.launch(wait, np=2)
"""


def test_errors_output_and_stops(kernel: Kernel, tmp_path: Path) -> None:
    """Without TensorFlow, so one kernel does it all in seconds."""
    reply, _, _ = kernel.run(FAIL)
    assert (reply["ename"], reply["evalue"]) == ("ValueError", "of rank 1")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(reply["traceback"]))
    assert "Rank 1 raised." in shown
    assert re.search(r", line \d+, in fail\n\s*ValueError: of rank 1", shown), shown

    reply, out, _ = kernel.run(ENDLESS, {"trains": lambda: os.kill(kernel.pid, signal.SIGINT)})
    assert reply["ename"] == "KeyboardInterrupt"
    assert re.fullmatch(r"trains\n?saved\n", out)
    assert kernel.value("2 + 2") == 4, "the kernel lives on"

    reply, out, _ = kernel.run(LIVE, {"first": lambda: (tmp_path / "go").touch()})
    assert (reply["status"], out) == ("ok", "first")


def test_the_ranks_end_with_the_kernel(kernel: Kernel, tmp_path: Path) -> None:
    kernel.client.execute(ENDLESS)
    while "trains" not in kernel.client.get_iopub_msg(timeout=SECONDS)["content"].get("text", ""):
        pass
    assert len(processes_of(tmp_path)) >= 3  # with the kernel
    os.kill(kernel.pid, signal.SIGKILL)
    until(lambda: not processes_of(tmp_path))


def test_the_result_is_that_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    def count(start: int) -> tuple[int, str, str]:
        print("é of rank", os.environ["HOROVOD_RANK"])
        print("and an error", file=sys.stderr)
        return start + 1, os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]

    assert kd.launch(count, (41,), np=2) == (42, "0", "2")
    out, err = capsys.readouterr()
    assert (out, err) == ("é of rank 0\n", "and an error\n")


def test_what_cannot_be_sent() -> None:
    lock, why = threading.Lock(), "TypeError: cannot pickle '_thread.lock' object"
    with pytest.raises(kd.ConfigurationError, match="can't be sent to the notebook") as info:
        kd.launch(threading.Lock, np=1)
    assert str(info.value.received).startswith(f"_thread.lock ({why})")
    assert isinstance(info.value.__cause__, kd.WorkerError)
    with pytest.raises(kd.ConfigurationError, match="can't be sent to the ranks") as info:
        kd.launch(lambda: lock, np=2)
    assert info.value.received == why


def test_a_rank_that_is_killed() -> None:
    def die() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(kd.WorkerError, match="Rank 1 ended without an error of Python") as info:
        kd.launch(die, np=2)
    assert info.value.rank == 1
    assert str(info.value.received).startswith("rank 1 was killed by SIGKILL")


def test_an_error_that_cannot_be_sent() -> None:
    def fail() -> None:
        raise ValueError(threading.Lock())

    with pytest.raises(kd.WorkerError, match="Rank 0 raised") as info:
        kd.launch(fail, np=1)
    assert info.value.error is None
    assert "in fail\n" in str(info.value.received)


def test_what_can_not_be_launched() -> None:
    with pytest.raises(kd.ConfigurationError, match="this backend has none"):
        kd.launch(print, np=2, backend="parameter_server")
    with pytest.raises(kd.ConfigurationError, match="This backend can't be launched"):
        kd.launch(print, np=2, backend="mirrored")
    with ThreadPoolExecutor(1, "other") as pool, pytest.raises(kd.ConfigurationError) as info:
        pool.submit(kd.launch, print, np=1).result(60)
    assert info.value.received == "thread 'other_0'"


# `keras_dist.testing`: results by rank, failures that name the rank, and a pool that continues after them.


def leave_traces() -> None:
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.layers.Dense(1)
    os.chdir("/")


def look() -> Any:
    import keras
    import numpy as np

    states = keras.config.floatx(), keras.config.dtype_policy().name, keras.layers.Dense(1).name, os.getcwd()
    return *states, float(np.random.uniform()), float(keras.random.uniform([]))


def raise_on(rank: int) -> None:
    import keras_dist as kd

    if kd.rank() == rank:
        raise ValueError(f"of rank {rank}")


def die() -> None:
    print("the last line", flush=True)
    os._exit(7)


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_one_pool_from_start_to_end(forks: ForkServer, is_forked: bool) -> None:
    """With one rank; the tests of several ranks are below."""
    with ForkedPool(forks, 1, "serial", os.environ) if is_forked else WorkerPool(1, "serial") as pool:
        offset = 10
        assert pool.run(lambda x: x + offset, 5) == [15]
        pids = pool.pids
        fresh = pool.run(look)
        assert fresh[0][:4] == ("float32", "float32", "dense", os.getcwd())
        pool.run(leave_traces)
        assert pool.run(look) == fresh
        with pytest.raises(WorkerError, match="(?s)Rank 0 raised.*, in raise_on.*ValueError: of rank 0") as info:
            pool.run(raise_on, 0)
        assert isinstance(info.value.error, ValueError)
        assert pool.run(os.getpid) == pids, "it could continue"
        with pytest.raises(WorkerError, match=r"(?s)Rank 0 died with code 7.*the last line"):
            pool.run(die)
        with pytest.raises(WorkerError, match="Rank 0 did not finish the function within 0.5 s"):
            pool.run(signal.pause, timeout=0.5)
        assert pool.run(os.getpid) == pool.pids != pids
        last = pool.pids[0]
    assert not os.path.exists(f"/proc/{last}")
    assert pool.pids == []


def test_the_rank_that_failed_is_named() -> None:
    with pytest.raises(WorkerError, match="(?s)Rank 1 raised.*ValueError: of rank 1") as info:
        run_workers(raise_on, 2, args=(1,))
    assert info.value.rank == 1


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kd.ConfigurationError, match="n=2, backend='serial'"):
        WorkerPool(2, "serial")
    with pytest.raises(kd.ConfigurationError, match="n=0"):
        WorkerPool(0)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(kd.ConfigurationError, match="pip install cloudpickle"):
        WorkerPool(1, "serial")
