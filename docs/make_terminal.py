"""Runs the script of the README and writes what the terminal shows as docs/images/terminal.svg: `make terminal`."""

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
# TensorFlow writes a lot, and some of it whatever it is told.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore"}
TENSORFLOW = re.compile(r"^(WARNING: All log messages before absl|[IWE]\d{4} ).*\n", re.MULTILINE)
WIDTH = 100


def scripts(page: str) -> tuple[str, str]:
    """Returns the script in the first diff of a page, without its added lines and with them."""
    lines = page.split("```diff\n")[1].split("```")[0].splitlines()
    # An editor takes the blank from an empty line of a diff.
    plain = [line[1:] for line in lines if line[:1] in ("", " ")]
    distributed = [line[1:] for line in lines if line[:1] in ("", " ", "+")]
    return "\n".join([*plain, ""]), "\n".join([*distributed, ""])


def commands(page: str) -> list[str]:
    """Returns the commands that the page runs this script with."""
    return re.findall(r"`((?:python|keras-dist run) [^`]*train\.py)`", page)[:2]


def main() -> None:
    page = (ROOT / "README.md").read_text()
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    prompt(console, "# TensorFlow's own messages are left out")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(scripts(page)[1])
        for command in commands(page):
            prompt(console, command)
            output = subprocess.check_output(
                shlex.split(command),
                cwd=folder,
                env={**os.environ, **QUIET, "PATH": path},
                stderr=subprocess.STDOUT,
                text=True,
            )
            console.print(Text(TENSORFLOW.sub("", output).rstrip()))
    svg = console.export_svg(title="keras_dist")
    # Pages that show pictures let them load nothing: whatever monospaced font is there has to do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace, Menlo")
    PICTURE.write_text(svg)


def prompt(console: Console, line: str) -> None:
    console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))


if __name__ == "__main__":
    main()
