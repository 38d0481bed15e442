"""`keras-dist run` with real processes: what ranks are told, which output is shown, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import HorovodCluster
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
    job = start("import json; print(json.dumps(sys.argv[1:]))", "-np", "2", *target, arguments=LOOKALIKES)
    code, out, err = job.finish()
    assert (code, json.loads(out), err) == (0, [*LOOKALIKES], "")


# Which output is shown.


TALK = """
print(f"out {rank}")
print(f"err {rank}", file=sys.stderr)
"""


def test_by_default_the_output_of_rank_0_is_shown_unchanged(start: Start) -> None:
    assert start(TALK, "-np", "2").finish() == (0, "out 0\n", "err 0\n")


def test_output_without_an_end_of_line_is_shown_at_once(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            print("50 %", end="", file=sys.stderr)
            wait_for("seen")
        """,
        *("-np", "2"),
    )
    assert job.process.stderr is not None
    assert os.read(job.process.stderr.fileno(), 100) == b"50 %"
    (job.folder / "seen").touch()
    assert job.finish()[0] == 0


def test_output_all_prefixes_each_line_with_its_rank(start: Start) -> None:
    code, out, err = start(TALK, "-np", "3", "--output", "all").finish()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1", "[2] out 2"]
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]


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
    code, out, err = start(TALK, "-np", "2", "--output", mode, "--log-dir", "new/logs").finish()
    assert code == 0
    if mode == "chief":
        assert (out, err) == ("out 0\n", "err 0\n")
    for rank in range(2):
        log = (tmp_path / "new" / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"err {rank}", f"out {rank}"]


def test_rank_0_has_our_terminal_and_stdin(start: Start) -> None:
    job = start(
        """
        same = os.readlink("/proc/self/fd/1") == os.readlink(f"/proc/{os.getppid()}/fd/1")
        print(same, os.readlink("/proc/self/fd/0"))
        """,
        *("-np", "2"),
    )
    assert job.finish() == (0, "True /dev/null\n", "")


# A rank fails.


