"""What `keras-dist install-horovod` does besides compiling: no test here compiles or fetches anything."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_dist import progress
from keras_dist.errors import Stopped
from keras_dist.horovod_build import HorovodBuildError, build, cli
from keras_dist.horovod_build.cache import PATCHES, BuildOptions, apply_patches, patches_version
from tests.limits import limit

XLA = "horovod/tensorflow/xla_mpi_ops.cc"
GLOO = "horovod/common/gloo/gloo_controller.cc"
RINGS = "horovod/common/gloo/gloo_context.cc"
PACKAGE = "horovod/__init__.py"
SETUP = "setup.py"
DEVICE = """\
  attr device_attr;
  device_attr.iface = gloo_iface_;
  device_attr.ai_family = AF_UNSPEC;
  auto dev = CreateDevice(device_attr);
"""

# The lines around our patches, as in Horovod 0.28.1.
SOURCE = {
    XLA: '#include <unordered_map>\n\n\n#if TENSORFLOW_VERSION >= 2006000000\n\n#include "tensorflow/x.h"\n',
    GLOO: "  }\n\n  global_ranks_.reserve(size_);\n  {\n    opts.setOutput(global_ranks_.data(), size_);\n",
    RINGS: f"{DEVICE}  timeout_ = GetTimeoutFromEnv();\n{DEVICE}\n  global_ctx = global_context.ctx;\n",
    PACKAGE: "from horovod.runner import run\n\n__version__ = '0.28.1'\n",
    SETUP: "config = 'Debug' if self.debug else 'RelWithDebInfo'\n\ncmake_build_args = ['--config', config]\n",
}


def write_source(root: Path, files: dict[str, str] = SOURCE) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


class TestPatches:
    def test_these_lines_are_replaced_and_nothing_else(self, tmp_path: Path) -> None:
        apply_patches(write_source(tmp_path))
        assert (tmp_path / XLA).read_text() == SOURCE[XLA].replace("2006000000", "2006000000 && HAVE_GPU")
        assert (tmp_path / GLOO).read_text() == SOURCE[GLOO].replace("reserve", "resize")
        first, second = SOURCE[RINGS].split("timeout_")
        line = "  device_attr.iface"
        second = second.replace(line, f"  gloo_iface_ = global_context.gloo_iface_;\n{line}")
        assert (tmp_path / RINGS).read_text() == f"{first}timeout_{second}"
        assert (tmp_path / PACKAGE).read_text() == SOURCE[PACKAGE] + "patched_by_keras_dist = True\n"
        built = "config = 'Debug' if self.debug else 'Release'\n\n"
        built += "cmake_build_args = ['--config', config, '--target', 'tensorflow']\n"
        assert (tmp_path / SETUP).read_text() == built

    @pytest.mark.parametrize(
        ("text", "found"), [(SOURCE[GLOO].replace("reserve", "resize"), "0 times"), (SOURCE[GLOO] * 2, "2 times")]
    )
    def test_a_source_that_does_not_fit_is_refused_and_left_alone(self, tmp_path: Path, text: str, found: str) -> None:
        write_source(tmp_path, {**SOURCE, GLOO: text})
        with pytest.raises(HorovodBuildError, match=f"{re.escape(GLOO)} must contain.*exactly once.*\n.*{found}"):
            apply_patches(tmp_path)
        assert (tmp_path / XLA).read_text() == SOURCE[XLA]

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(HorovodBuildError, match="no such file"):
            apply_patches(write_source(tmp_path, {XLA: SOURCE[XLA]}))

    def test_version_changes_with_what_is_corrected_not_with_the_reasons(self) -> None:
        first, second, *others = PATCHES
        assert patches_version((first, dataclasses.replace(second, after="x"), *others)) != patches_version()
        assert patches_version((first, dataclasses.replace(second, why="x"), *others)) == patches_version()


class TestSteps:
    def test_the_percentage_is_read_from_whole_lines(self) -> None:
        steps = build.Steps()
        assert steps.read("running bdist_wheel\n") == "configuring"
        assert steps.read("[ 57%] Building CXX a.o\n[ 5") == "57 %"
        # This would go back to 56 %: another library's count.
        assert steps.read("6%] Building CXX b.o\n") == "57 %"
        assert steps.read("") == "57 %"


class TestBuild:
    @pytest.fixture
    def setup_py(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A setup.py in place of Horovod's, and a directory for temporary files that is checked afterwards."""
        (tmp_path / "tmp").mkdir()
        (tmp_path / "source").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setattr(build, "fetch_tools", lambda directory, environ: environ)
        monkeypatch.setattr(build, "fetch_source", lambda directory, environ: tmp_path / "source")
        monkeypatch.setattr(progress, "_UPDATE_SECONDS", 0.05)
        yield tmp_path / "source" / "setup.py"
        assert os.listdir(tmp_path / "tmp") == []

    def test_the_wheel_is_given_and_the_log_removed(self, tmp_path: Path, setup_py: Path) -> None:
        setup_py.write_text(
            "import os, sys; d = sys.argv[sys.argv.index('--dist-dir') + 1]; os.mkdir(d)\n"
            "open(d + '/horovod-0.28.1.whl', 'w').write(os.environ['MAKEFLAGS'])"
        )
        with build.built_wheel(BuildOptions(jobs=3), os.environ, tmp_path / "log", io.StringIO()) as wheel:
            assert wheel.read_text() == "-j3"
        assert not (tmp_path / "log").exists()

    def test_a_failure_shows_the_first_error_and_keeps_the_log(self, tmp_path: Path, setup_py: Path) -> None:
        setup_py.write_text("print('[  1%] Building\\na.cc:3:9: fatal error: x.h: No such file'); raise SystemExit(3)")
        with (
            pytest.raises(HorovodBuildError) as error,
            build.built_wheel(BuildOptions(), os.environ, tmp_path / "log", io.StringIO()),
        ):
            pass
        assert error.value.received == (
            f"exit code 3\n  a.cc:3:9: fatal error: x.h: No such file\n  The whole log: {tmp_path / 'log'}"
        )
        assert (tmp_path / "log").read_text().startswith("[  1%] Building\n")

    def test_out_of_memory_gets_its_own_advice(self, tmp_path: Path, setup_py: Path) -> None:
        setup_py.write_text("print('g++: fatal error: Killed signal terminated program cc1plus'); raise SystemExit(1)")
        with (
            pytest.raises(HorovodBuildError, match="Remedy: .*--jobs 1"),
            build.built_wheel(BuildOptions(), os.environ, tmp_path / "log", io.StringIO()),
        ):
            pass

    def test_an_interrupt_ends_the_compilers_and_leaves_nothing(self, tmp_path: Path, setup_py: Path) -> None:
        class Interrupting(io.StringIO):
            """A stream that raises Ctrl-C once a compiler runs."""

            def isatty(self) -> bool:
                return True

            def flush(self) -> None:
                if (tmp_path / "compiler").exists() and (tmp_path / "compiler").read_text():
                    raise KeyboardInterrupt

        setup_py.write_text(
            "import subprocess, tempfile, time; tempfile.mkstemp(); c = subprocess.Popen(['sleep', '100'])\n"
            f"open({str(tmp_path / 'compiler')!r}, 'w').write(str(c.pid)); time.sleep(100)"
        )
        with (
            pytest.raises(KeyboardInterrupt),
            build.built_wheel(BuildOptions(), os.environ, tmp_path / "log", Interrupting()),
        ):
            pass
        assert not (tmp_path / "log").exists()
        assert ended(int((tmp_path / "compiler").read_text()))

    def test_environment_asks_for_what_the_options_say(self) -> None:
        user = {
            "LDFLAGS": "-L/lib",
            "MAKEFLAGS": "--jobserver-auth=3,4",
            "HOROVOD_GPU_OPERATIONS": "MPI",
            "HOME": "/h",
        }
        plain = build.build_environment(BuildOptions(jobs=2), user)
        assert {name: plain.get(name) for name in (*user, "HOROVOD_WITHOUT_MPI", "CMAKE_POLICY_VERSION_MINIMUM")} == {
            "LDFLAGS": "-L/lib -s",
            "MAKEFLAGS": "-j2",
            "HOROVOD_GPU_OPERATIONS": None,
            "HOME": "/h",
            "HOROVOD_WITHOUT_MPI": "1",
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        }
        full = build.build_environment(BuildOptions(mpi=True, gpu=True), {})
        assert (full["HOROVOD_WITH_MPI"], full["HOROVOD_GPU_OPERATIONS"]) == ("1", "NCCL")
        assert "HOROVOD_WITHOUT_MPI" not in full

    def test_without_an_error_the_last_lines_are_shown(self) -> None:
        log = "\n".join(f"line {number}" for number in range(100))
        assert build.error_lines(log) == [f"line {number}" for number in range(88, 100)]


