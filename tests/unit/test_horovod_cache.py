"""The cache of wheels: their keys, damaged wheels, and two builds at the same time."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pwd
import re
import stat
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keras_dist.errors import ConfigurationError
from keras_dist.horovod_build.cache import BuildOptions, TensorFlow, WheelCache, WheelKey, default_wheel_dir, wheel_key

KEY = WheelKey(
    tensorflow="tensorflow-cpu 2.21.0",
    python="cpython-311-x86_64-linux-gnu",
    platform="linux-x86_64",
    libc="glibc 2.36",
    cpu="avx f16c fma",
    flags="gloo",
    variables="",
    patches="0123abcd",
)


def write_wheel(path: Path, content: str = "library", member: str = "horovod/tensorflow/mpi_lib.so") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content * 1000)
    return path


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
    raise AssertionError("no other process builds")


@contextlib.contextmanager
def never_builds() -> Iterator[Path]:
    raise AssertionError("nothing is built")
    yield


class TestCache:
    def test_a_missing_wheel_is_built_once(self, tmp_path: Path) -> None:
        cache, builder = WheelCache(tmp_path / "cache", KEY, tmp_path / "state"), Builder(tmp_path)
        wheel, built = cache.find_or_build(builder, force=False, waiting=never)
        assert built
        assert wheel == tmp_path / "cache" / KEY.name / "horovod-0.28.1-new.whl"
        assert cache.find_or_build(builder, force=False, waiting=never) == (wheel, False)
        assert cache.find_or_build(builder, force=True, waiting=never) == (wheel, True)
        assert builder.count == 2

    def test_a_damaged_wheel_is_replaced(self, tmp_path: Path) -> None:
        cache, builder = WheelCache(tmp_path / "cache", KEY, tmp_path / "state"), Builder(tmp_path)
        wheel = write_wheel(cache.directory / "horovod-0.28.1-old.whl")
        assert cache.find() == wheel
        wheel.write_bytes(wheel.read_bytes()[:-100])
        assert cache.find() is None
        new, _ = cache.find_or_build(builder, force=False, waiting=never)
        assert sorted(path.name for path in cache.directory.iterdir()) == ["horovod-0.28.1-new.whl", "lock"]
        assert cache.find() == new

    def test_a_changed_byte_and_a_wheel_without_the_library_are_found_out(self, tmp_path: Path) -> None:
        cache = WheelCache(tmp_path, KEY, tmp_path / "state")
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

        cache = WheelCache(tmp_path / "cache", KEY, tmp_path / "state")
        with pytest.raises(KeyboardInterrupt):
            cache.find_or_build(interrupted, force=False, waiting=never)
        assert [path.name for path in cache.directory.iterdir()] == ["lock"]
        assert cache.find_or_build(Builder(tmp_path), force=False, waiting=never)[1]

    def test_a_full_disk_leaves_no_part_of_a_wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Path, mode: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

        cache = WheelCache(tmp_path / "cache", KEY, tmp_path / "state")
        builder = Builder(tmp_path)
        monkeypatch.setattr("keras_dist.horovod_build.cache.os.chmod", full)  # the first call after the copy
        with pytest.raises(OSError, match="No space left on device"):
            cache.find_or_build(builder, force=False, waiting=never)
        monkeypatch.undo()
        assert [path.name for path in cache.directory.iterdir()] == ["lock"]

    def test_of_two_builders_at_once_one_builds_and_the_other_waits(self, tmp_path: Path) -> None:
        folders = [str(tmp_path / "cache"), str(tmp_path / "state")]
        program = f"""
            import contextlib, pathlib, sys, time
            from keras_dist.horovod_build.cache import WheelCache, WheelKey
            @contextlib.contextmanager
            def build():
                print("builds", flush=True)
                while not waits.exists():
                    time.sleep(0.01)
                yield pathlib.Path({str(write_wheel(tmp_path / "horovod-0.28.1.whl"))!r})
            waits = pathlib.Path({str(tmp_path / "waits")!r})
            cache = WheelCache(pathlib.Path({folders[0]!r}), {KEY!r}, pathlib.Path({folders[1]!r}))
            print(cache.find_or_build(build, force=False, waiting=lambda: print("waits", waits.touch() or ""))[1])
        """
        command = [sys.executable, "-c", textwrap.dedent(program)]
        builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = sorted(process.communicate(timeout=60)[0].split() for process in builders)
        assert outputs == [["builds", "True"], ["waits", "False"]]

    def test_a_directory_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        cache = WheelCache(tmp_path / "file", KEY, tmp_path / "state")
        with pytest.raises(ConfigurationError, match=r"Received: .*/file/.*: Not a directory\nRemedy: .*--wheel-dir"):
            cache.find_or_build(Builder(tmp_path), force=False, waiting=never)


class TestOtherUsers:
    """What another user could have written is not installed."""

    def test_folders_are_made_for_this_user_alone(self, tmp_path: Path) -> None:
        cache = WheelCache(tmp_path / "new" / "cache", KEY, tmp_path / "state")
        cache.find_or_build(Builder(tmp_path), force=False, waiting=never)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", cache.directory, tmp_path / "state")]
        assert modes == [0o700] * 3

    @pytest.mark.parametrize("place", ["wheel", "directory", "above"])
    def test_a_wheel_that_all_can_change_is_refused(self, tmp_path: Path, place: str) -> None:
        cache = WheelCache(tmp_path / "cache", KEY, tmp_path / "state")
        wheel, _ = cache.find_or_build(Builder(tmp_path), force=False, waiting=never)
        path = {"wheel": wheel, "directory": cache.directory, "above": tmp_path / "cache"}[place]
        path.chmod(0o777)
        received = rf"Received: {re.escape(str(path))}: has the mode 0777: all users can write to it\n"
        with pytest.raises(ConfigurationError, match=received + "Remedy: chown and chmod .* with --wheel-dir"):
            cache.find()
        with pytest.raises(ConfigurationError, match=received):
            cache.find_or_build(never_builds, force=True, waiting=never)

    def test_a_sticky_folder_above_is_no_fault_but_as_the_last_one_it_is(self, tmp_path: Path) -> None:
        cache = WheelCache(tmp_path / "tmp", KEY, tmp_path / "state")
        wheel, _ = cache.find_or_build(Builder(tmp_path), force=False, waiting=never)
        (tmp_path / "tmp").chmod(0o1777)
        assert cache.find() == wheel
        cache.directory.chmod(0o1777)
        with pytest.raises(ConfigurationError, match="has the mode 1777"):
            cache.find()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_folder_of_another_user_is_refused(self, tmp_path: Path) -> None:
        cache = WheelCache(tmp_path / "cache", KEY, tmp_path / "state")
        cache.find_or_build(Builder(tmp_path), force=False, waiting=never)
        os.chown(cache.directory, pwd.getpwnam("nobody").pw_uid, -1)
        with pytest.raises(ConfigurationError, match=rf"{KEY.name}: belongs to nobody, not to root"):
            cache.find()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_group_may_write_if_it_is_this_users_alone(self, tmp_path: Path) -> None:
        cache = WheelCache(tmp_path / "cache", KEY, tmp_path / "state")
        wheel, _ = cache.find_or_build(Builder(tmp_path), force=False, waiting=never)
        cache.directory.chmod(0o775)
        assert cache.find() == wheel  # root's own group
        os.chown(cache.directory, -1, pwd.getpwnam("nobody").pw_gid)
        with pytest.raises(ConfigurationError, match="has the mode 0775: its group can write to it"):
            cache.find()

    def test_another_wheel_than_the_one_that_was_built_is_replaced(self, tmp_path: Path) -> None:
        cache, builder = WheelCache(tmp_path / "cache", KEY, tmp_path / "state"), Builder(tmp_path)
        wheel, _ = cache.find_or_build(builder, force=False, waiting=never)
        write_wheel(wheel, "foreign")
        assert cache.find() is None
        assert cache.find_or_build(builder, force=False, waiting=never) == (wheel, True)
        assert cache.find() == wheel
