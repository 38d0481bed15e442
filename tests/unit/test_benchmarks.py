"""The benchmark: its statistics, its table, and that the docs show what the scripts measure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "step_overhead.py"
sys.path.insert(0, str(SCRIPT.parent))  # the script's modules are beside it

import backends  # noqa: E402
import parameter_server  # noqa: E402
import report  # noqa: E402
import scaling  # noqa: E402
import step_overhead  # noqa: E402
from report import Comparison  # noqa: E402


def comparison(*ratios: float, goal: float | None = None, name: str = "case") -> Comparison:
    return Comparison("group", name, [*ratios], [1.0] * len(ratios), goal)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        _, low, high = report.interval(random.normal(1.0, 0.1, size=15))
        hits += low <= 1.0 <= high
    assert 180 <= hits <= 199  # 95 % of 200 are 190


def test_the_interval_is_around_the_median_and_narrows_with_the_rounds() -> None:
    random = np.random.default_rng(5)
    few, many = random.normal(1.0, 0.1, size=10), random.normal(1.0, 0.1, size=1000)
    assert report.interval(few)[0] == np.median(few)
    widths = [high - low for _, low, high in map(report.interval, (few, many))]
    assert widths[1] < widths[0] / 4
    assert report.interval([1.5]) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [((1.0, 1.01, 1.02), "met"), ((0.9, 1.04, 1.2), "met, within the noise"), ((1.06, 1.07, 1.2), "**missed**")],
)
def test_a_goal_is_met_by_the_interval_by_the_median_or_not(ratios: tuple[float, ...], said: str) -> None:
    assert report.verdict(comparison(*ratios, goal=1.05)) == f"≤ 1.05: {said}"


def test_a_case_without_a_goal_has_no_verdict() -> None:
    assert report.verdict(comparison(2.0)) == ""


def test_a_round_counts_by_its_slowest_rank() -> None:
    times = [{"ours": [1.0, 4.0], "plain": [2.0, 2.0]}, {"ours": [3.0, 1.0], "plain": [1.0, 5.0]}]
    assert step_overhead.pair(times, "plain") == ([3.0, 4.0], [2.0, 5.0])


def test_the_table_has_a_row_for_each_comparison_under_its_group() -> None:
    comparisons = [comparison(1.0, 1.0, goal=1.05, name="small"), comparison(2.0, 2.0, name="large")]
    assert report.table(comparisons).splitlines()[2:] == [
        "| **group** | | | | |",
        "| small | 1.000 | 1.000 to 1.000 | 2 | ≤ 1.05: met |",
        "| large | 2.000 | 2.000 to 2.000 | 2 |  |",
    ]


def test_the_table_goes_between_the_markers() -> None:
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.replaced(page, "new") == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="no lines"):
        report.replaced("before\n", "new")


def test_the_page_shows_all_comparisons_of_the_script_or_says_why_not() -> None:
    shown_text = step_overhead.PAGE.read_text().split(report.BEGIN)[1].split(report.END)[0]
    shown = re.findall(r"^\| ([^*|]+?) \| [\d.]+ \|", shown_text, re.MULTILINE)
    if "Not measured yet" in shown_text:
        assert shown == []
        return
    cases = [*step_overhead.SERIAL, *step_overhead.HOROVOD]
    assert shown == [*map(step_overhead.title, cases), *(f"{size} MB" for size in step_overhead.ALL_REDUCE)]


def test_the_page_shows_all_backends_of_the_script_or_says_why_not() -> None:
    shown_text = step_overhead.PAGE.read_text().split(backends.BEGIN)[1].split(backends.END)[0]
    shown = re.findall(r"^\| ([^*|]+?) \| [\d.]+ \|", shown_text, re.MULTILINE)
    rivals = () if "Not measured yet" in shown_text else backends.RIVALS
    assert shown == [backends.title(case) for _ in rivals for case in backends.CASES]


def test_the_page_shows_all_sizes_of_the_script_or_says_why_not() -> None:
    shown_text = step_overhead.PAGE.read_text().split(scaling.BEGIN)[1].split(scaling.END)[0]
    shown = re.findall(r"^\| ([^*|]+?) \| [\d.]+ \|", shown_text, re.MULTILINE)
    rivals = () if "Not measured yet" in shown_text else scaling.RIVALS
    assert shown == [scaling.title(case) for _ in rivals for case in scaling.CASES]


def test_two_processes_are_compared_with_one_core_first() -> None:
    comparisons = [Comparison(f"2 processes over {rival}", "", [1.0], [1.0]) for rival in scaling.RIVALS]
    assert scaling.in_order(comparisons[::-1]) == comparisons


def test_the_comparisons_of_a_backend_follow_one_another() -> None:
    first, second = (Comparison(backends.group(backends.RIVALS[0]), name, [1.0], [1.0]) for name in "ab")
    assert backends.in_order([first, second]) == [first, second]


def test_the_page_shows_all_cases_of_parameter_servers_or_says_why_not() -> None:
    begin, end = parameter_server.BEGIN, parameter_server.END
    shown_text = parameter_server.PAGE.read_text().split(begin)[1].split(end)[0]
    shown = re.findall(r"^\| ([^*|]+?) \| [\d.]+ \|", shown_text, re.MULTILINE)
    if "Not measured yet" in shown_text:
        assert shown == []
        return
    cases = len(parameter_server.cases(parameter_server.WORKERS)) * len(parameter_server.MODELS)
    assert len(shown) == cases + len(parameter_server.SOURCES)


def test_steps_per_second_are_the_inverse_of_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [parameter_server.PLAIN, *parameter_server.cases([1, 2])]
    times = {case: [4.0 / max(case.workers, 0.5)] for case in cases}
    monkeypatch.setattr(parameter_server, "timed", lambda *_: times)
    comparisons = list(parameter_server.compared("model", [1, 2], 1, 1))
    ratios = {(each.group, each.name): each.ratios[0] for each in comparisons}
    assert len(comparisons) == 2 * 2 * 2
    assert ratios["model: over plain Keras in one process", "sync, 1 worker, fed by the coordinator"] == 2.0
    assert ratios["model, async: over 1 worker that is fed", "2 workers, read by the workers"] == 2.0


def test_the_memory_table_has_a_row_for_each_source() -> None:
    assert parameter_server.memory_table({"files": [600, 601, 602]}).splitlines()[2:] == ["| files | 600 | 601 | 602 |"]


def test_the_page_is_written_from_whole_runs_only() -> None:
    for options in (["--quick"], ["--rounds", "3"], ["--only", "serial"]):
        done = run("--docs", *options)
        assert done.returncode == 2
        assert "--docs needs the whole run" in done.stderr


def test_the_help_names_the_options() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--rounds", "--quick", "--only", "--docs"))


def test_the_benchmark_of_parameter_servers_names_its_options_and_refuses_a_part_for_the_docs() -> None:
    script = SCRIPT.with_name("parameter_server.py")
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--rounds", "--quick", "--only", "--workers", "--docs"))
    command = [sys.executable, str(script), "--docs", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--docs needs the whole run" in done.stderr


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=60)
