"""The script on the README: it runs as it is shown, plain and distributed, with the same numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_terminal  # noqa: E402

PAGE = (ROOT / "README.md").read_text()
# Whoever imports keras_dist in the plain script gets an error.
PLAIN = "import sys; sys.modules['keras_dist'] = None; exec(open('train.py').read())"

pytestmark = pytest.mark.timeout(240)


def test_the_diff_is_an_import_and_two_lines() -> None:
    plain, distributed = (script.splitlines() for script in make_terminal.scripts(PAGE))
    added = [line.split("#")[0].rstrip() for line in distributed if line not in plain]
    assert added == ["import keras_dist as kd", "kd.init()", "model = kd.distribute(model)"]
    assert [line for line in distributed if line in plain] == plain
    assert not re.search("^-", PAGE.split("```diff\n")[1].split("```")[0], re.MULTILINE)


@pytest.mark.ci
def test_both_scripts_run_and_give_the_same_numbers(tmp_path: Path) -> None:
    plain, distributed = make_terminal.scripts(PAGE)
    one, two = make_terminal.commands(PAGE)
    assert (one, two) == ("python train.py", "keras-dist run -np 2 train.py")
    expected = run([sys.executable, "-c", PLAIN], tmp_path / "plain", plain)
    assert len(expected) == 4 * 4  # epochs, numbers of each
    for name, command in (("one", ["train.py"]), ("two", ["-m", "keras_dist", *two.split()[1:]])):
        numbers = run([sys.executable, *command], tmp_path / name, distributed)
        assert numbers == pytest.approx(expected, abs=2e-4)  # 4 digits are shown


def run(command: list[str], folder: Path, script: str) -> list[float]:
    """Runs a script in a folder of its own. Returns the numbers that it has printed."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "digits.keras").is_file()
    return [float(number) for number in re.findall(r"(?:accuracy|loss): ([\d.e+-]+)", done.stdout)]
