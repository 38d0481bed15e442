"""Runs a command as several ranks: start, monitor, end, report; and again after a crash."""

import contextlib
import dataclasses
import itertools
import queue
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.backends import BACKENDS, load
from keras_dist.environment import COMMITTED_EXIT_CODE
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import Cluster
from keras_dist.launcher.nodes import Node, RemoteNode
from keras_dist.launcher.output import Console, RankOutput
from keras_dist.launcher.processes import SENT_ON, Ended, LocalRanks, Received, on_stop_signals

# The promise is that all ranks have ended 5 s after the first failure: SETTLE + GRACE + the kill.
SETTLE_SECONDS = 1.5  # for the rank that failed first to end, if one that lost its peer has ended before it
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
SAVE_SECONDS = 5.0  # for scripts that save something when the user stops them
COMMIT_SECONDS = 30.0  # for scripts that handle SIGTERM, by default: a commit of a large model takes time
_HELPERS_SECONDS = 6.0  # for workers and servers to end by themselves after their coordinator
_KILL_SECONDS = 1.0
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start of all ranks has ended. The user has been told."""

    code: int  # of the launcher, if it does not start them again
    cause: str = ""  # which rank ended the others, and how; empty if no rank did
    is_final: bool = True  # whether the ranks must not be started again
    rank: int | None = None  # which failed first
    stopped_by: signal.Signals | None = None  # the launcher's signal, if that ended the ranks


class Job:
    """The ranks of one start and how they ended: those of this machine, and those of a cluster's other nodes."""

    def __init__(self, cluster: Cluster, here: LocalRanks, commit_seconds: float = COMMIT_SECONDS) -> None:
        self._cluster, self._here, self._commit_seconds = cluster, here, commit_seconds
        self._print = here.console.print
        self._hosts = [node if isinstance(node, RemoteNode) else here for node in cluster.nodes]
        here.interface, here.title = cluster.nodes[0].interface, cluster.nodes[0].title
        self._outputs: list[RankOutput] = []  # of the ranks that were started
        self._ended: list[Ended] = []
        self._standing: list[Ended] = []  # did nothing when the job was ended
        self._requests: list[int] = []  # to stop: the nodes that were asked
        self._may_commit = False  # whether the job ends since the launcher or a rank was asked to, not by a failure

    def run(self, restart: int = 0) -> Outcome:
        """Runs all ranks until they have ended. `restart` says how often they were started before."""
        with contextlib.ExitStack() as closing:
            for host in reversed(self._hosts):
                closing.callback(host.end_all)
            stopped_by, killed = None, list[int]()
            try:
                for host, node in zip(self._hosts, self._cluster.nodes, strict=True):
                    for _ in range(node.size):
                        rank = len(self._outputs)
                        self._outputs.append(host.start(rank, self._cluster.variables(rank), restart))
                stopped_by = self._monitor()
                ended_by_themselves = [*self._ended]
            finally:
                killed = self._end(stopped_by)
            for output in self._outputs:
                output.drain()
            return self._report(stopped_by, ended_by_themselves, killed)

    # --- Monitor ---

    def _monitor(self) -> signal.Signals | None:
        """Waits until all ranks have ended or have to be ended; returns the signal that asked for it, if one did."""
        deadline = None
        while self._running():
            event = self._next_event(deadline)
            if event is None:
                break
            if isinstance(event, Received):
                if event.signal not in SENT_ON:
                    return event.signal
                if not self._here.send_on(event.signal):
                    name = event.signal.name
                    self._print(f"keras-dist: {name} was forwarded to no rank: no script has a handler for it.")
            elif self._cluster.only_chief_runs:
                if event.rank == 0:
                    deadline = time.monotonic() + _HELPERS_SECONDS
                elif event.code and deadline is None:
                    quoted = quote(event.rank, self._outputs) if event.code > 0 else []
                    who = sentences_about(event, self._outputs[event.rank])[0]
                    self._print("\n".join([*quoted, f"keras-dist: {who} Rank 0, the coordinator, continues."]))
            elif event.code and not self._lost_its_peer(event):
                break
            elif event.code:
                deadline = deadline or time.monotonic() + SETTLE_SECONDS
        return None

    def _next_event(self, deadline: float | None) -> Ended | Received | None:
        """Returns the next event, `None` at the deadline. Records the ends of ranks and the requests to stop."""
        try:
            event = self._here.events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            self._ended.append(event)
        elif event.signal not in SENT_ON:
            self._requests.append(event.node)
        return event

    def _lost_its_peer(self, end: Ended) -> bool:
        if end.code == -signal.SIGKILL:  # no rank does this to itself
            return False
        output = self._outputs[end.rank]
        output.drain()
        return lost_peer(output.text())

    # --- End ---

    def _end(self, stopped_by: signal.Signals | None) -> list[int]:
        """Ends what still runs, by stronger and stronger signals; returns the ranks that had to be killed."""
        standing = [rank for host in self._hosts for rank in host.standing()]
        self._standing = [Ended(rank, -signal.SIGSTOP) for rank in standing]
        self._may_commit = stopped_by == signal.SIGTERM or (stopped_by is None and bool(self._committed()))
        if self._may_commit and self._let_commit():
            stopped_by = None  # what still runs has had its time
        steps = [] if stopped_by is None else [(stopped_by, SAVE_SECONDS)]
        if stopped_by != signal.SIGTERM:
            steps.append((signal.SIGTERM, GRACE_SECONDS))
        for signum, seconds in [*steps, (signal.SIGKILL, _KILL_SECONDS)]:
            if self._all_gone():
                return []
            left = self._running()
            for host in self._hosts:
                host.send(signum)
            if self._wait_for(self._all_gone, seconds) and signum != signal.SIGKILL:
                return []
        return left

    def _let_commit(self) -> bool:
        """Asks the ranks that handle SIGTERM to commit and to end, and waits for all. Returns false if none would.

        Nobody else gets a signal yet. They may be needed for the commit, as the workers of a coordinator and what the
        ranks have started; or they were asked before, and would not survive to be asked twice.
        """
        if has_begun := bool(self._committed()):  # usually on all ranks
            self._wait_for(self._scripts_have_ended, min(SETTLE_SECONDS, self._commit_seconds))
        handle = [host.send_on(signal.SIGTERM) for host in self._hosts]
        if any(handle) or has_begun:
            self._wait_for(self._scripts_have_ended, self._commit_seconds)
        return any(handle) or has_begun

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until a condition is true; kills all ranks if the user asks to stop once more."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            event = self._next_event(time.monotonic() + _POLL_SECONDS)
            # A scheduler asks all nodes, so that one which is asked twice counts.
            if isinstance(event, Received) and event.signal not in SENT_ON and self._requests.count(event.node) > 1:
                for host in self._hosts:
                    host.send(signal.SIGKILL)
        return True

    def _running(self) -> list[int]:
        ended = {end.rank for end in self._ended}
        return [rank for rank in range(len(self._outputs)) if rank not in ended]

    def _scripts_have_ended(self) -> bool:
        return not any(self._is_of_script(rank) for rank in self._running())

    def _is_of_script(self, rank: int) -> bool:
        return rank == 0 or not self._cluster.only_chief_runs

    def _all_gone(self) -> bool:
        return not self._running() and all(host.all_gone() for host in self._hosts)

    # --- Report ---

    def _report(self, stopped_by: signal.Signals | None, ended: Sequence[Ended], killed: Sequence[int]) -> Outcome:
        """Tells the user how the ranks have ended. `ended` are those that did before the launcher ended the others."""
        is_lost = any(host.is_lost for host in self._hosts if isinstance(host, RemoteNode))
        is_final = is_lost or bool(self._requests) or not self._all_gone()
        if self._may_commit and (committed := self._committed()):
            fine = (0, COMMITTED_EXIT_CODE, -signal.SIGTERM, 128 + signal.SIGTERM)
            # The ranks that failed instead, and neither because others had ended nor because they had to.
            candidates = [end for end in self._ended if self._is_of_script(end.rank) and end.code not in fine]
            failed = [end for end in candidates if end.rank not in killed and not self._lost_its_peer(end)]
            if not failed and 0 not in killed:
                who = f"rank {committed[0].rank} {manner(COMMITTED_EXIT_CODE)}"
                if stopped_by is not None:
                    who = f"stopped by {stopped_by.name}"
                text = f"{who}. Training was committed: run the same command again to resume."
                self._print(f"keras-dist: {text}")
                return Outcome(COMMITTED_EXIT_CODE, text, is_final)
            ended = failed or ended
        had_to_kill = f" Had to kill: {', '.join(f'rank {rank}' for rank in killed)}." if killed else ""
        if stopped_by is not None:
            self._print(f"keras-dist: stopped by {stopped_by.name}.{had_to_kill}")
            return Outcome(128 + stopped_by, stopped_by=stopped_by)
        outputs = self._outputs
        lost = [end for end in self._ended if outputs[end.rank].fate]  # maybe noticed only when the job was ended
        ended = [end for end in (*ended, *lost, *self._standing) if self._is_of_script(end.rank)]
        cause = first_cause(ended, self._lost_its_peer, lambda end: named_failed(outputs[end.rank].text()))
        if cause is None:
            return Outcome(0)
        waited_for = had_to_kill if self._may_commit else ""
        self._print(describe(cause, ended, outputs) + waited_for)
        text = " ".join(sentences_about(cause, outputs[cause.rank]))
        return Outcome(exit_code(cause, ended), text, is_final, cause.rank)

    def _committed(self) -> list[Ended]:
        """Returns the ranks that have ended because they were asked to stop, with a commit."""
        return [end for end in self._ended if self._is_of_script(end.rank) and end.code == COMMITTED_EXIT_CODE]


