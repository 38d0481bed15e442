"""Commits give back what was written, or say what is wrong with them. `keras-dist commits` lists them."""

import functools
import json
import os
import random
import re
import shutil
import stat
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keras_dist import cli
from keras_dist.errors import ConfigurationError, DistributionError
from keras_dist.state.commits import Commits, Position
from tests.limits import examples

pytestmark = pytest.mark.timeout(120)

ARRAYS = {"kernel": np.arange(6, dtype="float32").reshape(2, 3), "step": np.int64(5)}
OF_ML_DTYPES = sorted(
    name for name, value in vars(ml_dtypes).items() if isinstance(value, type) and issubclass(value, np.generic)
)


def place(step: int) -> Position:
    return Position(step, step // 10, step % 10)


def write(commits: Commits, *steps: int) -> None:
    for step in steps:
        commits.write(place(step), {"step": np.full(3, step)})


def names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != ".writer")


def step_of(commits: Commits) -> int:
    commit = commits.newest()
    assert commit.place == place(commit.place.step)
    assert commit.arrays["step"].tolist() == [commit.place.step] * 3
    return commit.place.step


@pytest.fixture
def commits(tmp_path: Path) -> Commits:
    return Commits(tmp_path / "commits")


def of_ml_dtypes() -> st.SearchStrategy[np.ndarray]:
    def make(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
        dtype = np.dtype(getattr(ml_dtypes, name))
        raw = np.random.default_rng(seed).bytes(dtype.itemsize * int(np.prod(shape)))
        return np.frombuffer(raw, dtype).reshape(shape)

    return st.builds(make, st.sampled_from(OF_ML_DTYPES), hnp.array_shapes(min_dims=0, min_side=0), st.integers(0, 99))


@settings(deadline=None, max_examples=examples(80))
@given(
    st.dictionaries(
        st.text(),
        hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=4)) | of_ml_dtypes(),
        max_size=4,
    )
)
@example({"file": np.ones(1), "args": np.ones(2), "x": np.ones(3), "x.npy": np.ones(4), "allow_pickle": np.ones(5)})
@example({"": np.zeros((0, 3)), "\0": np.float32(np.nan), "\ud800": np.zeros((), "U5"), "../x": np.zeros(2, "S0")})
@example({"pair": np.zeros(2, [("a", "<f4"), ("b", ">i2", (2,))])})
@example({"columns": np.asfortranarray(np.arange(6).reshape(2, 3)), "every other": np.arange(9, dtype=">i4")[::-2]})
def test_arrays_come_back_bit_for_bit(arrays: dict[str, np.ndarray]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Commits(folder).write(place(12), arrays)
        read = Commits(folder).newest().arrays
    assert [*read] == [*arrays]
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (np.asarray(array).dtype, np.asarray(array).shape)
        assert read[name].tobytes() == np.asarray(array).tobytes()


def test_all_of_a_commit(commits: Commits) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    path = commits.write(place(12), ARRAYS)
    assert path == commits.directory / "commit-000000000012"
    assert sorted(os.listdir(path)) == ["arrays.npz", "manifest.json"]
    commit = commits.newest()
    assert (commit.place, commit.path) == (Position(12, 1, 2), path)
    (entry,) = commits.list()
    assert (entry.name, entry.step, entry.place, entry.problem) == ("commit-000000000012", 12, Position(12, 1, 2), "")
    assert entry.size == sum(file.stat().st_size for file in path.iterdir())
    assert before <= entry.time <= datetime.now(UTC)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["keras_dist"]) == (1, "0.1.0")
    assert manifest["arrays"][0] == {"name": "kernel", "dtype": "float32", "shape": [2, 3]}


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([None]), "object"),
        (np.zeros(1, [("a", "O")]), "[('a', 'O')]"),
        (np.zeros(1, [("a", ml_dtypes.bfloat16)]), "[('a', bfloat16)]"),
        (np.array(["a"], np.dtypes.StringDType()), "StringDType()"),
    ],
)
def test_an_array_that_would_need_pickle(commits: Commits, array: np.ndarray, dtype: str) -> None:
    with pytest.raises(ConfigurationError, match="The array 'bad' can't be written without pickle") as caught:
        commits.write(place(1), {"good": np.ones(1), "bad": array})
    assert caught.value.received == f"dtype {dtype}"
    assert not commits.directory.exists()


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, None])
def test_at_least_one_is_kept(keep: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"At least one commit must be kept\.\nReceived: keep={keep}\n"):
        Commits("commits", keep)


