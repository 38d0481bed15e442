"""What a build of Horovod needs from the machine, and the errors if it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_dist.errors import ConfigurationError
from keras_dist.horovod_build import HorovodBuildError, build, cache
from keras_dist.horovod_build.cache import (
    CMAKE,
    COMPILER,
    MAKE,
    BuildOptions,
    TensorFlow,
    check_requirements,
    install_line,
)


class TestRequirements:
    def test_everything_missing_is_named_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "installed_tensorflow", lambda: None)
        monkeypatch.setattr(cache, "_has_pip", lambda: False)
        monkeypatch.setattr(cache, "_package_manager", lambda environ: "apt")
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
        monkeypatch.setattr(cache, "installed_tensorflow", lambda: tensorflow)
        for name in ("c++", "make"):
            (tmp_path / name).touch(mode=0o755)
        assert check_requirements(BuildOptions(), {"PATH": str(tmp_path)}) == tensorflow

    def test_a_compiler_in_cxx_counts_alone(self, tmp_path: Path) -> None:
        (tmp_path / "g++").touch(mode=0o755)
        environ = {"PATH": str(tmp_path), "CXX": "no-such-compiler -O2"}
        assert cache.missing_tools(BuildOptions(), environ) == [COMPILER, MAKE]

    def test_install_line_of_conda_and_of_an_unknown_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        line = install_line([COMPILER, MAKE], {"CONDA_PREFIX": "/opt/conda"})
        assert line == "conda install -c conda-forge cxx-compiler make"
        monkeypatch.setattr(cache, "_package_manager", lambda environ: None)
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
        assert build.has_cmake({"PATH": str(tmp_path)}) is enough

    def test_cmake_that_is_missing_comes_from_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        targets = {}

        def run_pip(arguments: list[str], environ: object, purpose: str) -> None:
            assert "--require-hashes" in arguments
            targets[arguments[arguments.index("--requirement") + 1]] = arguments[arguments.index("--target") + 1]

        monkeypatch.setattr(build, "run_pip", run_pip)
        environ = build.fetch_tools(tmp_path, {"PATH": "/none", "PYTHONPATH": "/own"})
        # pip adds no program to a `bin` that an earlier call made, so the two must not share a directory.
        assert targets == {
            str(build.BUILD_TOOLS): f"{tmp_path}/packages",
            str(build.CMAKE_WHEELS): f"{tmp_path}/cmake",
        }
        assert environ["PATH"] == f"{tmp_path}/cmake/bin:/none"
        assert environ["PYTHONPATH"] == f"{tmp_path}/cmake:{tmp_path}/packages:/own"

    def test_cmake_that_pip_cannot_fetch_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def run_pip(arguments: list[str], environ: object, purpose: str) -> None:
            if str(build.CMAKE_WHEELS) in arguments:
                raise HorovodBuildError("pip could not fetch CMake.", "no network")

        monkeypatch.setattr(build, "run_pip", run_pip)
        with pytest.raises(ConfigurationError, match=r"CMake 3.13 or later is not on PATH.*\n.*no network\n.*cmake"):
            build.fetch_tools(tmp_path, {"PATH": "/none", "CONDA_PREFIX": "/opt/conda"})

    def test_a_pip_that_fails_is_quoted(self) -> None:
        with pytest.raises(HorovodBuildError, match=r"pip could not fetch Horovod.\n.*exit code \d") as error:
            build.run_pip(["download", "--no-index", "no.such-package"], {}, "fetch Horovod")
        assert "No matching distribution found" in str(error.value)