# What a rank prints that fails only because another one has gone.
_LOST_PEER = (
    "PeerLostError", "Horovod has been shut down", "HorovodInternalError", "Collective ops is aborted by",
    "gloo/transport/",  # marks Gloo's connection errors; those of the script prove nothing
)  # fmt: skip
_NAMES_FAILED = re.compile(r"PeerLostError: Rank (\d+) has failed")
_TAIL_LINES = 40
_SAME_LINES = 3  # at the end of two outputs: they tell the same error


def lost_peer(text: str) -> bool:
    """True if the output of a rank shows that another rank failed first."""
    return any(mark in text for mark in _LOST_PEER)


def named_failed(text: str) -> int | None:
    """Returns the rank that the output of another one names as the one that failed, if it names one."""
    found = _NAMES_FAILED.search(text)
    return int(found[1]) if found else None


def first_cause(
    ended: Sequence[Ended], lost_its_peer: Callable[[Ended], bool], named_failed: Callable[[Ended], int | None]
) -> Ended | None:
    """Returns the end that made all others fail, `None` if none failed.

    That is the first rank that failed by itself; else the one that another rank names; else, if some rank lost its
    peer, the first one that left with code 0; else the first one that failed. `ended` has the ends of the ranks, in
    order, without those caused by the launcher.
    """
    failed = [end for end in ended if end.code != 0]
    if not failed:
        return None
    failed_by_themselves = [end for end in failed if not lost_its_peer(end)]
    # Such a rank has raised. If it was still ending, which takes a busy machine seconds, its code is Python's 1.
    known = {end.rank: end for end in ended}
    named = [known.get(rank, Ended(rank, 1)) for end in failed if (rank := named_failed(end)) is not None]
    left_early = [end for end in ended if end.code == 0]
    return (failed_by_themselves or named or left_early or failed)[0]


