"""The benchmark: its statistics, its table, and that the docs show what the scripts measure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "bench.py"
sys.path.insert(0, str(SCRIPT.parent))  # the script's modules are beside it

import bench  # noqa: E402
import contestants  # noqa: E402
import models  # noqa: E402
import parameter_server  # noqa: E402
import report  # noqa: E402
import runner  # noqa: E402
from contestants import Case, Sum, check_alike  # noqa: E402
from processes import Processes  # noqa: E402
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


def test_a_goal_to_be_reached_is_met_by_the_low_end() -> None:
    said = [
        report.verdict(Comparison("group", "case", [*ratios], [1.0] * 3, 0.6, at_least=True))
        for ratios in ((0.6, 0.7, 0.8), (0.5, 0.61, 0.8), (0.3, 0.5, 0.7))
    ]
    assert said == ["≥ 0.6: met", "≥ 0.6: met, within the noise", "≥ 0.6: **missed**"]


class Pool:
    """Two ranks, one of which is slower."""

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls, self.name, self.pids = calls, name, list[int]()

    def run(self, function: object, *args: object, timeout: float) -> list[tuple[float, float]]:
        self.calls.append(f"{self.name} {getattr(function, '__name__', '')}")
        return [(1.0, 0.5), (4.0, 0.5)]

    def close(self) -> None:
        self.calls.append(f"{self.name} close")


def test_contestants_take_turns_and_a_round_counts_by_its_slowest_rank() -> None:
    calls: list[str] = []
    times: runner.Times = {}
    rivals = {name: runner.Contestant(name, "file") for name in "ab"}
    with runner.Pools({name: lambda name=name: Pool(calls, name) for name in "ab"}, {"a": [0], "b": [0]}) as pools:
        runner.take_turns(pools, rivals, Case(models.TINY, 1, 1), 3, times, seed=0)
    assert times == {"a": [4.0] * 3, "b": [4.0] * 3}
    assert calls[:4] == ["a getpid", "a build", "b getpid", "b build"]
    assert [sorted(calls[at : at + 2]) for at in (4, 6, 8)] == [["a time_round", "b time_round"]] * 3
    assert calls[10:] == ["a close", "b close"]


def test_contestants_that_train_otherwise_are_refused() -> None:
    check_alike({"ours": 2.0, "rival": 2.0005})
    with pytest.raises(RuntimeError, match="don't train alike"):
        check_alike({"ours": 2.0, "rival": 2.01})


def test_the_table_has_a_row_for_each_comparison_under_its_group() -> None:
    comparisons = [comparison(1.0, 1.0, goal=1.05, name="small"), comparison(2.0, 2.0, name="large")]
    assert report.table(comparisons).splitlines()[2:] == [
        "| **group** | | | | |",
        "| small | 1.000 | 1.000 to 1.000 | 2 | ≤ 1.05: met |",
        "| large | 2.000 | 2.000 to 2.000 | 2 |  |",
    ]


def test_the_table_goes_between_the_markers() -> None:
    begin, end = report.markers("name")
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert report.replaced(page, "new", begin, end) == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="no lines"):
        report.replaced("before\n", "new", begin, end)


def all_times() -> dict[str, dict[Case | Sum, runner.Times]]:
    """Returns times of every contestant of every case: two seconds for each."""
    return {
        name: {job: {rival: [2.0] for rival in part.rivals(job)} for job in part.jobs}
        for name, part in bench.PARTS.items()
    }


@pytest.mark.parametrize(
    ("name", "section"),
    [(name, section) for name, part in bench.PARTS.items() for section in part.sections],
    ids=lambda each: getattr(each, "name", each),
)
def test_the_page_shows_all_comparisons_of_a_section_or_says_why_not(
    name: str, section: bench.Section, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "HAS_TORCH", True)
    begin, end = report.markers(section.name)
    shown_text = bench.PAGE.read_text().split(begin)[1].split(end)[0]
    expected = [each.name for each in bench.compared(section, all_times()[name])]
    assert expected
    if "Not measured yet" not in shown_text:
        assert re.findall(r"^\| ([^*|]+?) \| [\d.]+ \|", shown_text, re.MULTILINE) == expected


def test_every_goal_is_that_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "HAS_TORCH", True)
    for name, part in bench.PARTS.items():
        for section in part.sections:
            judged = [each for each in bench.compared(section, all_times()[name]) if each.goal is not None]
            assert len(judged) == sum(len(row.goals) for row in section.rows)


def test_without_torch_its_contestants_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "HAS_TORCH", False)
    names = {rival for part in bench.PARTS.values() for job in part.jobs for rival in part.rivals(job)}
    assert names == {*bench.CONTESTANTS} - {*bench.WITH_TORCH}


def test_efficiency_is_the_time_of_one_by_that_of_two() -> None:
    (weak,) = (section for section in bench.PARTS["training"].sections if section.name == "weak scaling")
    times = {Case(models.TINY, 20, 8): {bench.SERIAL: [3.0], bench.HOROVOD: [4.0]}}
    (found,) = bench.compared(weak, times)
    assert (found.ratios, found.goal, found.at_least) == ([0.75], 0.60, True)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_models_have_the_weights_that_the_page_says(name: str) -> None:
    assert models.keras_model(name).count_params() == models.WEIGHTS[name]


@pytest.mark.parametrize("name", models.MODELS)
def test_the_models_of_torch_have_the_same_weights(name: str) -> None:
    pytest.importorskip("torch")
    assert sum(weights.numel() for weights in models.torch_model(name).parameters()) == models.WEIGHTS[name]


def test_processes_answer_and_tell_what_failed() -> None:
    with Processes([{**os.environ}] * 2) as processes:
        assert processes.run(divmod, 7, 3, timeout=60) == [(2, 1)] * 2
        with pytest.raises(RuntimeError, match="(?s)Process 0 raised.*ZeroDivisionError"):
            processes.run(divmod, 7, 0, timeout=60)
        pids = processes.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_loopback_sends_and_receives_all(tmp_path: Path) -> None:
    with Processes(bench.rendezvous(str(tmp_path), "loopback", 2), "contestants.loopback") as processes:
        processes.run(contestants.build, "loopback", Sum(3, 1), timeout=60)
        answers = processes.run(contestants.time_round, "loopback", Sum(3, 1), timeout=60)
    assert len(answers) == 2
    assert all(seconds > 0 for seconds, _ in answers)


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
    for options in (["--quick"], ["--rounds", "3"], ["--models", "CNN"]):
        done = run("--docs", *options)
        assert done.returncode == 2
        assert "--docs needs whole parts" in done.stderr


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
