"""What `keras-dist install-horovod` does around the compiler: no test here compiles or fetches anything."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_dist.errors import ConfigurationError
from keras_dist.horovod_build import build, cli, install, requirements, source
from keras_dist.horovod_build.cache import WheelCache, WheelKey, wheel_key
from keras_dist.horovod_build.corrections import (
    CORRECTIONS,
    apply_corrections,
    corrections_version,
)
from keras_dist.horovod_build.errors import HorovodBuildError
from keras_dist.horovod_build.options import BuildOptions, default_wheel_dir
from keras_dist.horovod_build.progress import PLAIN_INTERVAL_S, Progress
from keras_dist.horovod_build.requirements import (
    CMAKE,
    COMPILER,
    MAKE,
    TensorFlow,
    check_requirements,
    install_line,
)

XLA = "horovod/tensorflow/xla_mpi_ops.cc"
GLOO = "horovod/common/gloo/gloo_controller.cc"

# The lines around our corrections, as in Horovod 0.28.1.
SOURCE = {
    XLA: '#include <unordered_map>\n\n\n#if TENSORFLOW_VERSION >= 2006000000\n\n#include "tensorflow/x.h"\n',
    GLOO: "  }\n\n  global_ranks_.reserve(size_);\n  {\n    opts.setOutput(global_ranks_.data(), size_);\n",
}

KEY = WheelKey(
    tensorflow="tensorflow-cpu 2.21.0",
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    libc="glibc 2.36",
    cpu="avx f16c fma",
    flags="gloo",
    variables="",
    corrections="0123abcd",
)


def write_source(root: Path, files: dict[str, str] = SOURCE) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def write_wheel(path: Path, content: str = "library", member: str = "horovod/tensorflow/mpi_lib.so") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content * 1000)
    return path


class TestCorrections:
    def test_both_lines_are_replaced_and_nothing_else(self, tmp_path: Path) -> None:
        apply_corrections(write_source(tmp_path))
        assert (tmp_path / XLA).read_text() == SOURCE[XLA].replace("2006000000", "2006000000 && HAVE_GPU")
        assert (tmp_path / GLOO).read_text() == SOURCE[GLOO].replace("reserve", "resize")

    @pytest.mark.parametrize(
        ("text", "found"), [(SOURCE[GLOO].replace("reserve", "resize"), "0 times"), (SOURCE[GLOO] * 2, "2 times")]
    )
    def test_a_source_that_does_not_fit_is_refused_and_left_alone(
        self, tmp_path: Path, text: str, found: str
    ) -> None:
        write_source(tmp_path, {**SOURCE, GLOO: text})
        with pytest.raises(HorovodBuildError, match=f"{re.escape(GLOO)} must hold.*exactly once.*\n.*{found}"):
            apply_corrections(tmp_path)
        assert (tmp_path / XLA).read_text() == SOURCE[XLA]

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(HorovodBuildError, match="no such file"):
            apply_corrections(write_source(tmp_path, {XLA: SOURCE[XLA]}))

    def test_version_changes_with_what_is_corrected_not_with_the_reasons(self) -> None:
        first, second = CORRECTIONS
        assert corrections_version((first, dataclasses.replace(second, after="x"))) != corrections_version()
        assert corrections_version((first, dataclasses.replace(second, why="x"))) == corrections_version()


class TestRequirements:
    def test_everything_missing_is_named_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(requirements, "installed_tensorflow", lambda: None)
        monkeypatch.setattr(requirements, "_has_pip", lambda: False)
        monkeypatch.setattr(requirements, "_package_manager", lambda environ: "apt")
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

    def test_what_is_there_is_not_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensorflow = TensorFlow("tensorflow-cpu", "2.21.0")
        monkeypatch.setattr(requirements, "installed_tensorflow", lambda: tensorflow)
        for name in ("c++", "make"):
            (tmp_path / name).touch(mode=0o755)
        assert check_requirements(BuildOptions(), {"PATH": str(tmp_path)}) == tensorflow

    def test_a_compiler_in_cxx_counts_alone(self, tmp_path: Path) -> None:
        (tmp_path / "g++").touch(mode=0o755)
        environ = {"PATH": str(tmp_path), "CXX": "no-such-compiler -O2"}
        assert requirements.missing_tools(BuildOptions(), environ) == [COMPILER, MAKE]

    def test_install_line_of_conda_and_of_an_unknown_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        line = install_line([COMPILER, MAKE], {"CONDA_PREFIX": "/opt/conda"})
        assert line == "conda install -c conda-forge cxx-compiler make"
        monkeypatch.setattr(requirements, "_package_manager", lambda environ: None)
        assert install_line([CMAKE], {}).splitlines()[:2] == [
            "Debian, Ubuntu: sudo apt-get install -y cmake",
            "  Fedora, RHEL: sudo dnf install -y cmake",
        ]

    @pytest.mark.parametrize(
        ("program", "enough"),
        [
            ("echo cmake version 3.25.1", True),
            ("echo cmake version 4.0.2-rc1", True),
            ("echo cmake version 3.5.0", False),
            ("echo cmake: command not found >&2; exit 127", False),
        ],
    )
    def test_cmake_must_be_recent_and_work(self, tmp_path: Path, program: str, enough: bool) -> None:
        (tmp_path / "cmake").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "cmake").chmod(0o755)
        assert source.has_cmake({"PATH": str(tmp_path)}) is enough

    def test_cmake_that_is_missing_comes_from_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        targets = {}

        def run_pip(arguments: list[str], environ: object, purpose: str) -> None:
            targets[arguments[-1]] = arguments[arguments.index("--target") + 1]

        monkeypatch.setattr(source, "run_pip", run_pip)
        environ = source.fetch_tools(tmp_path, {"PATH": "/none", "PYTHONPATH": "/own"})
        # pip adds no program to a `bin` that an earlier call made, so the two must not share a directory.
        assert targets == {source.BUILD_TOOLS[-1]: f"{tmp_path}/packages", "cmake": f"{tmp_path}/cmake"}
        assert environ["PATH"] == f"{tmp_path}/cmake/bin:/none"
        assert environ["PYTHONPATH"] == f"{tmp_path}/cmake:{tmp_path}/packages:/own"

    def test_cmake_that_pip_cannot_fetch_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def run_pip(arguments: list[str], environ: object, purpose: str) -> None:
            if "cmake" in arguments:
                raise HorovodBuildError("pip could not fetch CMake.", "no network")

        monkeypatch.setattr(source, "run_pip", run_pip)
        with pytest.raises(
            ConfigurationError, match=r"CMake 3.13 or later is not on PATH.*\n.*no network\n.*cmake"
        ):
            source.fetch_tools(tmp_path, {"PATH": "/none", "CONDA_PREFIX": "/opt/conda"})

    def test_a_pip_that_fails_is_quoted(self) -> None:
        with pytest.raises(HorovodBuildError, match=r"pip could not fetch Horovod.\n.*exit code \d") as error:
            source.run_pip(["download", "--no-index", "no.such-package"], {}, "fetch Horovod")
        assert "No matching distribution found" in str(error.value)


class TestKey:
    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(WheelKey)])
    def test_every_component_changes_the_name(self, field: str) -> None:
        assert dataclasses.replace(KEY, **{field: "other"}).name != KEY.name

    def test_name_is_readable_and_one_path_component(self) -> None:
        assert re.fullmatch(r"tensorflow-cpu-2\.21\.0_cpython-311-x86_64-linux-gnu_gloo_[0-9a-f]{12}", KEY.name)

    def test_options_and_compiler_settings_are_part_of_it_other_variables_are_not(self) -> None:
        tensorflow = TensorFlow("tensorflow-cpu", "2.21.0")
        plain = wheel_key(tensorflow, BuildOptions(), {})
        others = [
            wheel_key(tensorflow, BuildOptions(mpi=True), {}),
            wheel_key(tensorflow, BuildOptions(gpu=True), {}),
            wheel_key(tensorflow, BuildOptions(), {"CXX": "clang++"}),
            wheel_key(tensorflow, BuildOptions(), {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx"}),
            wheel_key(TensorFlow("tensorflow", "2.21.0"), BuildOptions(), {}),
            wheel_key(TensorFlow("tensorflow-cpu", "2.20.0"), BuildOptions(), {}),
        ]
        assert len({plain.name, *(key.name for key in others)}) == 7
        assert wheel_key(tensorflow, BuildOptions(jobs=7), {"HOROVOD_RANK": "1"}) == plain

    def test_wheels_are_in_the_users_cache(self) -> None:
        assert default_wheel_dir({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/keras_dist/horovod")
        assert default_wheel_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/keras_dist/horovod"


class Builder:
    """Gives a wheel, and counts."""

    def __init__(self, directory: Path) -> None:
        self.count = 0
        self._wheel = write_wheel(directory / "horovod-0.28.1-new.whl", "new")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Path]:
        self.count += 1
        yield self._wheel


def never() -> None:
    raise AssertionError("nobody else builds")


class TestCache:
    def test_a_missing_wheel_is_built_once(self, tmp_path: Path) -> None:
        cache, builder = WheelCache(tmp_path / "cache", KEY), Builder(tmp_path)
        wheel, built = cache.find_or_build(builder, force=False, waiting=never)
        assert built
        assert wheel == tmp_path / "cache" / KEY.name / "horovod-0.28.1-new.whl"
        assert cache.find_or_build(builder, force=False, waiting=never) == (wheel, False)
        assert cache.find_or_build(builder, force=True, waiting=never) == (wheel, True)
        assert builder.count == 2

    def test_a_damaged_wheel_is_replaced(self, tmp_path: Path) -> None:
        cache, builder = WheelCache(tmp_path / "cache", KEY), Builder(tmp_path)
        wheel = write_wheel(cache.directory / "horovod-0.28.1-old.whl")
        assert cache.find() == wheel
        wheel.write_bytes(wheel.read_bytes()[:-100])
        assert cache.find() is None
        new, _ = cache.find_or_build(builder, force=False, waiting=never)
        assert sorted(path.name for path in cache.directory.iterdir()) == ["horovod-0.28.1-new.whl", "lock"]
        assert cache.find() == new

    def test_a_changed_byte_and_a_wheel_without_the_library_are_found_out(self, tmp_path: Path) -> None:
        cache = WheelCache(tmp_path, KEY)
        wheel = write_wheel(cache.directory / "horovod-0.28.1.whl")
        content = bytearray(wheel.read_bytes())
        content[200] ^= 0xFF
        wheel.write_bytes(content)
        assert cache.find() is None
        write_wheel(wheel, member="horovod/__init__.py")
        assert cache.find() is None

    def test_an_interrupted_build_leaves_no_wheel_and_no_lock(self, tmp_path: Path) -> None:
        @contextlib.contextmanager
        def interrupted() -> Iterator[Path]:
            raise KeyboardInterrupt
            yield

        cache = WheelCache(tmp_path / "cache", KEY)
        with pytest.raises(KeyboardInterrupt):
            cache.find_or_build(interrupted, force=False, waiting=never)
        assert [path.name for path in cache.directory.iterdir()] == ["lock"]
        assert cache.find_or_build(Builder(tmp_path), force=False, waiting=never)[1]

    def test_of_two_builders_at_once_one_builds_and_the_other_waits(self, tmp_path: Path) -> None:
        program = f"""
            import contextlib, pathlib, sys, time
            from keras_dist.horovod_build.cache import WheelCache, WheelKey
            @contextlib.contextmanager
            def build():
                print("builds", flush=True)
                time.sleep(1.0)
                yield pathlib.Path({str(write_wheel(tmp_path / "horovod-0.28.1.whl"))!r})
            cache = WheelCache(pathlib.Path({str(tmp_path / "cache")!r}), {KEY!r})
            print(cache.find_or_build(build, force=False, waiting=lambda: print("waits", flush=True))[1])
        """
        command = [sys.executable, "-c", textwrap.dedent(program)]
        builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = sorted(process.communicate(timeout=60)[0].split() for process in builders)
        assert outputs == [["builds", "True"], ["waits", "False"]]

    def test_a_directory_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        cache = WheelCache(tmp_path / "file", KEY)
        with pytest.raises(
            ConfigurationError, match=r"Received: .*/file/.*: Not a directory\nRemedy: .*--wheel-dir"
        ):
            cache.find_or_build(Builder(tmp_path), force=False, waiting=never)


class TestProgress:
    def test_plain_lines_now_and_then(self) -> None:
        stream, now = io.StringIO(), 0.0
        with Progress("Building", stream, clock=lambda: now) as progress:
            for output in ("running bdist_wheel\n", "[ 57%] Building CXX a.o\n[ 5", "6%] Building CXX b.o\n", ""):
                now += PLAIN_INTERVAL_S / 2
                progress.update(output)
        # The second line would go back to 56 %: another library's count.
        assert stream.getvalue() == "Building:  57 %, 20 s\nBuilding:  57 %, 40 s\n"

    def test_one_line_that_is_rewritten_on_a_terminal(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        stream = Terminal()
        with Progress("Building", stream, clock=lambda: 0.0) as progress:
            progress.update("")
            progress.update("[  3%] Building CXX a.o\n")
        clear = "\r\x1b[K"
        assert stream.getvalue() == f"{clear}Building: configuring, 0 s{clear}Building:   3 %, 0 s{clear}"


class TestBuild:
    @pytest.fixture
    def setup_py(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """A setup.py that stands for Horovod's, and a directory for temporary files that is looked at later."""
        (tmp_path / "tmp").mkdir()
        (tmp_path / "source").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setattr(build, "fetch_tools", lambda directory, environ: environ)
        monkeypatch.setattr(build, "fetch_source", lambda directory, environ: tmp_path / "source")
        monkeypatch.setattr(build, "POLL_INTERVAL_S", 0.05)
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
        setup_py.write_text(
            "print('[  1%] Building\\na.cc:3:9: fatal error: x.h: No such file'); raise SystemExit(3)"
        )
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
        setup_py.write_text(
            "print('g++: fatal error: Killed signal terminated program cc1plus'); raise SystemExit(1)"
        )
        with (
            pytest.raises(HorovodBuildError, match="Remedy: .*--jobs 1"),
            build.built_wheel(BuildOptions(), os.environ, tmp_path / "log", io.StringIO()),
        ):
            pass

    def test_an_interrupt_ends_the_compilers_and_leaves_nothing(self, tmp_path: Path, setup_py: Path) -> None:
        class Interrupting(io.StringIO):
            """The stream where Ctrl-C comes, once a compiler runs."""

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
        assert {
            name: plain.get(name) for name in (*user, "HOROVOD_WITHOUT_MPI", "CMAKE_POLICY_VERSION_MINIMUM")
        } == {
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
    def test_the_very_wheel_is_not_installed_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[list[str]] = []
        monkeypatch.setattr(install, "run_pip", lambda arguments, environ, purpose: calls.append(arguments))
        wheel = tmp_path / "horovod-0.28.1.whl"
        wheel.write_bytes(b"")
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        monkeypatch.setattr(install, "installed_sha256", lambda: empty)
        assert not install.install_wheel(wheel, {})
        assert calls == []
        monkeypatch.setattr(install, "installed_sha256", lambda: None)
        assert install.install_wheel(wheel, {})
        assert calls[-1] == ["install", "--force-reinstall", "--no-deps", str(wheel)]


class TestCommand:
    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "keras_dist.horovod_build.cli", *arguments]
        return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)

    def test_a_missing_compiler_ends_it_at_once_without_traceback(self, tmp_path: Path) -> None:
        start = time.monotonic()
        done = self.run("--gpu", "--wheel-dir", str(tmp_path), CXX="no-such-compiler")
        assert done.returncode == 2
        assert "Received: no C++ compiler" in done.stderr
        assert "--gpu is untested" in done.stderr
        assert "Traceback" not in done.stderr
        assert os.listdir(tmp_path) == []
        assert time.monotonic() - start < 10

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
        monkeypatch.setattr(cli, "_options", lambda args: os.kill(os.getpid(), 15))
        assert cli.main(None) == 130  # type: ignore[arg-type]
        assert "Interrupted: no half-built wheel is left." in capsys.readouterr().err


def ended(pid: int, time_limit_s: float = 5.0) -> bool:
    """Returns whether a process ends within the time limit. One that nobody has waited for yet has ended."""
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