FAILURES = {
    "exception": ('raise ValueError("boom")', 1, "rank 1 exited with code 1."),
    "exit": ("sys.exit(3)", 3, "rank 1 exited with code 3."),
    "sigkill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
    "sigsegv": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV."),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.alone
def test_a_rank_that_fails_ends_all_and_is_named_last(start: Start, name: str) -> None:
    action, expected_code, expected_end = FAILURES[name]
    job = start(
        f"""
        mark(f"ready-{{rank}}")
        for other in range(3):
            wait_for(f"ready-{{other}}")
        if rank == 1:
            mark("failed")
            {action}
        signal.pause()
        """,
        *("-np", "3"),
    )
    code, out, err = job.finish()
    assert job.seconds_since("failed") < limit(CONTRACT_SECONDS)
    assert job.processes() == []
    assert (code, out) == (expected_code, "")
    assert last_line(err).startswith(f"keras-dist: {expected_end}")
    assert last_line(err).endswith("All ranks have ended.")
    if name == "exception":
        assert "[1] ValueError: boom\n" in err
        assert "[1] Traceback (most recent call last):\n" in err
    if name == "sigkill":
        assert "out of memory" in last_line(err)


def test_the_output_of_a_rank_that_was_shown_is_not_repeated(start: Start) -> None:
    code, _, err = start('raise ValueError("boom") if rank == 0 else signal.pause()', "-np", "2").finish()
    assert code == 1
    assert err.count("ValueError: boom") == 1
    assert last_line(err) == "keras-dist: rank 0 exited with code 1. All ranks have ended."


def test_the_log_is_named(start: Start) -> None:
    code, _, err = start("sys.exit(rank)", "-np", "2", "--log-dir", "logs").finish()
    assert code == 1
    assert last_line(err).endswith("Its whole output: logs/rank-1.log")


def test_a_log_that_is_cut_by_a_full_disk_is_not_called_whole(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").symlink_to("/dev/full")
    code, _, err = start("print('x' * 10, flush=True); sys.exit(rank)", "-np", "2", "--log-dir", "logs").finish()
    assert code == 1
    expected = "keras-dist: logs/rank-1.log ends here, but the job continues: No space left on device."
    assert err.count(expected) == 1
    assert last_line(err).endswith("The beginning of its output: logs/rank-1.log (No space left on device)")


@pytest.mark.alone
def test_ranks_that_ignore_sigterm_are_killed(start: Start) -> None:
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mark(f"ready-{rank}")
        if rank == 1:
            wait_for("ready-0")
            fail_by(lambda: sys.exit(3))
        while True:
            signal.pause()
        """,
        *("-np", "2"),
    )
    code, _, err = job.finish()
    assert job.seconds_since("failed") < limit(CONTRACT_SECONDS)
    assert code == 3
    assert last_line(err).startswith("keras-dist: rank 1 exited with code 3.")


def test_what_a_rank_started_is_ended_with_it(start: Start) -> None:
    job = start(
        """
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        sys.exit(3 if rank == 1 else 0)
        """,
        *("-np", "2"),
    )
    assert job.finish()[0] == 3
    assert job.processes() == []


def test_what_a_rank_left_running_is_ended_after_success(start: Start) -> None:
    job = start('subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])', "-np", "2")
    assert job.finish() == (0, "", "")
    assert job.processes() == []


# The rank that failed first, not those that lost it.


LOSE_PEER = """
def lose_peer():
    print("keras_dist.errors.PeerLostError: Rank 1 has failed", file=sys.stderr)
    mark("lost_peer")
    sys.exit(1)
"""


@pytest.mark.alone
def test_a_rank_that_lost_its_peer_is_not_the_cause_even_if_it_ends_first(start: Start) -> None:
    job = start(
        LOSE_PEER
        + textwrap.dedent(
            """
            mark(f"pid-{rank}")
            (here / f"pid-{rank}").write_text(str(os.getpid()))
            if rank == 0:
                lose_peer()
            wait_for("lost_peer")
            stat = Path("/proc") / (here / "pid-0").read_text() / "stat"
            while stat.exists() and ") Z" not in stat.read_text():
                time.sleep(0.01)
            fail_by(lambda: sys.exit("the true cause"))
            """
        ),
        *("-np", "2"),
    )
    code, _, err = job.finish()
    assert job.seconds_since("failed") < limit(CONTRACT_SECONDS)
    assert code == 1
    assert "[1] the true cause\n" in err
    assert last_line(err) == "keras-dist: rank 1 exited with code 1. All ranks have ended."


@pytest.mark.alone
def test_a_rank_that_takes_long_to_end_after_its_error_is_still_the_cause(start: Start) -> None:
    job = start(
        LOSE_PEER
        + textwrap.dedent(
            """
            if rank == 0:
                wait_for("failed")
                lose_peer()
            print("ValueError: the true cause", file=sys.stderr, flush=True)
            mark("failed")
            signal.pause()  # as a process with much to finalize on a busy machine
            """
        ),
        *("-np", "2"),
    )
    code, _, err = job.finish()
    assert job.seconds_since("failed") < limit(CONTRACT_SECONDS)
    assert code == 1
    assert "[1] ValueError: the true cause\n" in err
    assert last_line(err) == "keras-dist: rank 1 exited with code 1. All ranks have ended."


@pytest.mark.alone
def test_a_rank_that_leaves_early_is_the_cause(start: Start) -> None:
    job = start(
        LOSE_PEER
        + textwrap.dedent(
            """
            if rank == 1:
                fail_by(lambda: sys.exit(0))
            wait_for("failed")
            lose_peer() if rank == 0 else signal.pause()
            """
        ),
        *("-np", "3"),
    )
    code, _, err = job.finish()
    assert job.seconds_since("lost_peer") < limit(CONTRACT_SECONDS)
    assert code == 1
    assert last_line(err).startswith("keras-dist: rank 1 exited (code 0) while others still needed it")


def test_ranks_may_end_one_after_the_other(start: Start) -> None:
    job = start(
        """
        if rank == 0:
            wait_for("other_gone")
        mark("other_gone")
        """,
        *("-np", "2"),
    )
    assert job.finish() == (0, "", "")


# The launcher is asked to stop, or killed.


@pytest.mark.alone
def test_ctrl_c_lets_the_scripts_save(start: Start) -> None:
    job = start(
        """
        try:
            mark(f"ready-{rank}")
            signal.pause()
        except KeyboardInterrupt:
            mark(f"saved-{rank}")
        """,
        *("-np", "2"),
    )
    job.wait_for("ready-0", "ready-1")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(limit(CONTRACT_SECONDS)) == (130, "", "keras-dist: stopped by SIGINT.\n")
    job.wait_for("saved-0", "saved-1")
    assert job.processes() == []


IGNORE_SIGNALS = """
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda *_: mark(f"heard-{rank}"))
mark(f"ready-{rank}")
while True:
    signal.pause()
"""


@pytest.mark.alone
def test_a_second_ctrl_c_kills_at_once(start: Start) -> None:
    job = start(IGNORE_SIGNALS, "-np", "2")
    job.wait_for("ready-0", "ready-1")
    job.process.send_signal(signal.SIGINT)
    job.wait_for("heard-0", "heard-1")
    job.process.send_signal(signal.SIGINT)
    assert job.finish(limit(2.0))[0] == 130
    assert job.processes() == []


@pytest.mark.alone
def test_scripts_that_ignore_sigterm_are_killed_after_a_while(start: Start) -> None:
    job = start(IGNORE_SIGNALS, "-np", "2", "--grace", "1")
    job.wait_for("ready-0", "ready-1")
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.finish(limit(10.0))
    assert (code, err) == (143, "keras-dist: stopped by SIGTERM. Had to kill: rank 0, rank 1.\n")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.alone
def test_other_signals_are_passed_on(start: Start, signum: signal.Signals) -> None:
    job = start('mark(f"ready-{rank}")\nsignal.pause()', "-np", "2")
    job.wait_for("ready-0", "ready-1")
    job.process.send_signal(signum)
    assert job.finish(limit(CONTRACT_SECONDS)) == (128 + signum, "", f"keras-dist: stopped by {signum.name}.\n")


@pytest.mark.alone
def test_the_ranks_die_with_a_launcher_that_is_killed(start: Start) -> None:
    job = start(IGNORE_SIGNALS, "-np", "2")
    job.wait_for("ready-0", "ready-1")
    job.process.kill()
    job.process.wait()
    until(lambda: job.processes() == [], limit(CONTRACT_SECONDS))


# The cluster alone.


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
@pytest.mark.alone
def test_daemons_that_a_rank_started_are_ended_by_any_end(start: Start, name: str) -> None:
    rest, signum = ENDS[name]
    job = start(DAEMON + f"    {rest}\n", "-np", "2")
    if signum is not None:
        job.wait_for("started0", "started1")
        job.process.send_signal(signum)
    job.finish()
    begun = time.monotonic()
    until(lambda: job.processes() == [])
    assert time.monotonic() - begun < limit(CONTRACT_SECONDS)


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
        """,
        "-np", "2",
    )  # fmt: skip
    job.wait_for("ready0", "ready1")
    job.process.send_signal(signum)
    code, out, _ = job.finish()
    assert (code, out) == (0, "saved and done\n")


