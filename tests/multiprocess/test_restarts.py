"""`keras-dist run --max-restarts`, and ranks that commit when they are asked to stop. Without TensorFlow."""

import json
import signal
import textwrap
from pathlib import Path

import pytest

from tests.limits import limit
from tests.multiprocess.launches import CONTRACT_SECONDS, Job, Start, until, wait_for

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

def wait_for_ever():
    while True:
        signal.pause()

def commit(step):
    if rank == 0:
        note_commit(step)
        mark_now("commit")
    wait_now("commit")

def at_sigterm(handle):
    signal.signal(signal.SIGTERM, lambda *_: handle())
    mark_now(f"ready-{rank}")

def commit_at_sigterm(seconds=0.0):
    def handle():
        time.sleep(seconds)  # as the writing of large files does
        if rank == 0:
            note_commit(1300 + number)
        sys.exit(75)

    at_sigterm(handle)
"""
# A rank is asked to stop by somebody else: a notice of maintenance, Slurm.
ASKED = """
if number == 0:
    if rank == 0:
        commit_at_sigterm(3.0)
        wait_for_ever()
    wait_now("ready-0")
    sys.exit(75)
"""
ALL_ENDED = "All ranks have ended."
FIRST_CAUSE = f"rank 1 exited with code 3. {ALL_ENDED}"
COMMITTED = "Training was committed: run the same command again to resume."
STOPPED = f"stopped by SIGTERM. {COMMITTED}"
WAS_ASKED = f"rank 1 was asked to stop (exit code 75). {COMMITTED}"
NOT_AGAIN = "no restart: there is no new commit since the last start. The first cause: rank 1 exited with"
LAST = "no restart: restart 2 of 2 was the last. The cause: rank 1 exited with code 5."

# The script, the options, the exit code, what the launcher says.
ENDS: dict[str, tuple[str, str, int, list[str]]] = {
    "after a crash all ranks start again": (
        "number or commit(1200)\nnumber or (sys.exit(3) if rank == 1 else signal.pause())",
        "--max-restarts 3", 0, [FIRST_CAUSE, "restarts all ranks (restart 1 of 3), from the commit of step 1200."],
    ),
    "a crash before any commit is tried again once": (
        "sys.exit(3 + number) if rank == 1 else signal.pause()",
        "--max-restarts 5", 4,
        [FIRST_CAUSE, "restarts all ranks (restart 1 of 5), from where they began: there is no commit since.",
         f"rank 1 exited with code 4. {ALL_ENDED}", f"{NOT_AGAIN} code 3."],
    ),
    "the last restart is the last": (
        "commit(100 + number)\nsys.exit(3 + number) if rank == 1 else signal.pause()",
        "--max-restarts 2", 5,
        [FIRST_CAUSE, "restarts all ranks (restart 1 of 2), from the commit of step 100.",
         f"rank 1 exited with code 4. {ALL_ENDED}",
         "restarts all ranks (restart 2 of 2), from the commit of step 101.",
         f"rank 1 exited with code 5. {ALL_ENDED}", LAST],
    ),
    "a rank that was asked to stop ends all": (ASKED, "", 75, [WAS_ASKED]),
    "ranks that were asked to stop start again, and it does not count": (
        f"{ASKED}\nif number == 1:\n    sys.exit(3) if rank == 1 else signal.pause()\n",
        "--max-restarts 1", 0,
        [WAS_ASKED, "restarts all ranks, from the commit of step 1300.", FIRST_CAUSE,
         "restarts all ranks (restart 1 of 1), from the commit of step 1300."],
    ),
    "a chief that does not commit in time is named": (
        ASKED, "--grace 0.5", 75, [f"rank 1 was asked to stop (exit code 75). {ALL_ENDED} Had to kill: rank 0."],
    ),
    "a chief that fails while it commits is the cause": (
        """
        if rank == 0:
            at_sigterm(lambda: open("/no/such/folder/commit", "w"))
            wait_for_ever()
        wait_now("ready-0")
        sys.exit(75)
        """,
        "", 1, [f"rank 0 exited with code 1. {ALL_ENDED}"],
    ),
    "a rank that commits after another one has failed hides no failure": (
        """
        if rank == 0:
            commit_at_sigterm()
            wait_for_ever()
        wait_now("ready-0")
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        "", 143, [f"rank 1 was killed by SIGTERM. {ALL_ENDED}"],
    ),
    # A second SIGTERM may end a script at once, as the second Ctrl-C does.
    "ranks that were asked before are not asked again": (
        """
        def handle():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            mark_now(f"asked-{rank}")
            if rank == 0:
                time.sleep(3.0)
                note_commit(6)
            sys.exit(75)

        at_sigterm(handle)
        if rank == 1:
            wait_now("asked-0")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        """,
        "", 75, [WAS_ASKED],
    ),
}  # fmt: skip