class TestInstall:
    def test_the_same_wheel_is_not_installed_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[list[str]] = []
        monkeypatch.setattr(build, "run_pip", lambda arguments, environ, purpose: calls.append(arguments))
        wheel = tmp_path / "horovod-0.28.1.whl"
        wheel.write_bytes(b"")
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        monkeypatch.setattr(build, "installed_sha256", lambda: empty)
        assert not build.install_wheel(wheel, {})
        assert calls == []
        monkeypatch.setattr(build, "installed_sha256", lambda: None)
        assert build.install_wheel(wheel, {})
        assert calls[-1] == ["install", "--force-reinstall", "--no-deps", f"{wheel.as_uri()}#sha256={empty}"]


class TestCommand:
    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keras_dist", "install-horovod", *arguments]
        return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)

    def test_a_missing_compiler_ends_it_at_once_without_traceback(self, tmp_path: Path) -> None:
        start = time.monotonic()
        done = self.run("--gpu", "--wheel-dir", str(tmp_path), CXX="no-such-compiler")
        assert done.returncode == 2
        assert "Received: no C++ compiler" in done.stderr
        assert "--gpu is untested" in done.stderr
        assert "Traceback" not in done.stderr
        assert os.listdir(tmp_path) == []
        assert time.monotonic() - start < limit(10.0)

    def test_zero_jobs_are_refused(self) -> None:
        done = self.run("--jobs", "0")
        assert (done.returncode, done.stderr.splitlines()[1]) == (2, "Received: --jobs 0")

    def test_help_says_what_is_untested_and_imports_no_tensorflow(self) -> None:
        done = self.run("--help", PYTHONPROFILEIMPORTTIME="1")
        assert "UNTESTED" in done.stdout
        assert "argparse" in done.stderr
        assert "tensorflow" not in done.stderr

    def test_terminate_is_an_interrupt(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(cli, "_install_horovod", lambda args: os.kill(os.getpid(), 15))
        with pytest.raises(Stopped, match="SIGTERM"):
            cli.main(None)  # type: ignore[arg-type]
        assert "Interrupted. Partial builds were removed." in capsys.readouterr().err


def ended(pid: int, time_limit_s: float = 30.0) -> bool:
    """Returns whether a process ends within the time limit. A zombie has ended."""
    deadline = time.monotonic() + time_limit_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
