"""What a fresh clone meets first: the check of the system, and `make`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"


def check_system(path: Path) -> subprocess.CompletedProcess[str]:
    command = [BASH, str(ROOT / ".ci" / "check-system")]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!{BASH}\n{text}\n")
    path.chmod(0o755)


def test_all_that_is_missing_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    done = check_system(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "  Python 3.11 or later, with venv (set PYTHON to name one)\n  a C++ compiler\n  make\n" in done.stderr
    assert "sudo apt-get install -y python3 python3-venv g++ make\n" in done.stderr
    assert "sudo dnf install -y python3 gcc-c++ make\n" in done.stderr


def test_only_what_is_missing_is_named_and_a_python_that_does_not_start_is_passed_over(tmp_path: Path) -> None:
    write_program(tmp_path / "python3.11", "echo not found >&2; exit 127")
    write_program(tmp_path / "python3.12", f'exec {sys.executable} "$@"')
    write_program(tmp_path / "make", "")
    done = check_system(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Missing from this system:\n  a C++ compiler\nInstall it")
    assert "sudo apt-get install -y g++\n" in done.stderr
    write_program(tmp_path / "c++", "")
    assert check_system(tmp_path).stdout == f"{sys.executable}\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on PATH")
def test_make_alone_teaches_its_targets() -> None:
    help_text = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  ([a-z-]+) +[A-Z]", help_text, re.MULTILINE)
    targets = re.findall(r"^\.PHONY: (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == targets
    assert {"help", "setup", "demo", "test", "lint", "clean"} <= set(listed)
