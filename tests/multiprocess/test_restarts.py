"""`keras-dist run --max-restarts`, and ranks that commit when they are asked to stop. Without TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

from tests.limits import limit
from tests.multiprocess.launches import CONTRACT_SECONDS, Job, Start, last_line, until

pytestmark = pytest.mark.timeout(120)

# `number` is that of the start, from 0. The marks of one start don't count in the next.
NUMBERED = """
from keras_dist.environment import note_commit
number = len([*here.glob(f"start.*.rank{rank}")])
mark(f"start.{number}.rank{rank}")
for other in range(int(os.environ.get("HOROVOD_SIZE", 0))):  # a rank that fails at once ends the others
    wait_for(f"start.{number}.rank{other}")

def mark_now(name):
    mark(f"{name}.{number}")

def wait_now(name):
    wait_for(f"{name}.{number}")

def commit(step):
    if rank == 0:
        note_commit(step)
        mark_now("commit")
    wait_now("commit")

def commit_at_sigterm(seconds=0.0, code=75):
    def handle(*_):
        time.sleep(seconds)  # as the writing of large files does
        if rank == 0:
            note_commit(1300 + number)
        sys.exit(code)

    signal.signal(signal.SIGTERM, handle)
    mark_now(f"ready-{rank}")
"""
FIRST_CAUSE = "keras-dist: rank 1 exited with code 3. All ranks have ended."
COMMITTED = "Training was committed: the same command resumes."


@pytest.fixture
def start(start: Start) -> Start:
    """Starts a script that knows how often it was started."""

    def numbered(source: str, *options: str, arguments: tuple[str, ...] = ()) -> Job:
        return start(NUMBERED + textwrap.dedent(source), *options, arguments=arguments)

    return numbered


def messages(err: str) -> list[str]:
    """Returns the lines of the launcher."""
    return [line for line in err.splitlines() if line.startswith("keras-dist: ")]


def wait_until_ready(job: Job, size: int = 2) -> None:
    job.wait_for(*(f"ready-{rank}.0" for rank in range(size)))


# After a crash.


def test_after_a_crash_all_ranks_start_again(start: Start) -> None:
    job = start(
        """
        if number == 0:
            commit(1200)
            sys.exit(3) if rank == 1 else signal.pause()
        print("goes on")
        """,
        *("-np", "2", "--max-restarts", "3"),
    )
    code, out, err = job.finish()
    assert (code, out) == (0, "goes on\n")
    again = "keras-dist: starts all ranks again (restart 1 of 3), from the commit of step 1200."
    assert messages(err) == [FIRST_CAUSE, again]


def test_by_default_nothing_starts_again(start: Start) -> None:
    code, _, err = start("commit(1200)\nsys.exit(3) if rank == 1 else signal.pause()", "-np", "2").finish()
    assert (code, messages(err)) == (3, [FIRST_CAUSE])


def test_a_crash_before_any_commit_is_tried_again_once(start: Start) -> None:
    job = start("sys.exit(3 + number) if rank == 1 else signal.pause()", "-np", "2", "--max-restarts", "5")
    code, _, err = job.finish()
    assert code == 4
    assert messages(err) == [
        FIRST_CAUSE,
        "keras-dist: starts all ranks again (restart 1 of 5), from where they began: there is no commit since.",
        "keras-dist: rank 1 exited with code 4. All ranks have ended.",
        "keras-dist: does not start again: there is no new commit since the last start. "
        "The first cause: rank 1 exited with code 3.",
    ]


def test_a_loop_of_crashes_ends_with_its_first_cause(start: Start) -> None:
    job = start(
        """
        commit((100, 200, 200)[number])
        sys.exit(3 + number) if rank == 1 else signal.pause()
        """,
        *("-np", "2", "--max-restarts", "5", "--log-dir", "logs"),
    )
    code, _, err = job.finish()
    assert code == 5
    assert last_line(err) == (
        "keras-dist: does not start again: there is no new commit since the last start. "
        "The first cause: rank 1 exited with code 4. Its whole output: logs/rank-1.restart-1.log"
    )


def test_crashes_with_new_commits_in_between_may_be_many(start: Start) -> None:
    job = start(
        """
        commit(100 + number)
        if number < 4:
            sys.exit(3) if rank == 1 else signal.pause()
        """,
        *("-np", "2", "--max-restarts", "4"),
    )
    code, _, err = job.finish()
    assert code == 0
    again = [f"(restart {n} of 4), from the commit of step {99 + n}." for n in range(1, 5)]
    assert [line.partition("again ")[2] for line in messages(err)[1::2]] == again


def test_the_last_restart_is_the_last(start: Start) -> None:
    job = start(
        "commit(100 + number)\nsys.exit(3 + number) if rank == 1 else signal.pause()", "-np", "2", "--max-restarts", "2"
    )
    code, _, err = job.finish()
    assert code == 5
    assert len(messages(err)) == 6
    assert last_line(err) == (
        "keras-dist: does not start again: restart 2 of 2 was the last. The cause: rank 1 exited with code 5."
    )


def test_a_rank_that_is_killed_is_a_crash(start: Start) -> None:
    job = start(
        """
        if number == 0:
            commit(7)
            (here / "pid").write_text(str(os.getpid())) if rank == 1 else None
            mark(f"running-{rank}")
            signal.pause()
        """,
        *("-np", "2", "--max-restarts", "1"),
    )
    job.wait_for("running-0", "running-1")
    os.kill(int((job.folder / "pid").read_text()), signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 0
    assert messages(err)[0].startswith("keras-dist: rank 1 was killed by SIGKILL")
    assert last_line(err) == "keras-dist: starts all ranks again (restart 1 of 1), from the commit of step 7."


def test_the_logs_of_all_starts_are_kept(start: Start, tmp_path: Path) -> None:
    job = start(
        """
        print(f"start {number} of rank {rank}")
        commit(number)
        sys.exit(3) if rank == 1 and number < 2 else None
        """,
        *("-np", "2", "--max-restarts", "2", "--log-dir", "logs"),
    )
    assert job.finish()[0] == 0
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    names = ("rank-{}.log", "rank-{}.restart-1.log", "rank-{}.restart-2.log")
    assert logs == {
        name.format(rank): f"start {number} of rank {rank}\n" for number, name in enumerate(names) for rank in range(2)
    }


OPTIONS = {
    "horovod": ("-np", "2", "--backend", "horovod"),
    "multi_worker": ("-np", "2", "--backend", "multi_worker"),
    "parameter_server": ("--workers", "2", "--ps", "1"),
}


@pytest.mark.parametrize("backend", OPTIONS)
def test_each_start_has_a_cluster_of_its_own(start: Start, tmp_path: Path, backend: str) -> None:
    job = start(
        """
        names = ("KERAS_DIST_JOB", "HOROVOD_GLOO_RENDEZVOUS_PORT", "TF_CONFIG")
        told = [value for name in names if (value := os.environ.get(name)) is not None]
        (here / f"told-{rank}.{number}").write_text(json.dumps(told))
        mark_now(f"told-all-{rank}")
        for other in range(int(sys.argv[1])):
            wait_now(f"told-all-{other}")
        commit(number)
        sys.exit(3 if number == 0 and rank == 0 else 0)
        """,
        *(*OPTIONS[backend], "--max-restarts", "1"),
        arguments=("4" if backend == "parameter_server" else "2",),
    )
    code, _, err = job.finish()
    assert code == 0, err
    told = [json.loads((tmp_path / f"told-0.{number}").read_text()) for number in range(2)]
    assert len(told[0]) == 2
    assert all(first != second for first, second in zip(*told, strict=True))


def test_a_lost_worker_is_no_crash(start: Start) -> None:
    job = start(
        """
        if rank == 1:
            sys.exit(3)
        if rank == 0:
            wait_now("seen")
        """,
        *("--workers", "2", "--ps", "1", "--max-restarts", "1"),
    )
    assert job.process.stderr is not None
    while "Rank 0, the coordinator, continues." not in job.process.stderr.readline():
        pass
    (job.folder / "seen.0").touch()
    code, _, err = job.finish()
    assert (code, messages(err)) == (0, [])


# When the user stops the launcher, or it is killed.


def test_a_launcher_that_is_stopped_does_not_start_again(start: Start) -> None:
    job = start("mark_now(f'ready-{rank}')\nsignal.pause()", "-np", "2", "--max-restarts", "2")
    wait_until_ready(job)
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert (code, last_line(err)) == (130, "keras-dist: stopped by SIGINT.")


def test_a_launcher_that_is_stopped_after_a_crash_does_not_start_again(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: mark_now("asked"))
        mark_now(f"ready-{rank}")
        if rank == 1:
            wait_now("ready-0")
            sys.exit(3)
        while True:
            signal.pause()
        """,
        *("-np", "2", "--max-restarts", "2"),
    )
    job.wait_for("asked.0")
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.finish()
    assert (code, messages(err)) == (3, [FIRST_CAUSE])


