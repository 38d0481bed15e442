"""Runs an example and writes what the terminal shows as docs/images/terminal.svg: `python docs/make_terminal.py`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONWARNINGS": "ignore"}  # TensorFlow and Keras have much to tell
COMMAND = ["run", "-np", "2", "examples/digits_distributed.py", "--epochs", "5"]
WIDTH = 100


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    settings = " ".join(f"{name}={value}" for name, value in QUIET.items())
    for line in (f"export {settings}", "keras-dist " + " ".join(COMMAND)):
        console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
    command = [sys.executable, "-m", "keras_dist", *COMMAND]
    environ = {**os.environ, **QUIET}
    output = subprocess.check_output(command, cwd=ROOT, env=environ, stderr=subprocess.STDOUT, text=True)
    console.print(Text(output.rstrip()))
    svg = console.export_svg(title="keras_dist")
    # Pages that show pictures let them load nothing: whatever monospaced font is there has to do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace, Menlo")
    PICTURE.write_text(svg)


if __name__ == "__main__":
    main()