def exit_code(cause: Ended, ended: Sequence[Ended]) -> int:
    """Returns the exit code of the launcher, as a shell would give it, never 0."""
    code = cause.code or next(end.code for end in ended if end.code != 0)
    return code if code > 0 else 128 - code


def describe(cause: Ended, ended: Sequence[Ended], outputs: Sequence[RankOutput]) -> str:
    """Returns the message about the cause. Its last line names the rank, after output that was not shown yet."""
    # The output of a rank that left early shows nothing; a rank that lost it shows in which call.
    quoted_rank = cause.rank if cause.code else next(end.rank for end in ended if end.code != 0)
    who, *where = sentences_about(cause, outputs[cause.rank])
    sentences = [f"keras-dist: {who}", *(["All ranks have ended."] if len(outputs) > 1 else []), *where]
    return "\n".join([*quote(quoted_rank, outputs), " ".join(sentences)])


def sentences_about(end: Ended, output: RankOutput) -> list[str]:
    sentences = [f"rank {end.rank}{output.place} {output.fate or manner(end.code)}."]
    if output.log is not None and output.log_error:
        sentences.append(f"The beginning of its output: {output.log} ({output.log_error})")
    elif output.log is not None:
        sentences.append(f"Its whole output: {output.log}")
    return sentences


