"""What `keras-dist install-horovod` does besides compiling: no test here compiles or fetches anything."""

import contextlib
import dataclasses
import importlib.util
import io
import os
import pwd
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_dist import environment, progress
from keras_dist.errors import ConfigurationError, Stopped
from keras_dist.horovod_build import build
from keras_dist.horovod_build.build import (
    PATCHES,
    BuildOptions,
    HorovodBuildError,
    WheelCache,
    apply_patches,
    check_requirements,
    wheel_name,
)
from tests.limits import limit

GLOO = "horovod/common/gloo/gloo_controller.cc"


@pytest.mark.parametrize(("times", "found"), [(0, "0 times"), (2, "2 times")])
def test_a_source_that_does_not_fit_is_refused(tmp_path: Path, times: int, found: str) -> None:
    before: dict[str, str] = {}
    for patch in PATCHES:
        before[patch.path] = before.get(patch.path, "") + patch.before
    for path, text in before.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text * (times if path == GLOO else 1))
    with pytest.raises(HorovodBuildError, match=f"{re.escape(GLOO)} must contain.*exactly once.*\n.*{found}"):
        apply_patches(tmp_path)


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

    @pytest.mark.parametrize(
        ("line", "remedy"),
        [
            ("a.cc:3:9: fatal error: x.h: No such file", "tries again"),
            ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ],
    )
    def test_a_failure_shows_the_first_error_and_keeps_the_log(
        self, tmp_path: Path, setup_py: Path, line: str, remedy: str
    ) -> None:
        log = tmp_path / "log"
        setup_py.write_text(f"print('[  1%] Building\\n{line}'); raise SystemExit(3)")
        wheel = build.built_wheel(BuildOptions(), os.environ, log, io.StringIO())
        with pytest.raises(HorovodBuildError) as error, wheel:
            pass
        assert error.value.received == f"exit code 3\n  {line}\n  The whole log: {log}"
        assert remedy in str(error.value.remedy)
        assert log.read_text().startswith("[  1%] Building\n")

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
        user = {"LDFLAGS": "-L/lib", "MAKEFLAGS": "--jobserver-auth=3,4", "HOROVOD_GPU_OPERATIONS": "MPI"}
        plain = build.build_environment(BuildOptions(jobs=2), user)
        assert (plain["LDFLAGS"], plain["MAKEFLAGS"], plain["HOROVOD_WITHOUT_MPI"]) == ("-L/lib -s", "-j2", "1")
        assert "HOROVOD_GPU_OPERATIONS" not in plain
        full = build.build_environment(BuildOptions(mpi=True, gpu=True), {})
        assert (full["HOROVOD_WITH_MPI"], full["HOROVOD_GPU_OPERATIONS"]) == ("1", "NCCL")
        assert "HOROVOD_WITHOUT_MPI" not in full


class TestCommand:
    def test_a_missing_compiler_ends_it_at_once_without_traceback(self, tmp_path: Path) -> None:
        start = time.monotonic()
        command = [sys.executable, "-m", "keras_dist", "install-horovod", "--gpu", "--wheel-dir", str(tmp_path)]
        environ = {**os.environ, "CXX": "no-such-compiler"}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "Received: no C++ compiler" in done.stderr
        assert "--gpu is untested" in done.stderr
        assert "Traceback" not in done.stderr
        assert os.listdir(tmp_path) == []
        assert time.monotonic() - start < limit(10.0)

    def test_terminate_is_an_interrupt(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(build, "_install_horovod", lambda args: os.kill(os.getpid(), 15))
        with pytest.raises(Stopped, match="SIGTERM"):
            build.main(None)  # type: ignore[arg-type]
        assert "Interrupted. Partial builds were removed." in capsys.readouterr().err


def ended(pid: int, time_limit_s: float = 30.0) -> bool:
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


NAME = "tensorflow-cpu-2.21.0_cpython-311_gloo_0123456789ab"


def write_wheel(path: Path, content: str = "library", member: str = "horovod/tensorflow/mpi_lib.so") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content * 1000)
    return path


def test_a_wheel_is_named_after_all_that_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, gloo = "tensorflow-cpu 2.21.0", BuildOptions()
    name = wheel_name(plain, gloo, {})
    assert name.startswith("tensorflow-cpu-2.21.0_cpython-3")
    others = {
        wheel_name(plain, BuildOptions(mpi=True), {}), wheel_name(plain, BuildOptions(gpu=True), {}),
        wheel_name(plain, gloo, {"CXX": "clang++"}), wheel_name(plain, gloo, {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}),
        wheel_name("tensorflow 2.21.0", gloo, {}), wheel_name("tensorflow-cpu 2.20.0", gloo, {}),
    }  # fmt: skip
    first, second, *rest = PATCHES
    here = {
        (build, "HOROVOD_VERSION"): "0.28.2", (environment, "processor_features"): lambda: ["avx"],
        (build, "PATCHES"): (first, dataclasses.replace(second, after="x"), *rest),
        (build.platform, "libc_ver"): lambda: ("glibc", "2.1"), (build.sysconfig, "get_platform"): lambda: "other",
        (build.sysconfig, "get_config_var"): lambda name: "cpython-39",
    }  # fmt: skip
    for (module, attribute), value in here.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, attribute, value)
            others.add(wheel_name(plain, gloo, {}))
    assert len(others - {name}) == 12
    monkeypatch.setattr(build, "PATCHES", (first, dataclasses.replace(second, why="x"), *rest))
    assert wheel_name(plain, BuildOptions(jobs=7), {"HOROVOD_RANK": "1"}) == name