def test_a_remote_folder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Received: directory='gs://bucket/run'\n"):
        Commits("gs://bucket/run")


def damage(path: Path, change: Any) -> None:
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))


def flipped(offset: int, mask: int) -> Any:
    def flip(data: bytearray) -> bytearray:
        data[offset] ^= mask
        return data

    return flip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Commits:
    commits = Commits(tmp_path_factory.mktemp("small"))
    commits.write(place(12), ARRAYS)
    return commits


def problem_of(commits: Commits) -> str:
    (entry,) = commits.list()
    with pytest.raises(DistributionError, match=r"^No commit in .* is good\.\n") as caught:
        commits.newest()
    assert caught.value.received == f"{entry.name}: {entry.problem}"
    return entry.problem


@pytest.mark.parametrize("name", ["arrays.npz", "manifest.json"])
def test_a_change_of_any_byte_and_any_lost_end_is_found(small: Commits, name: str) -> None:
    file = small.directory / "commit-000000000012" / name
    good, rng = file.read_bytes(), random.Random(name)
    for offset in range(len(good)):
        damage(file, flipped(offset, rng.randrange(1, 256)))
        assert f"the checksum of {name} does not fit" in problem_of(small), offset
        file.write_bytes(good[:offset])
        problem = problem_of(small)
        if name == "arrays.npz":
            assert problem == f"arrays.npz is {offset:,} bytes long, and {len(good):,} were written"
        else:
            assert problem == "the checksum of manifest.json does not fit, so it was cut off or changed"
        file.write_bytes(good)
    assert small.list()[0].problem == ""


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: (path / "arrays.npz").unlink(), "arrays.npz is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: os.truncate(path / "arrays.npz", 2048), "arrays.npz is 2,048 bytes long, and 512 were written"),
        (lambda path: path.rename(f"{path.parent}/commit-000000000013"), "it holds step 12, so its folder was renamed"),
        (lambda path: (shutil.rmtree(path), path.write_text("")), "it is not a folder"),
        (
            lambda path: ((path / "arrays.npz").unlink(), (path / "arrays.npz").mkdir()),
            "arrays.npz can't be read: Is a directory",
        ),
    ],
)
def test_the_problem_is_named(commits: Commits, spoil: Any, problem: str) -> None:
    path = commits.write(place(12), ARRAYS)
    size = (path / "arrays.npz").stat().st_size
    spoil(path)
    assert problem_of(commits) == problem.replace("512", f"{size:,}")


def test_another_version_of_the_format_is_refused(commits: Commits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras_dist.state.commits.FORMAT", 2)
    write(commits, 1)
    monkeypatch.undo()
    assert problem_of(commits) == "its format is version 2, and this keras_dist reads version 1"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (np.ones(1), r"arrays.npz can't be read: ValueError: kernel is float64 \(1,\), not float64 \[3\]"),
        (np.array([print], object), "Object arrays cannot be loaded when allow_pickle=False"),
    ],
)
def test_arrays_that_are_not_those_of_the_manifest(
    commits: Commits, monkeypatch: pytest.MonkeyPatch, written: np.ndarray, problem: str
) -> None:
    """With checksums that fit: a program other than this one has written it. A pickle is not read."""
    plain = np.savez
    monkeypatch.setattr(np, "savez", lambda file, *arrays: plain(file, written))
    commits.write(place(12), {"kernel": np.ones(3)})
    with pytest.raises(DistributionError, match=problem):
        commits.newest()


def test_the_newest_good_one_is_used_and_each_newer_one_gets_one_warning(commits: Commits, said: list[str]) -> None:
    write(commits, 1, 2, 3)
    first, second, third = (commits.directory / f"commit-{step:012d}" for step in (1, 2, 3))
    (second / "manifest.json").unlink()
    damage(third / "arrays.npz", flipped(100, 1))
    assert step_of(commits) == 1
    assert said == [
        f"{third} can't be used: the checksum of arrays.npz does not fit. {first.name} is, the one before it.",
        f"{second} can't be used: manifest.json is missing. {first.name} is, the one before it.",
    ]
    assert [entry.problem for entry in commits.list()] == [
        "",
        "manifest.json is missing",
        "the checksum of arrays.npz does not fit",
    ]
    assert [entry.place for entry in commits.list()] == [place(1), None, place(3)]


