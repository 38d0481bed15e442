"""`keras-dist run` with real processes: what ranks are told, which output is shown, and that nothing is left behind."""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from keras_dist import environment
from keras_dist.launcher.cluster import Cluster, HorovodCluster, MultiWorkerCluster
from tests.limits import limit
from tests.multiprocess.launches import CONTRACT_SECONDS, Start, last_line, until

pytestmark = pytest.mark.timeout(120)

# What ranks are told.


def test_each_rank_is_told_its_place_on_the_loopback_interface(start: Start, tmp_path: Path) -> None:
    job = start(
        """
        import json
        told = {name: value for name, value in os.environ.items() if name.startswith(("HOROVOD_", "PYTHONUNB"))}
        told["session"], told["pid"], told["python"] = os.getsid(0), os.getpid(), sys.executable
        (here / f"told-{rank}").write_text(json.dumps(told))
        """,
        *("-np", "3"),
    )
    assert job.finish() == (0, "", "")
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(3)]
    for rank in range(3):
        assert told[rank]["HOROVOD_RANK"] == told[rank]["HOROVOD_LOCAL_RANK"] == str(rank)
        assert told[rank]["HOROVOD_SIZE"] == told[rank]["HOROVOD_LOCAL_SIZE"] == "3"
        assert told[rank]["HOROVOD_GLOO_IFACE"] == "lo"
        assert told[rank]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert told[rank]["PYTHONUNBUFFERED"] == "1"
        assert told[rank]["session"] == told[rank]["pid"]
        assert told[rank]["python"] == sys.executable
    assert len({place["HOROVOD_GLOO_RENDEZVOUS_PORT"] for place in told}) == 1


LOOKALIKES = ("-np", "7", "--output", "all", "-h", "--", "-m", "x", "--log-dir=logs", "", "a b", "$HOME", "-x")


@pytest.mark.parametrize("target", [(), ("-m", "script"), ("--", sys.executable, "script.py")])
def test_arguments_go_to_the_script_untouched(start: Start, target: tuple[str, ...]) -> None:
    job = start("import json; print(json.dumps(sys.argv[1:]))", *target, arguments=LOOKALIKES)
    code, out, err = job.finish()
    assert (code, json.loads(out), err) == (0, [*LOOKALIKES], "")


TALK = """
print(f"out {rank}")
print(f"err {rank}", file=sys.stderr)
"""


