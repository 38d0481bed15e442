"""Whether `keras-dist run` starts its ranks again: sequences of ends and commits."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.job import Outcome, Restarts
from keras_dist.launcher.output import Console

CRASH = Outcome(3, "rank 1 exited with code 3.", is_final=False)
COMMIT = Outcome(75, "stopped.", is_final=False)
# Each end of all ranks with the newest commit at that time, and whether they start again after it.
SEQUENCES: dict[str, tuple[int, list[tuple[Outcome, int | None, bool]]]] = {
    "success": (3, [(Outcome(0), 100, False)]),
    "a stop": (3, [(Outcome(143), 100, False)]),
    "no restarts": (0, [(CRASH, None, False)]),
    "all used": (2, [(CRASH, 1, True), (CRASH, 2, True), (CRASH, 3, False)]),
    "never a commit": (9, [(CRASH, None, True), (CRASH, None, False)]),
    "the first commit": (9, [(CRASH, None, True), (CRASH, 100, True), (CRASH, 100, False)]),
    "a smaller step, of another fit": (9, [(CRASH, 1000, True), (CRASH, 10, True), (CRASH, 20, True)]),
    "stops do not count": (1, [(COMMIT, 1, True), (COMMIT, 2, True), (CRASH, 3, True), (CRASH, 4, False)]),
    "stops after the last restart": (1, [(CRASH, 1, True), (COMMIT, 2, False)]),
    "stops for ever": (9, [(COMMIT, 1, True), (COMMIT, 1, False)]),
    "a stop right after a crash": (9, [(CRASH, 1, True), (COMMIT, 1, True), (CRASH, 1, False)]),
    "a commit between two crashes, at a stop": (9, [(CRASH, 1, True), (COMMIT, 2, True), (CRASH, 2, True)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_ranks_start_again_as_long_as_they_come_further(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, sequence = SEQUENCES[name]
    with Restarts(limit, Console()) as restarts:
        for variable, value in restarts.variables.items():
            monkeypatch.setenv(variable, value)
        for outcome, step, expected in sequence:
            if step is not None:
                environment.note_commit(step)
            assert restarts.starts_again(outcome) is expected
    assert restarts.folder is None or not restarts.folder.exists()


def test_without_a_temporary_folder_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.TemporaryDirectory", fail)
    Restarts(0, Console())
    with pytest.raises(ConfigurationError, match="Set TMPDIR"):
        Restarts(1, Console())


def test_a_commit_is_noted_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.COMMITTED, raising=False)
    environment.note_commit(1)  # no launcher that asks for it
    monkeypatch.setenv(environment.COMMITTED, str(tmp_path / "step"))
    for step in (100, 20):
        environment.note_commit(step)
        assert (tmp_path / "step").read_text() == str(step)
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    monkeypatch.setenv(environment.COMMITTED, str(tmp_path / "nowhere" / "step"))
    environment.note_commit(3)  # the training continues
