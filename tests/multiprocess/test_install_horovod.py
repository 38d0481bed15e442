"""The Horovod that `keras-dist install-horovod` built, and the command itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keras_dist import environment
from keras_dist.horovod_build.build import HorovodBuildError, smoke_test
from keras_dist.launcher.cluster import HorovodCluster
from tests.limits import limit
from tests.multiprocess.launches import ROOT, Commands, finished, run

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
