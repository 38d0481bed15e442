"""The benchmark: its statistics, its table, and that the docs show what the scripts measure."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "bench.py"
sys.path.insert(0, str(SCRIPT.parent))  # the script's modules are beside it

import bench  # noqa: E402
import cost_model  # noqa: E402
import models  # noqa: E402
import report  # noqa: E402
import runner  # noqa: E402
from contestants import Case, Sum, check_alike  # noqa: E402
from report import Comparison  # noqa: E402


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        _, low, high = report.interval(random.normal(1.0, 0.1, size=15))
        hits += low <= 1.0 <= high
    assert 180 <= hits <= 199  # 95 % of 200 are 190


@pytest.mark.parametrize(
    ("goal", "at_least", "ratios", "said"),
    [
        (1.05, False, [1.0, 1.01, 1.02], "≤ 1.05: met"),
        (1.05, False, [0.9, 1.04, 1.2], "≤ 1.05: met, within the noise"),
        (1.05, False, [1.06, 1.07, 1.2], "≤ 1.05: **missed**"),
        (0.6, True, [0.6, 0.7, 0.8], "≥ 0.6: met"),
        (0.6, True, [0.5, 0.61, 0.8], "≥ 0.6: met, within the noise"),
        (0.6, True, [0.3, 0.5, 0.7], "≥ 0.6: **missed**"),
    ],
)
def test_a_goal_is_met_by_the_interval_by_the_median_or_not(
    goal: float, at_least: bool, ratios: list[float], said: str
) -> None:
    assert report.verdict(Comparison("group", "case", ratios, [1.0] * 3, goal, at_least=at_least)) == said


def test_contestants_that_train_otherwise_are_refused() -> None:
    check_alike({"ours": 2.0, "rival": 2.0005})
    with pytest.raises(RuntimeError, match="don't train alike"):
        check_alike({"ours": 2.0, "rival": 2.01})


def times_of(part: bench.Part) -> dict[Case | Sum, runner.Times]:
    """Every contestant takes 2 s."""
    return {job: dict.fromkeys(part.rivals(part.sections, job), [2.0]) for job in part.jobs}


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
    expected = [each.name for each in bench.compared(bench.PARTS[name], section, times_of(bench.PARTS[name]))]
    assert expected
    if "Not measured yet" not in shown_text:
        assert re.findall(r"^\| ([^*|]+?) \| [\d.]+ \|", shown_text, re.MULTILINE) == expected


@pytest.mark.parametrize("name", models.MODELS)
def test_the_models_have_the_weights_that_the_page_says(name: str) -> None:
    assert models.keras_model(name).count_params() == models.WEIGHTS[name]


def test_the_measured_efficiencies_of_the_paper_lie_between_no_and_full_overlap() -> None:
    for model, measured in cost_model.PAPER.values():
        low, high = cost_model.prediction(model, cost_model.PAPER_HOSTS, cost_model.PAPER_RANKS)
        assert low <= measured <= high


def test_the_page_shows_what_the_model_says() -> None:
    begin, end = report.markers("cost model")
    shown = cost_model.PAGE.read_text().split(begin)[1].split(end)[0]
    assert cost_model.paper_table() in shown
    assert cost_model.networks_table() in shown