@pytest.mark.alone
def test_a_launcher_that_is_killed_leaves_no_file(start: Start) -> None:
    job = start("commit(3)\nmark_now(f'ready-{rank}')\nsignal.pause()", "-np", "2", "--max-restarts", "2")
    wait_until_ready(job)
    assert len([*(job.folder / "temporary").iterdir()]) == 1
    job.process.kill()
    job.process.wait()
    until(lambda: job.processes() == [], limit(CONTRACT_SECONDS))
    assert [*(job.folder / "temporary").iterdir()] == []


# Ranks that commit when they are asked to stop.


def test_sigterm_leaves_the_ranks_time_to_commit(start: Start) -> None:
    job = start(
        """
        commit_at_sigterm(6.0)
        while True:
            signal.pause()
        """,
        *("-np", "2", "--max-restarts", "1"),
    )
    wait_until_ready(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == (75, "", f"keras-dist: stopped by SIGTERM. {COMMITTED}\n")
    assert job.processes() == []


@pytest.mark.alone
def test_ranks_that_do_not_end_in_time_are_killed(start: Start) -> None:
    job = start("commit_at_sigterm(600.0)\nsignal.pause()", "-np", "2", "--grace", "0.5")
    wait_until_ready(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(limit(10.0)) == (143, "", "keras-dist: stopped by SIGTERM. Had to kill: rank 0, rank 1.\n")


@pytest.mark.alone
def test_a_second_signal_ends_all_at_once(start: Start) -> None:
    job = start(
        """
        def never(*_):
            mark_now(f"asked-{rank}")
            time.sleep(600)

        signal.signal(signal.SIGTERM, never)
        mark_now(f"ready-{rank}")
        signal.pause()
        """,
        *("-np", "2"),
    )
    wait_until_ready(job)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("asked-0.0", "asked-1.0")
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.finish(limit(2.0))
    assert (code, last_line(err)) == (143, "keras-dist: stopped by SIGTERM.")
    assert job.processes() == []


@pytest.mark.alone
def test_what_a_rank_started_lives_until_it_has_committed(start: Start) -> None:
    """As processes that read data for the step in which the rank notices the signal."""
    job = start(
        """
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        forgotten = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

        def handle(*_):
            time.sleep(0.2)
            child.communicate(b"end")
            sys.exit(75 if child.returncode == 0 else 1)

        signal.signal(signal.SIGTERM, handle)
        mark_now(f"ready-{rank}")
        signal.pause()
        """,
        *("-np", "2"),
    )
    wait_until_ready(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(limit(CONTRACT_SECONDS))[0] == 75
    assert job.processes() == []


def test_workers_live_until_the_coordinator_has_committed(start: Start) -> None:
    job = start(
        """
        def handle(*_):
            mark_now("question")
            wait_now("answer")
            note_commit(1)
            sys.exit(75)

        if rank == 0:
            signal.signal(signal.SIGTERM, handle)
        mark_now(f"ready-{rank}")
        if rank == 1:
            wait_now("question")
            mark_now("answer")
        signal.pause()
        """,
        *("--workers", "1", "--ps", "1"),
    )
    wait_until_ready(job, 3)
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == (75, "", f"keras-dist: stopped by SIGTERM. {COMMITTED}\n")


# A rank that is asked to stop by somebody else: a notice of maintenance, Slurm.

ASKED = """
if number == 0:
    if rank == 0:
        commit_at_sigterm(3.0)
        while True:
            signal.pause()
    wait_now("ready-0")
    sys.exit(75)
"""
WAS_ASKED = f"keras-dist: rank 1 was asked to stop (exit code 75). {COMMITTED}"


def test_a_rank_that_was_asked_to_stop_ends_all(start: Start) -> None:
    code, _, err = start(ASKED, "-np", "2").finish()
    assert (code, messages(err)) == (75, [WAS_ASKED])


def test_ranks_that_were_asked_to_stop_start_again_and_it_does_not_count(start: Start) -> None:
    job = start(
        ASKED + "\nif number == 1:\n    sys.exit(3) if rank == 1 else signal.pause()\n",
        *("-np", "2", "--max-restarts", "1"),
    )
    code, _, err = job.finish()
    assert code == 0
    assert messages(err) == [
        WAS_ASKED,
        "keras-dist: starts all ranks again, from the commit of step 1300.",
        FIRST_CAUSE,
        "keras-dist: starts all ranks again (restart 1 of 1), from the commit of step 1300.",
    ]


def test_ranks_that_stop_for_ever_without_a_commit_do_not_start_again(start: Start) -> None:
    code, _, err = start("sys.exit(75)", "-np", "2", "--max-restarts", "5").finish()
    assert code == 75
    assert len(messages(err)) == 4
    assert last_line(err).startswith("keras-dist: does not start again: there is no new commit since the last start.")
    assert last_line(err).endswith(COMMITTED)


def test_a_chief_that_fails_while_it_commits_is_the_cause(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            def handle(*_):
                raise OSError("No space left on device")
            signal.signal(signal.SIGTERM, handle)
            mark_now("ready-0")
            while True:
                signal.pause()
        wait_now("ready-0")
        sys.exit(75)
        """,
        *("-np", "2"),
    )
    code, _, err = job.finish()
    assert code == 1
    assert last_line(err) == "keras-dist: rank 0 exited with code 1. All ranks have ended."


def test_a_rank_that_commits_after_another_one_has_failed_hides_no_failure(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            commit_at_sigterm()
            while True:
                signal.pause()
        wait_now("ready-0")
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        *("-np", "2"),
    )
    code, _, err = job.finish()
    assert (code, messages(err)) == (143, ["keras-dist: rank 1 was killed by SIGTERM. All ranks have ended."])


def test_a_chief_that_does_not_commit_in_time_is_named(start: Start) -> None:
    code, _, err = start(ASKED, "-np", "2", "--grace", "0.5").finish()
    assert code == 75
    assert last_line(err) == (
        "keras-dist: rank 1 was asked to stop (exit code 75). All ranks have ended. Had to kill: rank 0."
    )


def test_ranks_that_were_asked_before_are_not_asked_again(start: Start) -> None:
    """A second SIGTERM may end a script at once, as the second Ctrl-C does."""
    job = start(
        """
        def handle(*_):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            mark_now(f"asked-{rank}")
            if rank == 0:
                time.sleep(3.0)
                note_commit(6)
            sys.exit(75)

        signal.signal(signal.SIGTERM, handle)
        if rank == 1:
            wait_now("asked-0")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        """,
        *("-np", "2"),
    )
    code, _, err = job.finish()
    assert (code, messages(err)) == (75, [WAS_ASKED])


def test_ranks_that_are_asked_at_the_same_time_as_the_launcher_commit(start: Start) -> None:
    """As Slurm does: a rank may have ended before the launcher gets its signal."""
    job = start(
        """
        if rank == 0:
            def handle(*_):
                mark_now("asked")
                wait_for("launcher_asked")
                time.sleep(0.5)
                note_commit(5)
                sys.exit(75)
            signal.signal(signal.SIGTERM, handle)
            mark_now("ready-0")
            while True:
                signal.pause()
        wait_now("ready-0")
        sys.exit(75)
        """,
        *("-np", "2", "--max-restarts", "1"),
    )
    job.wait_for("asked.0")
    job.process.send_signal(signal.SIGTERM)
    (job.folder / "launcher_asked").touch()
    code, _, err = job.finish()
    assert (code, messages(err)) == (75, [WAS_ASKED])