def test_a_training_never_begins_anew_silently(commits: Commits) -> None:
    write(commits, 1, 2)
    for path in commits.directory.glob("commit-*/manifest.json"):
        path.unlink()
    with pytest.raises(DistributionError) as caught:
        commits.newest()
    assert str(caught.value) == (
        f"No commit in {commits.directory} is good.\n"
        "Received: commit-000000000002: manifest.json is missing; commit-000000000001: manifest.json is missing\n"
        "Remedy: Bring the files back from a copy. To begin again, pass an empty folder."
    )


def test_no_commit_at_all(commits: Commits) -> None:
    assert commits.newest() is None
    assert commits.list() == []
    commits.directory.mkdir()
    for name in ("commit-12", "commit-000000000012.part", "notes.txt", ".commit-000000000012.ab.part"):
        (commits.directory / name).mkdir()
    assert commits.newest() is None
    assert commits.list() == []


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_so_many_are_kept(tmp_path: Path, keep: int) -> None:
    commits = Commits(tmp_path, keep)
    for step in range(1, 8):
        write(commits, step)
        assert names(tmp_path) == [f"commit-{kept:012d}" for kept in range(max(1, step - keep + 1), step + 1)]
        assert step_of(commits) == step


def test_a_commit_is_replaced_by_another_of_its_step(commits: Commits) -> None:
    write(commits, 1, 2)
    for number in range(2, 12):
        path = commits.write(place(2), {"step": np.full(3, 2), "number": np.int64(number)})
        assert names(commits.directory) == ["commit-000000000001", f"commit-000000000002.{number}"]
        assert path.name == f"commit-000000000002.{number}"
        assert commits.newest().arrays["number"] == number
    assert commits.list()[-1].step == 2


def test_a_damaged_one_is_replaced_when_the_training_comes_there(commits: Commits, said: list[str]) -> None:
    write(commits, 10, 20)
    (commits.directory / "commit-000000000020" / "manifest.json").unlink()
    again = Commits(commits.directory)
    assert step_of(again) == 10
    write(again, 15)
    assert names(again.directory) == ["commit-000000000010", "commit-000000000015", "commit-000000000020"]
    assert step_of(again) == 15
    write(again, 20)
    assert names(again.directory) == ["commit-000000000010", "commit-000000000015", "commit-000000000020.2"]
    assert step_of(again) == 20
    assert len(said) == 2


def test_a_step_before_a_good_commit_is_refused(commits: Commits) -> None:
    """A restart would resume from the run before."""
    write(commits, 10, 20)
    with pytest.raises(ConfigurationError) as caught:
        write(commits, 15)
    assert str(caught.value) == (
        "The folder has a commit of a later step, which a restart would take instead.\n"
        f"Received: step 15, and {commits.directory}/commit-000000000020\n"
        "Remedy: Resume from that commit, or pass an empty folder, or remove the later commits."
    )
    assert names(commits.directory) == ["commit-000000000010", "commit-000000000020"]


def test_what_is_of_others_stays(tmp_path: Path) -> None:
    commits = Commits(tmp_path, keep=1)
    for name in ("notes", ".notes.part", "commit-1", ".commit"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".keras_dist-begun-0a1b").mkdir()
    (tmp_path / ".keras_dist-begun-0a1c").write_text("half")
    write(commits, 1, 2)
    assert names(tmp_path) == [".commit", ".notes.part", "commit-000000000002", "commit-1", "notes"]


