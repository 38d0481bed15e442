"""What is Horovod's: how it sends the gradients of a step, its compression, the cores of its ranks, its build."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import keras_dist as kd
from keras_dist import environment
from keras_dist.cluster import current_backend
from keras_dist.horovod_build.build import HorovodBuildError, smoke_test
from keras_dist.launcher.cluster import HorovodCluster
from tests.limits import limit
from tests.multiprocess.launches import ROOT, RUN, Commands, Start, finished, found, output_of, run

pytestmark = pytest.mark.timeout(120)
MEGABYTE = 2**20 // 4  # numbers of float32
SIZES = [3, 2 * MEGABYTE, 5, MEGABYTE, 7]


@pytest.mark.ci
def test_large_gradients_are_sent_by_themselves(pools: Any) -> None:
    def sums_of_ranks(sizes: list[int]) -> tuple[list[tuple[float, float]], list[str]]:
        """Returns the ends of each sum, and the operations of Horovod with their number of tensors."""

        @tf.function
        def reduced() -> Any:
            tensors = [tf.range(1, size + 1, dtype=tf.float32) * (kd.rank() + 1) for size in sizes]
            sums, table = current_backend().all_reduce(tensors, tf.constant([float(kd.rank())]), "test_messages")
            return [(total[0], total[-1]) for total in sums], table

        graph = reduced.get_concrete_function().graph
        sent = [f"{op.type} {len(op.inputs)}" for op in graph.get_operations() if op.type.startswith("Horovod")]
        ends, table = reduced()
        assert table.numpy().tolist() == [[float(rank)] for rank in range(kd.size())]
        return [(float(first), float(last)) for first, last in ends], sorted(sent)

    results = pools.get("horovod", 2).run(sums_of_ranks, SIZES)
    for ends, sent in results:
        assert ends == [(3.0, 3.0 * size) for size in SIZES]
        # Two of at least half a MB for each rank; the small ones with the row of the rank.
        assert [re.sub("^Horovod", "", each) for each in sent] == ["Allreduce 1", "Allreduce 1", "GroupedAllreduce 4"]
    for ends, _ in pools.get("horovod", 2).run(sums_of_ranks, [MEGABYTE]):  # nothing that is small
        assert ends == [(3.0, 3.0 * MEGABYTE)]


@pytest.mark.ci
def test_a_rank_that_traces_the_gradient_of_a_gather_waits_for_no_other(pools: Any) -> None:
    """As where the check by default runs a loss on the whole batch, and the shapes of shares differ."""

    def gathered() -> list[float]:
        rows = tf.constant([[1.0], [2.0]]) * (kd.rank() + 1)
        with tf.GradientTape() as tape:
            if kd.rank() == 0:
                tape.watch(rows)
            return current_backend().all_gather(rows, "test_gathered_under_a_tape").numpy()[:, 0].tolist()

    assert pools.get("horovod", 2).run(gathered) == [[1.0, 2.0, 2.0, 4.0]] * 2


COMPRESSED = """
import tensorflow as tf
import keras_dist as kd
kd.init(kd.Horovod(compression="fp16"))
kd.init("auto")  # the same cluster, whatever its options
from keras_dist.cluster import current_backend
(total,), _ = current_backend().all_reduce([tf.constant([1.0001])], tf.constant([0.0]), "compressed")
print("found:", total.numpy().tolist())
"""


@pytest.mark.full
def test_compression_from_the_start(tmp_path: Path) -> None:
    """The option of `kd.init`, by the real launcher. The promised case "compression-fp16" has its numbers."""
    (tmp_path / "train.py").write_text(COMPRESSED)
    assert found(output_of(*RUN, "-np", "2", tmp_path / "train.py")) == [2.0]


CORES = """
import keras_dist as kd
import tensorflow as tf
kd.init()
tf.data.Dataset.range(4).map(tf.square, tf.data.AUTOTUNE).reduce(tf.constant(0, tf.int64), tf.add)
threads = os.listdir("/proc/self/task")
nice = [thread for thread in threads if os.getpriority(os.PRIO_PROCESS, int(thread)) == 19]
allowed = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in threads}
(here / f"seen-{kd.rank()}").write_text(json.dumps({"allowed": [*allowed], "nice": len(nice)}))
"""


@pytest.mark.parametrize(
    ("backend", "is_bound"),
    [
        pytest.param("horovod", True, marks=pytest.mark.ci),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("horovod", False), ("multi_worker", True))),
    ],
)
def test_each_rank_has_its_core_on_which_gloo_yields(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, is_bound: bool
) -> None:
    """All threads of a rank have the same. On hosts of more cores, `part_of` of the unit tests divides them."""
    monkeypatch.setenv("KERAS_DIST_BIND", "1" if is_bound else "0")
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    os.sched_setaffinity(0, cores)
    try:
        code, _, err = start(CORES, "--backend", backend).finish()
    finally:
        os.sched_setaffinity(0, before)
    assert code == 0, err
    ranks = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    assert backend != "horovod" or all(rank["nice"] > 0 for rank in ranks)
    assert [rank["allowed"] for rank in ranks] == ([[[cores[0]]], [[cores[-1]]]] if is_bound else [[cores]] * 2)


# Rank 1 never submits the tensor "withheld". Without the patch rank 0 would wait for it forever.
WITHHOLDING = """
import signal
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
hvd.allreduce(tf.constant(1.0), name="together")
if hvd.rank() == 1:
    signal.pause()
