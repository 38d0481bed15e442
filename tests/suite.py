"""Runs a tier of the tests, and what has failed once more: `python -m tests.suite test|ci|full [pytest arguments]`."""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.limits import TIER
from tests.results import Line, check_same, environment, environment_of, parse_shard, read

ROOT = Path(__file__).resolve().parents[1]
TIERS = {"test": "not ci and not full", "ci": "not full", "full": "ci or full or not full"}
BUDGET_SECONDS = 600.0  # of `make test`, on two cores
# More failures than this are no noise.
MOST_UNSTABLE = 20
_NONE_COLLECTED = 5


def is_timed(file: Path) -> bool:
    return "pytest.mark.timed" in file.read_text()


TIMED_FILES = [*filter(is_timed, sorted((ROOT / "tests/multiprocess").glob("test_*.py")))]  # they need no TensorFlow


@dataclasses.dataclass
class Suite:
    """A run of a tier, phase by phase."""

    folder: Path
    arguments: list[str]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    unstable: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, expression: str, jobs: str) -> int:
        """Runs all phases and returns the exit code."""
        beside = self._phase("side by side", "-n", jobs, "-m", f"({expression}) and not timed", "--cache-clear")
        codes = [beside]
        if beside in (0, 1, _NONE_COLLECTED) and not (beside == 1 and self._stops_early()) and self._has_timed():
            timed, files = f"({expression}) and timed", " ".join(map(str, TIMED_FILES))
            pairs = "0" if jobs == "0" else "2"  # they wait more than they compute
            codes.append(self._phase("two at a time", "-n", pairs, "-m", timed, "-o", f"testpaths={files}"))
        if not set(codes) <= {0, 1, _NONE_COLLECTED}:
            return max(codes)
        if all(code == _NONE_COLLECTED for code in codes):
            return 0 if read(self.folder) else _NONE_COLLECTED
        return self._again(expression) if 1 in codes else 0

    def _has_timed(self) -> bool:
        """False if files or folders are named that have no timed test: to collect them again would take seconds."""
        named = [path for argument in self.arguments if (path := Path(argument.partition("::")[0])).exists()]
        files = [file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        return not named or any(map(is_timed, files))

    def _again(self, expression: str) -> int:
        failed = {line["test"]: line["message"] for line in read(self.folder) if line["outcome"] == "failed"}
        if len(failed) > MOST_UNSTABLE:
            return 1
        code = self._phase("once more", "-n", "0", "-m", expression, "--last-failed", "--last-failed-no-failures=none")
        still = {line["test"] for line in read(self.folder) if line["outcome"] == "failed"}
        self.unstable = {test: message for test, message in failed.items() if test not in still}
        return 1 if still or code not in (0, _NONE_COLLECTED) or self._stops_early() else 0

    def _phase(self, name: str, *options: str) -> int:
        print(f"== {name}", flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        ours = [f"--results={self.folder}", "--durations=10"]
        command = [sys.executable, "-m", "pytest", *ours, *options, *self.arguments]
        code = subprocess.run(command, cwd=ROOT).returncode
        self.seconds[name] = time.monotonic() - started
        return code

    def _stops_early(self) -> bool:
        return bool({"-x", "--exitfirst"} & set(self.arguments))


def report(lines: Sequence[Line], phases: dict[str, float], budget: float | None, unstable: dict[str, str]) -> str:
    """Returns how long a run took, what is unstable in it, and how its tests ended."""
    text = []
    for name, seconds in {**phases, "all": sum(phases.values())}.items():
        text.append(f"{name:26}{seconds:9.0f} s" + (f"{seconds / budget:9.0%} of {budget:.0f} s" if budget else ""))
    for test, message in unstable.items():
        text += ["", f"unstable: {test} failed, then passed alone. Mend it. It had failed with:"]
        text += [f"    {line}" for line in message.splitlines()]
    outcomes = [line["outcome"] for line in lines]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in ("passed", "skipped", "failed"))
    return "\n".join([*text, "", f"{counts}, {len(unstable)} unstable"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--jobs", default="3", help="processes that run tests side by side (default: 3)")
    parser.add_argument("--shard", type=parse_shard, help="2/8: the second of eight parts")
    parser.add_argument("--results", type=Path, help="a folder; of one that exists already, the run resumes")
    options, arguments = parser.parse_known_args()
    folder = options.results or ROOT / "runs" / options.tier
    if options.results is None:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        check_same(folder, environment_of(folder) or environment(), environment())
    except ValueError as error:
        parser.error(str(error))
    if options.shard:
        arguments += ["--shard={}/{}".format(*options.shard)]
    os.environ[TIER] = options.tier
    suite = Suite(folder, arguments)
    code = suite.run(TIERS[options.tier], options.jobs)
    budget = BUDGET_SECONDS if options.tier == "test" else None
    print(report(read(folder), suite.seconds, budget, suite.unstable), flush=True)
    return code


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