class Builder:
    def __init__(self, directory: Path) -> None:
        self.count = 0
        self._wheel = write_wheel(directory / "horovod-0.28.1-new.whl", "new")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Path]:
        self.count += 1
        yield self._wheel


def never() -> None:
    raise AssertionError("no other process builds")


@pytest.fixture
def cached(tmp_path: Path) -> WheelCache:
    return WheelCache(tmp_path / "cache", NAME, tmp_path / "state")


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


class TestCache:
    def test_a_missing_wheel_is_built_once(self, cached: WheelCache, builder: Builder, tmp_path: Path) -> None:
        wheel, built = cached.find_or_build(builder, force=False, waiting=never)
        assert built
        assert wheel == tmp_path / "cache" / NAME / "horovod-0.28.1-new.whl"
        assert cached.find_or_build(builder, force=False, waiting=never) == (wheel, False)
        assert cached.find_or_build(builder, force=True, waiting=never) == (wheel, True)
        assert builder.count == 2

    def test_a_damaged_wheel_is_replaced(self, cached: WheelCache, builder: Builder) -> None:
        wheel = write_wheel(cached.directory / "horovod-0.28.1-old.whl")
        assert cached.find() == wheel
        wheel.write_bytes(wheel.read_bytes()[:-100])
        assert cached.find() is None
        new, _ = cached.find_or_build(builder, force=False, waiting=never)
        assert sorted(path.name for path in cached.directory.iterdir()) == ["horovod-0.28.1-new.whl", "lock"]
        assert cached.find() == new

    def test_of_two_builders_at_once_one_builds_and_the_other_waits(self, tmp_path: Path) -> None:
        folders = [str(tmp_path / "cache"), str(tmp_path / "state")]
        program = f"""
            import contextlib, pathlib, sys, time
            from keras_dist.horovod_build.build import WheelCache
            @contextlib.contextmanager
            def build():
                print("builds", flush=True)
                while not waits.exists():
                    time.sleep(0.01)
                yield pathlib.Path({str(write_wheel(tmp_path / "horovod-0.28.1.whl"))!r})
            waits = pathlib.Path({str(tmp_path / "waits")!r})
            cache = WheelCache(pathlib.Path({folders[0]!r}), {NAME!r}, pathlib.Path({folders[1]!r}))
            print(cache.find_or_build(build, force=False, waiting=lambda: print("waits", waits.touch() or ""))[1])
        """
        command = [sys.executable, "-c", textwrap.dedent(program)]
        builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = sorted(process.communicate(timeout=60)[0].split() for process in builders)
        assert outputs == [["builds", "True"], ["waits", "False"]]

    def test_a_directory_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        cache = WheelCache(tmp_path / "file", NAME, tmp_path / "state")
        with pytest.raises(ConfigurationError, match=r"Received: .*/file/.*: Not a directory\nRemedy: .*--wheel-dir"):
            cache.find_or_build(Builder(tmp_path), force=False, waiting=never)


class TestOtherUsers:
    @pytest.mark.parametrize("place", ["wheel", "directory", "above"])
    def test_a_wheel_that_all_can_change_is_refused(self, cached: WheelCache, builder: Builder, place: str) -> None:
        wheel, _ = cached.find_or_build(builder, force=False, waiting=never)
        path = {"wheel": wheel, "directory": cached.directory, "above": cached.directory.parent}[place]
        path.chmod(0o777)
        received = rf"Received: {re.escape(str(path))}: has the mode 0777: all users can write to it\n"
        with pytest.raises(ConfigurationError, match=received + "Remedy: chown and chmod .* with --wheel-dir"):
            cached.find_or_build(builder, force=True, waiting=never)
        assert builder.count == 1

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_folder_of_another_user_is_refused(self, cached: WheelCache, builder: Builder) -> None:
        cached.find_or_build(builder, force=False, waiting=never)
        os.chown(cached.directory, pwd.getpwnam("nobody").pw_uid, -1)
        with pytest.raises(ConfigurationError, match=rf"{NAME}: belongs to nobody, not to root"):
            cached.find()

    def test_another_wheel_than_the_one_that_was_built_is_replaced(self, cached: WheelCache, builder: Builder) -> None:
        wheel, _ = cached.find_or_build(builder, force=False, waiting=never)
        write_wheel(wheel, "foreign")
        assert cached.find() is None
        assert cached.find_or_build(builder, force=False, waiting=never) == (wheel, True)
        assert cached.find() == wheel


class TestRequirements:
    def test_everything_missing_is_named_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "installed_tensorflow", lambda: None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigurationError) as error:
            check_requirements(BuildOptions(mpi=True), {"PATH": str(tmp_path)})
        assert error.value.received == (
            "no C++ compiler (g++, c++ or clang++ on PATH, or $CXX); no make; "
            "no MPI compiler (mpicxx), for --mpi; no TensorFlow; no pip"
        )
        remedy = str(error.value.remedy)
        assert "sudo apt-get install -y g++ make libopenmpi-dev openmpi-bin\n" in remedy
        assert "pip install 'keras_dist[cpu]'" in remedy
        assert "python -m ensurepip --upgrade" in remedy


def test_folders_are_made_for_this_user_alone(builder: Builder, tmp_path: Path) -> None:
    cache = WheelCache(tmp_path / "new" / "cache", NAME, tmp_path / "state")
    cache.find_or_build(builder, force=False, waiting=never)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", cache.directory, tmp_path / "state")]
    assert modes == [0o700] * 3