@pytest.fixture
def start(start: Start) -> Start:
    """Starts a script that knows how often it was started."""

    def numbered(source: str, *options: str, arguments: tuple[str, ...] = ()) -> Job:
        return start(NUMBERED + textwrap.dedent(source), *options, arguments=arguments)

    return numbered


def messages(err: str) -> list[str]:
    """Returns what the launcher says."""
    return [line.removeprefix("keras-dist: ") for line in err.splitlines() if line.startswith("keras-dist: ")]


@pytest.mark.parametrize("name", ENDS)
def test_how_ranks_end_and_start_again(start: Start, name: str) -> None:
    source, options, expected_code, expected = ENDS[name]
    code, _, err = start(source, *options.split()).finish()
    assert (code, messages(err)) == (expected_code, expected)


def test_a_loop_of_crashes_ends_with_its_first_cause_and_keeps_all_logs(start: Start, tmp_path: Path) -> None:
    job = start(
        """
        print(f"start {number} of rank {rank}")
        commit((100, 200, 200)[number])
        sys.exit(3 + number) if rank == 1 else signal.pause()
        """,
        *("--max-restarts", "5", "--log-dir", "logs"),
    )
    code, _, err = job.finish()
    assert code == 5
    assert messages(err)[-1] == f"{NOT_AGAIN} code 4. Its whole output: logs/rank-1.restart-1.log"
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
    source = "if rank == 1:\n    sys.exit(3)\nif rank == 0:\n    wait_now('seen')\n"
    job = start(source, "--workers", "2", "--ps", "1", "--max-restarts", "1")
    while "Rank 0, the coordinator, continues." not in job.process.stderr.readline():
        pass
    (job.folder / "seen.0").touch()
    code, _, err = job.finish()
    assert (code, messages(err)) == (0, [])


@pytest.mark.timed
def test_a_launcher_that_is_killed_leaves_no_rank_and_no_file(start: Start) -> None:
    job = start("commit(3)\nat_sigterm(lambda: None)\nwait_for_ever()", "--max-restarts", "2")
    wait_for(job.folder, "ready-0.0", "ready-1.0")
    assert len([*(job.folder / "temporary").iterdir()]) == 1
    job.process.kill()
    job.process.wait()
    until(lambda: not job.processes(), limit(CONTRACT_SECONDS))
    assert [*(job.folder / "temporary").iterdir()] == []


@pytest.mark.timed
def test_what_a_rank_started_lives_until_it_has_committed(start: Start) -> None:
    """As processes that read data for the step in which the rank notices the signal."""
    job = start(
        """
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        forgotten = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

        def handle():
            time.sleep(0.2)
            child.communicate(b"end")
            sys.exit(75 if child.returncode == 0 else 1)

        at_sigterm(handle)
        signal.pause()
        """
    )
    job.signal(signal.SIGTERM, "ready-0.0", "ready-1.0")
    assert job.finish(limit(CONTRACT_SECONDS))[0] == 75
    assert not job.processes()


# The script, the options, what the ranks mark before SIGTERM goes to the launcher, the exit code, what that says.
STOPS: dict[str, tuple[str, str, list[str], int, list[str]]] = {
    "after a crash it does not start again": (
        """
        if rank == 0:
            at_sigterm(lambda: mark_now("asked"))
        if rank == 1:
            wait_now("ready-0")
            sys.exit(3)
        wait_for_ever()
        """,
        "--max-restarts 2", ["asked.0"], 3, [FIRST_CAUSE],
    ),
    "the ranks have time to commit": (
        "commit_at_sigterm(6.0)\nwait_for_ever()",
        "--max-restarts 1", ["ready-0.0", "ready-1.0"], 75, [STOPPED],
    ),
    "workers live until the coordinator has committed": (
        """
        def handle():
            mark_now("question")
            wait_now("answer")
            note_commit(1)
            sys.exit(75)

        at_sigterm(handle) if rank == 0 else mark_now(f"ready-{rank}")
        if rank == 1:
            wait_now("question")
            mark_now("answer")
        signal.pause()
        """,
        "--workers 1 --ps 1", ["ready-0.0", "ready-1.0", "ready-2.0"], 75, [STOPPED],
    ),
    # As Slurm does: a rank may have ended before the launcher gets its signal.
    "ranks that are asked at the same time commit": (
        """
        def handle():
            mark_now("asked")
            wait_for("launcher_asked")
            time.sleep(0.5)
            note_commit(5)
            sys.exit(75)

        if rank == 0:
            at_sigterm(handle)
            wait_for_ever()
        wait_now("ready-0")
        sys.exit(75)
        """,
        "--max-restarts 1", ["asked.0"], 75, [WAS_ASKED],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STOPS)
def test_a_launcher_that_is_asked_to_stop(start: Start, name: str) -> None:
    source, options, marks, expected_code, expected = STOPS[name]
    job = start(source, *options.split())
    job.signal(signal.SIGTERM, *marks)
    (job.folder / "launcher_asked").touch()
    code, _, err = job.finish()
    assert (code, messages(err)) == (expected_code, expected)
    assert not job.processes()