def manner(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (if not by you, then by the kernel, out of memory: see `dmesg`)"
    if code == -signal.SIGSTOP:
        return "was stopped (SIGSTOP, or a debugger), so the other ranks got no answer from it"
    if code < 0:
        names = {signum.value: signum.name for signum in signal.Signals}  # without the real-time signals
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    if code == environment.COMMITTED_EXIT_CODE:
        return f"was asked to stop (exit code {code})"
    if code == 0:
        return "exited (code 0) while others still needed it: all ranks must make the same calls"
    return f"exited with code {code}"


def quote(rank: int, outputs: Sequence[RankOutput]) -> list[str]:
    """Returns the last lines of a rank's output, unless the user has seen them."""
    output, seen = outputs[rank], [other.last_lines(_SAME_LINES) for other in outputs if other.is_shown]
    if output.is_shown or not output.tail or output.last_lines(_SAME_LINES) in seen:
        return []
    return [f"[{rank}] {line}".rstrip() for line in output.last_lines(_TAIL_LINES)]


class Restarts(contextlib.ExitStack):
    """Decides after each start whether there is another one, and tells the user. Learns of commits from the chief.

    Ranks that crash twice without a new commit in between would crash for ever: they are not started again.
    """

    def __init__(self, limit: int, console: Console) -> None:
        super().__init__()
        self._limit, self._used, self._console = limit, 0, console
        self._before: dict[bool, tuple[int | None, str]] = {}  # after crashes, after commits: newest commit and cause
        self.folder: Path | None = None
        self.variables: dict[str, str] = {}  # for the ranks
        if limit:
            try:
                temporary = tempfile.TemporaryDirectory(prefix="keras_dist-", ignore_cleanup_errors=True)
            except OSError as error:
                raise ConfigurationError(
                    "There is no folder for temporary files, which --max-restarts needs.", f"{error.strerror or error}",
                    "Set TMPDIR to a folder that you may write to.",
                ) from error
            self.folder = Path(self.enter_context(temporary))
            self.variables = {environment.COMMITTED: str(self.folder / "step")}

    def starts_again(self, outcome: Outcome) -> bool:
        if outcome.is_final or not self._limit:
            return False
        text = ""
        with contextlib.suppress(OSError):  # the chief has written none
            text = Path(self.variables[environment.COMMITTED]).read_text()
        step = int(text) if text.isdecimal() else None
        is_crash = outcome.code != COMMITTED_EXIT_CODE
        before = self._before.get(is_crash)
        self._before[is_crash] = step, outcome.cause
        why_not = ""
        if before and before[0] == step:
            why_not = f"there is no new commit since the last start. The first cause: {before[1]}"
        elif self._used == self._limit:
            why_not = f"restart {self._used} of {self._limit} was the last. The cause: {outcome.cause}"
        if why_not:
            self._console.print(f"keras-dist: no restart: {why_not}")
            return False
        self._used += is_crash
        number = f" (restart {self._used} of {self._limit})" if is_crash else ""
        place = "where they began: there is no commit since" if step is None else f"the commit of step {step}"
        self._console.print(f"keras-dist: restarts all ranks{number}, from {place}.")
        return True


# The backends that can be launched here, in order of preference.
LAUNCHABLE = {name: entry.cluster for name, entry in BACKENDS.items() if entry.cluster is not None}
# Those whose processes are all ranks; the others are parameter servers and their workers.
WITH_RANKS = [name for name, cluster in LAUNCHABLE.items() if not load(cluster).only_chief_runs]


def command_of(target: Sequence[str], python: str, *, is_module: bool) -> list[str]:
    """Returns the command for what the user wants to run, perhaps with a `--` before it; `[]` if there is nothing."""
    target = target[1:] if target[:1] == ["--"] else target
    if not target or not target[0]:
        return []
    before = [python, "-m"] if is_module else [python] if target[0].endswith(".py") else []
    return [*before, *target]


def make_cluster(backend: str, size: int, environ: Mapping[str, str], nodes: Sequence[Node] | None = None) -> Cluster:
    """Returns a new cluster for the ranks of a backend.

    The backend `"auto"` is the first that can be launched, Horovod, which is the fastest. `size` is the number of ranks
    of this node; with parameter servers, the number of workers. `nodes` are all nodes of the job, this one first.
    """
    name = next(iter(LAUNCHABLE)) if backend == "auto" else backend
    if name not in LAUNCHABLE:
        one_process = f"This one is a single process: kd.init({name!r}) in the script, and `python train.py`. "
        raise ConfigurationError(
            "This backend can't be launched.", f"backend={backend!r}",
            f"{one_process if name in BACKENDS else ''}To launch several, use one of: auto, {', '.join(LAUNCHABLE)}.",
        )
    cluster: Cluster = load(LAUNCHABLE[name])(size, environ, nodes)
    return cluster


def launch(here: LocalRanks, new_cluster: Callable[[], Cluster], max_restarts: int, commit_seconds: float) -> int:
    """Runs the ranks of a cluster until all have ended; for the main thread only.

    `new_cluster` returns the cluster of a start. `max_restarts` is how often all ranks are started again after a crash,
    as long as there are new commits.

    Returns 0 if all ranks ended with 0; else the code of the rank that failed first, or 128 + the signal that killed
    it; 128 + the signal that stopped the launcher; 75 if the ranks were asked to stop and have committed.
    """
    stop = on_stop_signals(lambda signum: here.events.put(Received(signum)), SENT_ON)
    with stop, Restarts(max_restarts, here.console) as restarts:
        here.variables, here.folder = restarts.variables, restarts.folder
        for number in itertools.count():
            with new_cluster() as cluster:
                outcome = Job(cluster, here, commit_seconds).run(number)
            if not restarts.starts_again(outcome):
                break
    return outcome.code