def test_output_without_an_end_of_line_is_shown_at_once(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            print("50 %", end="", file=sys.stderr)
            wait_for("seen")
        """
    )
    assert os.read(job.process.stderr.fileno(), 100) == b"50 %"
    (job.folder / "seen").touch()
    assert job.finish()[0] == 0


def test_output_all_never_mixes_lines(start: Start) -> None:
    source = """
    for line in range(300):
        for part in range(5):
            os.write(1, b"%d-%d " % (rank, part) * 40)
        os.write(1, b"\\n" if line < 299 else b"no end")
    """
    code, out, _ = start(source, "-np", "3", "--output", "all").finish()
    lines = out.splitlines()
    assert (code, len(lines)) == (0, 900)
    for line in lines:
        rank = line[1]
        whole = f"[{rank}] " + "".join(f"{rank}-{part} " * 40 for part in range(5))
        assert line.removesuffix("no end") == whole


@pytest.mark.parametrize("mode", ["chief", "all"])
def test_log_dir_keeps_the_whole_output_of_each_rank(start: Start, tmp_path: Path, mode: str) -> None:
    code, out, err = start(TALK, "--output", mode, "--log-dir", "new/logs").finish()
    assert code == 0
    for kind, text in (("out", out), ("err", err)):
        expected = [f"{kind} 0"] if mode == "chief" else [f"[0] {kind} 0", f"[1] {kind} 1"]
        assert sorted(text.splitlines()) == expected
    for rank in range(2):
        log = (tmp_path / "new" / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_rank_0_has_our_terminal_and_stdin(start: Start) -> None:
    job = start(
        """
        same = os.readlink("/proc/self/fd/1") == os.readlink(f"/proc/{os.getppid()}/fd/1")
        print(same, os.readlink("/proc/self/fd/0"))
        """
    )
    assert job.finish() == (0, "True /dev/null\n", "")


def test_the_output_of_a_rank_that_was_shown_is_not_repeated(start: Start) -> None:
    code, _, err = start('raise ValueError("boom") if rank == 0 else signal.pause()').finish()
    assert code == 1
    assert err.count("ValueError: boom") == 1
    assert last_line(err) == "keras-dist: rank 0 exited with code 1. All ranks have ended."


def test_a_log_that_is_cut_by_a_full_disk_is_not_called_whole(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").symlink_to("/dev/full")
    code, _, err = start("print('x' * 10, flush=True); sys.exit(rank)", "--log-dir", "logs").finish()
    assert code == 1
    expected = "keras-dist: logs/rank-1.log ends here, but the job continues: No space left on device."
    assert err.count(expected) == 1
    assert last_line(err).endswith("The beginning of its output: logs/rank-1.log (No space left on device)")


LOSE_PEER = """
def lose_peer():
    print("keras_dist.errors.PeerLostError: Rank 1 has failed", file=sys.stderr)
    mark("lost_peer")
    sys.exit(1)
"""
# Rank 1 fails once all run; the others ignore SIGTERM.
FAIL = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark(f"ready-{rank}")
for other in range(3):
    wait_for(f"ready-{other}")
if rank == 1:
    fail_by(lambda: 1 / 0)
while True:
    signal.pause()
"""
WAITS_FOR_THE_END_OF_RANK_0 = """
(here / f"pid-{rank}").write_text(str(os.getpid()))
if rank == 0:
    lose_peer()
wait_for("lost_peer")
stat = Path("/proc") / (here / "pid-0").read_text() / "stat"
while stat.exists() and ") Z" not in stat.read_text():
    time.sleep(0.01)
fail_by(lambda: sys.exit("the true cause"))
"""
# As a process with much to finalize on a busy machine.
ENDS_LONG_AFTER_ITS_ERROR = """
if rank == 0:
    wait_for("failed")
    lose_peer()
print("ValueError: the true cause", file=sys.stderr, flush=True)
mark("failed")
signal.pause()
"""
LEAVES_EARLY = """
if rank == 1:
    fail_by(lambda: sys.exit(0))
wait_for("failed")
lose_peer() if rank == 0 else signal.pause()
"""
EXITED, ALL_ENDED = "rank 1 exited with code 1.", " All ranks have ended."
# The script, the number of ranks, the exit code, who is named, what was shown before.
CAUSES: dict[str, tuple[str, int, int, str, str]] = {
    "others ignore SIGTERM": (FAIL, 3, 1, EXITED, "[1] ZeroDivisionError: division by zero\n"),
    "after one that lost it": (LOSE_PEER + WAITS_FOR_THE_END_OF_RANK_0, 2, 1, EXITED, "[1] the true cause\n"),
    "slowly": (LOSE_PEER + ENDS_LONG_AFTER_ITS_ERROR, 2, 1, EXITED, "[1] ValueError: the true cause\n"),
    "leaves": (
        LOSE_PEER + LEAVES_EARLY, 3, 1,
        "rank 1 exited (code 0) while others still needed it: all ranks must make the same calls.", "",
    ),
}  # fmt: skip


@pytest.mark.timed
@pytest.mark.parametrize("name", CAUSES)
def test_the_rank_that_failed_first_ends_all_and_is_named_last(start: Start, name: str) -> None:
    source, size, expected_code, cause, shown = CAUSES[name]
    job = start(source, "-np", str(size))
    code, out, err = job.finish()
    assert job.seconds_since("failed") < limit(CONTRACT_SECONDS)
    assert not job.processes()
    assert (code, out) == (expected_code, "")
    assert last_line(err).startswith(f"keras-dist: {cause}")
    assert name == "others ignore SIGTERM" or last_line(err).endswith(ALL_ENDED)
    assert shown in err


def test_ranks_may_end_one_after_the_other(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            wait_for("other_gone")
        mark("other_gone")
        """
    )
    assert job.finish() == (0, "", "")


IGNORE_SIGNALS = """
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: mark(f"heard-{rank}"))
mark(f"ready-{rank}")
while True:
    signal.pause()
"""
PAUSE = 'mark(f"ready-{rank}")\nsignal.pause()'
SAVE = """
try:
    mark(f"ready-{rank}")
    signal.pause()
except KeyboardInterrupt:
    time.sleep(0.2)
    mark(f"saved-{rank}")
"""


@pytest.mark.timed
@pytest.mark.parametrize(
    ("source", "signum", "rest"),
    [(SAVE, signal.SIGINT, ""), (PAUSE, signal.SIGTERM, ""), (PAUSE, signal.SIGHUP, ""),
     (IGNORE_SIGNALS, signal.SIGTERM, " Had to kill: rank 0, rank 1.")],
    ids=["saves", "SIGTERM", "SIGHUP", "ignored"],
)  # fmt: skip
def test_a_signal_is_passed_on(start: Start, source: str, signum: signal.Signals, rest: str) -> None:
    job = start(source, *(("--grace", "1") if rest else ()))
    job.signal(signum, "ready-0", "ready-1")
    ended = job.finish(limit(10.0 if rest else CONTRACT_SECONDS))
    assert ended == (128 + signum, "", f"keras-dist: stopped by {signum.name}.{rest}\n")
    assert not job.processes()
    assert source != SAVE or all((job.folder / f"saved-{rank}").exists() for rank in (0, 1))


@pytest.mark.timed
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(start: Start, signum: signal.Signals) -> None:
    job = start(IGNORE_SIGNALS)
    job.signal(signum, "ready-0", "ready-1")
    job.signal(signum, "heard-0", "heard-1")
    code, _, err = job.finish(limit(2.0))
    assert (code, last_line(err)) == (128 + signum, f"keras-dist: stopped by {signum.name}.")
    assert not job.processes()


# A process in a session of its own, whose parent ends at once: what a daemon does.
DAEMON = """
    daemon = "import os, time; os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-c", daemon], start_new_session=True)
    mark(f"started{rank}")
