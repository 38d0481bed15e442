"""What the benchmarks make of their times: ratios with intervals, a table in Markdown, a plot."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TIMES = "times.json"
RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rounds of one comparison, as a ratio of times.

    Args:
        group: What is compared with what.
        name: In which case.
        ours: Seconds of each round that are divided.
        theirs: Seconds that they are divided by, of the same rounds.
        goal: The ratio to be reached, if there is one.
        at_least: Whether more is better: a ratio of speeds, for which the rival's seconds are those divided.
    """

    group: str
    name: str
    ours: list[float]
    theirs: list[float]
    goal: float | None = None
    at_least: bool = False

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median with a bootstrap interval of 95 %: the percentiles of medians of resampled rounds.

    Args:
        ratios: One for each round.

    Returns:
        The median, the lower and the upper end.
    """
    values = np.asarray(ratios)
    picked = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picked], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def verdict(comparison: Comparison) -> str:
    """Says whether the goal is met: by the whole interval, by the median, or not."""
    if comparison.goal is None:
        return ""
    median, low, high = interval(comparison.ratios)
    sign, worst = ("≥", low) if comparison.at_least else ("≤", high)

    def reaches(value: float) -> bool:
        return value >= comparison.goal if comparison.at_least else value <= comparison.goal

    met = "met" if reaches(worst) else "met, within the noise" if reaches(median) else "**missed**"
    return f"{sign} {comparison.goal}: {met}"


def table(comparisons: Sequence[Comparison], ratio: str = "Time over the rival's") -> str:
    """Returns the table in Markdown.

    Args:
        comparisons: Its rows. Those of a group follow one another.
        ratio: What the ratio is.
    """
    lines = [f"| | {ratio} | 95 % interval | Rounds | Goal |", "|---|:---:|:---:|:---:|---|"]
    group = None
    for comparison in comparisons:
        if comparison.group != group:
            group = comparison.group
            lines.append(f"| **{group}** | | | | |")
        median, low, high = interval(comparison.ratios)
        lines.append(
            f"| {comparison.name} | {median:.3f} | {low:.3f} to {high:.3f} | {len(comparison.ratios)} "
            f"| {verdict(comparison)} |"
        )
    return "\n".join(lines)


def load(folder: Path) -> tuple[list[Comparison], str]:
    """Returns the comparisons that `runner.save` has written, and where they were measured."""
    times = json.loads((folder / TIMES).read_text())
    return [Comparison(**each) for each in times["comparisons"]], times["where"]


def markers(name: str) -> tuple[str, str]:
    """Returns the lines of a page between which a benchmark writes."""
    return f"<!-- {name} benchmark: begin -->", f"<!-- {name} benchmark: end -->"


def replaced(page: str, text: str, begin: str, end: str) -> str:
    """Returns a page with another table between its markers.

    Raises:
        ValueError: If it has no markers.
    """
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"The page has no lines {begin!r} and {end!r}")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page, count=1)


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Writes a picture: for each comparison the ratio of each round, the median and its interval.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    groups = list(dict.fromkeys(comparison.group for comparison in comparisons))
    figure, axes = pyplot.subplots(
        len(groups),
        layout="constrained",
        figsize=(9, 0.9 * len(groups) + 0.32 * len(comparisons)),
        height_ratios=[1 + sum(each.group == group for each in comparisons) for group in groups],
        squeeze=False,
    )
    for axis, group in zip(axes[:, 0], groups, strict=True):
        _draw(axis, group, [each for each in comparisons if each.group == group])
    axes[-1, 0].set_xlabel("each round, median, 95 % interval")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    with Image.open(path) as image:  # few colours take a third of the bytes
        image.quantize(32).save(path, optimize=True)


def _draw(axis: object, group: str, comparisons: Sequence[Comparison]) -> None:
    heights = range(len(comparisons))
    axis.axvline(1, color="0.6", linewidth=1)
    for height, comparison in zip(heights, comparisons, strict=True):
        median, low, high = interval(comparison.ratios)
        axis.plot(comparison.ratios, [height] * len(comparison.ratios), ".", color="0.75", markersize=4)
        axis.plot([low, high], [height, height], "-", color="tab:blue", linewidth=3)
        axis.plot(median, height, "o", color="tab:blue")
        if comparison.goal is not None:
            axis.plot([comparison.goal] * 2, [height - 0.35, height + 0.35], color="tab:red", linewidth=1.5)
    axis.set_yticks(heights, [comparison.name for comparison in comparisons])
    axis.set_ylim(len(comparisons) - 0.4, -0.6)
    better = "more" if comparisons[0].at_least else "less"
    goals = ", red: goal" if any(comparison.goal for comparison in comparisons) else ""
    # From the left edge of the names: a long title does not fit above the axis alone.
    axis.set_title(f"{group} ({better} is better{goals})", loc="left", fontsize=10, x=-0.3)
    axis.spines[["top", "right"]].set_visible(False)
