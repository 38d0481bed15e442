"""`make demo`: trains the digits example on 2 processes, and shows the result and the lines that it took.

    python examples/demo.py [arguments of digits_distributed.py]
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
PLAIN, DISTRIBUTED = EXAMPLES / "digits.py", EXAMPLES / "digits_distributed.py"
OUTPUT = Path("runs/digits")
PROCESSES = 2
LEAST_ACCURACY = 0.97


def main(arguments: list[str]) -> int:
    """Trains and reports. Returns the exit code: 1 if the model did not learn enough."""
    command = ["run", "-np", str(PROCESSES), _relative(DISTRIBUTED), "--output", str(OUTPUT), *arguments]
    print("$ keras-dist " + " ".join(command), flush=True)
    code, output = run_and_show([sys.executable, "-m", "keras_dist", *command])
    if code != 0:
        print(f"The training failed with exit code {code}.", file=sys.stderr)
        return code
    accuracy = test_accuracy(output)
    if accuracy is None or accuracy < LEAST_ACCURACY:
        print(f"The test accuracy should be {LEAST_ACCURACY} or more. Received: {accuracy}", file=sys.stderr)
        return 1
    print(report(accuracy))
    return 0


def run_and_show(command: list[str]) -> tuple[int, str]:
    """Runs a program, shows its output as it comes, and returns the exit code and the output."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        chunks = []
        # Not line by line: a progress bar ends no line.
        while chunk := process.stdout.read1():  # type: ignore[attr-defined]
            chunks.append(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    return process.returncode, b"".join(chunks).decode(errors="replace")


def test_accuracy(output: str) -> float | None:
    """Returns the accuracy that the example printed last."""
    found = re.findall(r"^test accuracy: *([0-9.]+)", output, re.MULTILINE)
    return float(found[-1]) if found else None


def report(accuracy: float) -> str:
    """Returns the text to print at the end."""
    return f"""
{_relative(DISTRIBUTED)} trained on {PROCESSES} processes over Horovod.

test accuracy:  {accuracy:.4f}
checkpoint:     {OUTPUT / "model.keras"}  (a plain Keras file: keras.saving.load_model reads it)
TensorBoard:    {_relative(Path(sys.executable).parent)}/tensorboard --logdir {OUTPUT / "tensorboard"}

The lines that {_relative(PLAIN)} does not have:

{added_lines()}
"""


def added_lines() -> str:
    """Returns the lines in which the distributed example differs from the plain one."""
    before, after = (path.read_text().splitlines() for path in (PLAIN, DISTRIBUTED))
    differences = difflib.unified_diff(before, after, n=0, lineterm="")
    return "\n".join(line for line in differences if line[0] in "+-" and line[:3] not in ("+++", "---"))


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
