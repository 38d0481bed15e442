"""Each core of a host belongs to one rank, and limits of control groups count."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist.comm.devices import cpu_limit, part_of


@given(st.integers(1, 40), st.integers(1, 50))
def test_each_core_belongs_to_one_rank_if_there_are_enough(cores: int, ranks: int) -> None:
    parts = [part_of(range(cores), rank, ranks) for rank in range(ranks)]
    assert all(parts)
    if ranks <= cores:
        assert [core for part in parts for core in part] == [*range(cores)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert {len(part) for part in parts} == {1}
        assert {core for part in parts for core in part} == {*range(cores)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("own", "above", "limit"),
    [
        ("200000 100000", "max 100000", 2.0),
        ("max 100000", "150000 100000", 1.5),
        ("400000 100000", "300000 100000", 3.0),
        ("max 100000", "max 100000", None),
        (None, None, None),
    ],
)
def test_the_smallest_limit_of_a_group_and_those_above_counts(
    tmp_path: Path, own: str | None, above: str | None, limit: float | None
) -> None:
    for group, text in (("a/b", own), ("a", above)):
        if text:
            write(tmp_path / "groups" / group / "cpu.max", text)
    write(tmp_path / "of_process", "0::/a/b")
    assert cpu_limit(tmp_path / "groups", tmp_path / "of_process") == limit


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "of_process", "4:memory:/x\n3:cpu,cpuacct:/job\n0::/")
    write(tmp_path / "groups/cpu/job/cpu.cfs_quota_us", "-1")
    write(tmp_path / "groups/cpu/job/cpu.cfs_period_us", "100000")
    assert cpu_limit(tmp_path / "groups", tmp_path / "of_process") is None
    write(tmp_path / "groups/cpu/job/cpu.cfs_quota_us", "250000")
    assert cpu_limit(tmp_path / "groups", tmp_path / "of_process") == 2.5


def test_without_control_groups_nothing_is_limited(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path, tmp_path / "missing") is None