try:
    tf.function(lambda: hvd.allreduce(tf.constant(1.0), name="withheld"))()
except tf.errors.UnknownError as error:
    print("ENDED", error.message)
"""


@pytest.mark.timeout(120)
@pytest.mark.ci
def test_a_withheld_tensor_ends_by_the_stall_inspector_which_names_the_rank(commands: Commands) -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with HorovodCluster(2, {**environment.current(), **limits}) as cluster:
        first, second = [commands(sys.executable, "-c", WITHHOLDING, **cluster.environment(rank)) for rank in range(2)]
        _, out, err = finished(first, 90)
        second.kill()
        second.wait()
    assert "Missing ranks:\n1: [withheld]\n" in err
    assert 'One or more rank (marked by "!") is stalled for longer than 2 seconds. Will shutdown.' in err
    assert "Horovod has been shut down" in out.partition("ENDED")[2]


@pytest.mark.full
@pytest.mark.timeout(60)
def test_a_smoke_test_that_fails_shows_why_and_one_that_hangs_ends(tmp_path: Path) -> None:
    module = tmp_path / "tensorflow.py"
    module.write_text("raise ImportError('no TensorFlow for this test')")
    environ = {**environment.current(), "PYTHONPATH": str(tmp_path)}
    with pytest.raises(HorovodBuildError, match="(?s)test failed.*exit code 1.*no TensorFlow for this test"):
        smoke_test(environ)
    module.write_text("import time; time.sleep(1000)")
    start = time.monotonic()
    with pytest.raises(HorovodBuildError, match="no result after 2 s"):
        smoke_test(environ, time_limit_s=2.0)
    assert time.monotonic() - start < limit(2.0)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("python", "tensorflow"), [("3.12", "2.21"), ("3.13", "2.21"), ("3.11", "2.20")], ids=lambda value: value
)
def test_another_python_or_tensorflow(tmp_path: Path, python: str, tensorflow: str) -> None:
    program = shutil.which(f"python{python}")
    works = program and subprocess.run([program, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0
    if not works:
        pytest.skip(f"there is no working python{python} on PATH")
    subprocess.run([str(program), "-m", "venv", str(tmp_path / "venv")], check=True)
    interpreter = tmp_path / "venv" / "bin" / "python"
    # Not editable: that would write its metadata over the one of the environment that runs this test.
    pip = [str(interpreter), "-m", "pip", "--quiet", "install", f"tensorflow-cpu=={tensorflow}.*", "keras>=3.15,<3.16"]
    subprocess.run(pip, check=True)
    site_packages = tmp_path / "venv" / "lib" / f"python{python}" / "site-packages"
    (site_packages / "keras_dist.pth").write_text(f"{ROOT}\n")
    output = install_horovod(interpreter)
    assert f"tensorflow-cpu-{tensorflow}." in output
    assert f"cpython-{python.replace('.', '')}" in output
    assert "Tested: an all-reduce of 2 processes gave the right sum" in output
    selftest = [str(interpreter), "-m", "keras_dist", "selftest", "-np", "2", "--backend"]
    for backend in ("horovod", "multi_worker"):
        done = subprocess.run([*selftest, backend], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ok      training: " in done.stdout


def install_horovod(python: Path, **variables: str) -> str:
    """Runs `keras-dist install-horovod` and returns what it says."""
    done = run(python, "-m", "keras_dist", "install-horovod", folder=python.parent, seconds=1700, **variables)
    assert done.returncode == 0, done.stderr
    return done.stderr