def test_a_user_signal_that_no_script_handles_does_no_harm(start: Start) -> None:
    job = start("mark(f'ready{rank}'); wait_for('go')", "-np", "2")
    job.wait_for("ready0", "ready1")
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.stderr is not None
    line = job.process.stderr.readline()
    assert line == "keras-dist: SIGUSR1 was sent on to no rank: no script has a handler for it.\n"
    (job.folder / "go").touch()
    assert job.finish()[0] == 0


def test_a_cluster_listens_on_loopback_and_leaves_nothing() -> None:
    threads = threading.active_count()
    outer = {"HOROVOD_RANK": "9", environment.INITIALIZED_BY: "1", environment.COMMITTED: "/tmp/step"}
    with HorovodCluster(2, {"HOME": "/home", **outer}) as cluster:
        socket.create_connection(("127.0.0.1", cluster.port), timeout=5).close()
        told = cluster.environment(1)
        assert told["HOME"] == "/home"
        assert told["HOROVOD_RANK"] == "1"
        assert environment.INITIALIZED_BY not in told
        assert environment.COMMITTED not in told
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert [address for address in listening if address.endswith(f":{cluster.port:04X}")][0] == (
            f"0100007F:{cluster.port:04X}"
        )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", cluster.port), timeout=5)
    assert threading.active_count() == threads
    cluster.close()  # again: nothing happens


def test_a_cluster_of_no_process_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one process"):
        HorovodCluster(0, {})


# With Horovod itself.


HOROVOD = """
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum)
print("sum", float(total[0]), "of", hvd.size())
"""


@pytest.mark.ci
def test_horovod_reduces_over_the_ranks(start: Start) -> None:
    code, out, err = start(HOROVOD, "-np", "2", "--output", "all").finish()
    assert (code, sorted(out.splitlines())) == (0, ["[0] sum 3.0 of 2", "[1] sum 3.0 of 2"]), err


@pytest.mark.ci
def test_horovod_ends_with_the_rank_that_raised(start: Start) -> None:
    steps = """
for step in range(10**6):
    if rank == 1 and step == 5:
        mark("failed")
        raise ValueError("boom")
    hvd.allreduce(tf.constant([1.0]), name="x")
"""
    job = start(HOROVOD + steps, "-np", "2")
    code, _, err = job.finish()
    assert job.seconds_since("failed") < limit(CONTRACT_SECONDS)
    assert code == 1, err
    assert "[1] ValueError: boom\n" in err
    assert last_line(err) == "keras-dist: rank 1 exited with code 1. All ranks have ended."