def test_all_is_on_the_disk_before_it_has_its_name_and_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(tmp_path, keep=1)
    write(commits, 1)
    events: list[str] = []
    fsync, moves = os.fsync, {"rename": os.rename, "replace": os.replace}

    def shown(name: str) -> str:
        return re.sub(r"begun-\w+", "begun", os.path.relpath(name, tmp_path))

    def record_fsync(descriptor: int) -> None:
        events.append(f"flush {shown(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def record_move(name: str, source: Path, target: Path) -> None:
        events.append(f"move {shown(os.fspath(source))} to {shown(os.fspath(target))}")
        moves[name](source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    for name in moves:
        monkeypatch.setattr(os, name, functools.partial(record_move, name))
    write(commits, 2)
    assert events == [
        "flush .keras_dist-begun/commit-000000000002/manifest.json",
        "flush .keras_dist-begun/commit-000000000002/arrays.npz",
        "flush .keras_dist-begun/commit-000000000002",
        "flush .keras_dist-begun",
        "move .keras_dist-begun/commit-000000000002 to commit-000000000002",
        "flush .",
        "move commit-000000000001 to .keras_dist-begun",
    ]


def test_others_may_read_what_the_process_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = Commits(tmp_path).write(place(1), ARRAYS)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_a_relative_folder_stays_the_same_when_the_script_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commits = Commits("commits")
    monkeypatch.chdir("/")
    write(commits, 1)
    assert step_of(Commits(tmp_path / "commits")) == 1


def test_objects_of_one_process_share_its_lock(commits: Commits) -> None:
    """As in a notebook, where `fit` is called twice."""
    link = commits.directory.with_name("link")
    link.symlink_to(commits.directory)
    write(commits, 1)
    write(Commits(link), 2)
    write(commits, 3)
    assert step_of(commits) == 3


def listed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    code = cli.main(["commits", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_the_table(commits: Commits, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    with monkeypatch.context() as patch:
        patch.setattr("keras_dist.state.commits.datetime", Clock)
        for step in (9, 1200, 12345):
            commits.write(Position(step, step // 1000, step % 1000), {"a": np.zeros(step * 100, "uint8")})
    damage(commits.directory / "commit-000000012345" / "arrays.npz", flipped(1000, 1))
    assert listed(capsys, commits.directory) == (0, [
        "  step  epoch  batch                 time      size",
        "     9      0      9  2026-01-02 03:04:05    1.6 kB  good",
        " 1,200      1    200  2026-01-02 03:04:05  120.7 kB  good",
        "12,345     12    345  2026-01-02 03:04:05    1.2 MB  the checksum of arrays.npz does not fit",
        f"A restart resumes after step 1,200, from {commits.directory}/commit-000000001200",
    ], "")  # fmt: skip
    (commits.directory / "commit-000000001200" / "manifest.json").unlink()
    _, lines, _ = listed(capsys, commits.directory)
    assert lines[2] == " 1,200      ?      ?                    ?  120.3 kB  manifest.json is missing"
    assert lines[-1] == f"A restart resumes after step 9, from {commits.newest().path}"


def test_it_fails_without_a_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remedy = "Remedy: Give the folder that the script passes as `directory`, relative to this one.\n"
    code, lines, err = listed(capsys, tmp_path)
    assert (code, lines) == (1, [])
    assert err == f"keras-dist commits: There is no commit in this folder.\nReceived: {tmp_path}\n{remedy}"
    for missing in (tmp_path / "nowhere", Path(__file__)):
        code, lines, err = listed(capsys, missing)
        assert (code, lines) == (1, [])
        assert err == f"keras-dist commits: The folder of the commits was not found.\nReceived: {missing}\n{remedy}"


def test_it_changes_nothing(commits: Commits, capsys: pytest.CaptureFixture[str]) -> None:
    write(commits, 1)
    commits.close()
    (commits.directory / ".writer").unlink()
    (commits.directory / ".commit-000000000002.ab.part").mkdir()
    assert listed(capsys, commits.directory)[0] == 0
    assert names(commits.directory) == [".commit-000000000002.ab.part", "commit-000000000001"]
    assert not (commits.directory / ".writer").exists()


def test_an_old_one_that_can_not_be_removed_does_not_stop_the_training(
    commits: Commits, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(commits, 1, 2, 3)

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("keras_dist.state.files.shutil.rmtree", rmtree)
    write(commits, 4)
    monkeypatch.undo()
    assert step_of(commits) == 4
    assert said == [
        f"{commits.directory}/commit-000000000001 is not needed any more, but can't be removed: "
        "[Errno 1] Operation not permitted"
    ]
    write(commits, 5)
    assert names(commits.directory) == [f"commit-{step:012d}" for step in (3, 4, 5)]