"""
ENDS: dict[str, tuple[str, signal.Signals | None]] = {
    "success": ("", None),
    "failure": ("wait_for('started1'); sys.exit(3)", None),
    "a rank that is killed": ("rank and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)", None),
    "SIGTERM": ("time.sleep(60)", signal.SIGTERM),
    "SIGKILL": ("time.sleep(60)", signal.SIGKILL),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.timed
def test_daemons_that_a_rank_started_are_ended_by_any_end(start: Start, name: str) -> None:
    rest, signum = ENDS[name]
    job = start(DAEMON + f"    {rest}\n")
    if signum is not None:
        job.signal(signum, "started0", "started1")
    job.finish()
    until(lambda: not job.processes(), limit(CONTRACT_SECONDS))


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_user_signals_reach_the_scripts_that_handle_them_and_nobody_else(start: Start, signum: signal.Signals) -> None:
    """As Slurm's `--signal=USR1@60` sends them before the time is up."""
    job = start(
        f"""
        if rank == 0:
            signal.signal(signal.{signum.name}, lambda *_: mark("handled"))
        mark(f"ready{{rank}}")
        wait_for("handled")
        print("saved and done")
        """
    )
    job.signal(signum, "ready0", "ready1")
    code, out, _ = job.finish()
    assert (code, out) == (0, "saved and done\n")


def test_a_user_signal_that_no_script_handles_does_no_harm(start: Start) -> None:
    job = start("mark(f'ready{rank}'); wait_for('go')")
    job.signal(signal.SIGUSR1, "ready0", "ready1")
    line = job.process.stderr.readline()
    assert line == "keras-dist: SIGUSR1 was forwarded to no rank: no script has a handler for it.\n"
    (job.folder / "go").touch()
    assert job.finish()[0] == 0


@pytest.mark.parametrize("kind", [HorovodCluster, MultiWorkerCluster])
def test_a_cluster_listens_on_loopback_and_leaves_nothing(kind: type[Cluster]) -> None:
    before = set(threading.enumerate())
    outer = {"HOROVOD_RANK": "9", "HOROVOD_SIZE": "9", environment.INITIALIZED_BY: "1", environment.COMMITTED: "/step"}
    with kind(2, {"HOME": "/home", **outer}) as cluster:
        socket.create_connection(("127.0.0.1", cluster.nodes[0].port), timeout=5).close()
        told = [cluster.environment(rank) for rank in range(2)]
        launches = [environment.detect_launch(each) for each in told]
        assert [launch and (launch.launcher, launch.topology.rank) for launch in launches] == [
            ("keras-dist run", 0), ("keras-dist run", 1),
        ]  # fmt: skip
        assert told[1]["HOME"] == "/home"
        assert not {environment.INITIALIZED_BY, environment.COMMITTED} & told[1].keys()
        own = f":{cluster.nodes[0].port:04X}"
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert [address for address in listening if address.endswith(own)][0] == f"0100007F{own}"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", cluster.nodes[0].port), timeout=5)
    left = set(threading.enumerate()) - before
    for thread in left:  # the one that answered the connection may still be ending
        thread.join(10)
    assert not [thread for thread in left if thread.is_alive()]
    cluster.close()  # again: nothing happens
