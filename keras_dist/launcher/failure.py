"""Which rank failed first, and the message about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from keras_dist.environment import COMMITTED_EXIT_CODE
from keras_dist.launcher.output import RankOutput
from keras_dist.launcher.processes import Ended

# What a rank prints that fails only because another one has gone.
_LOST_PEER = (
    "PeerLostError",
    "Horovod has been shut down",
    "HorovodInternalError",
    "Collective ops is aborted by",
    "gloo/transport/",  # marks Gloo's connection errors; those of the script prove nothing
)
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

    Args:
        ended: The ends of the ranks, in order, without those caused by the launcher.
        lost_its_peer: Whether a failed rank failed only because another one had gone.
        named_failed: The rank that a failed one names as failed, if it names one.

    Returns:
        The first rank that failed by itself; else the one that another rank names; else, if some rank lost its peer,
        the first one that left with code 0; else the first one that failed.
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


def describe(cause: Ended, ended: Sequence[Ended], outputs: Sequence[RankOutput], size: int) -> str:
    """Returns the message about the cause. Its last line names the rank, after output that was not shown yet."""
    # The output of a rank that left early shows nothing; a rank that lost it shows in which call.
    quoted_rank = cause.rank if cause.code else next(end.rank for end in ended if end.code != 0)
    who, *where = _sentences(cause, outputs)
    sentences = [f"keras-dist: {who}", *(["All ranks have ended."] if size > 1 else []), *where]
    return "\n".join([*_quote(quoted_rank, outputs), " ".join(sentences)])


def cause_of(end: Ended, outputs: Sequence[RankOutput]) -> str:
    """Returns which rank ended, how, and where its output is."""
    return " ".join(_sentences(end, outputs))


def _sentences(end: Ended, outputs: Sequence[RankOutput]) -> list[str]:
    output = outputs[end.rank]
    return [f"rank {end.rank}{output.place} {output.fate or _manner(end.code)}.", *_where_its_output_is(output)]


def _where_its_output_is(output: RankOutput) -> list[str]:
    if output.log is None:
        return []
    if output.log_error:
        return [f"The beginning of its output: {output.log} ({output.log_error})"]
    return [f"Its whole output: {output.log}"]


def describe_helper(end: Ended, outputs: Sequence[RankOutput]) -> str:
    """Returns the message about a worker or server that was lost while the coordinator continues."""
    quoted = _quote(end.rank, outputs) if end.code > 0 else []
    message = f"keras-dist: rank {end.rank} {_manner(end.code)}. Rank 0, the coordinator, continues."
    return "\n".join([*quoted, message])


def describe_commit(first: Ended, stopped_by: str | None) -> str:
    """Returns the message about ranks that were asked to stop, and have committed.

    Args:
        first: The rank that ended first.
        stopped_by: The name of the signal that the launcher received, if it was the launcher that was asked.
    """
    who = f"rank {first.rank} {_manner(first.code)}." if stopped_by is None else f"stopped by {stopped_by}."
    return f"{who} Training was committed: the same command goes on."


def _manner(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (if not by you, then by the kernel, out of memory: see `dmesg`)"
    if code == -signal.SIGSTOP:
        return "was stopped (SIGSTOP, or a debugger), so the other ranks got no answer from it"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code == COMMITTED_EXIT_CODE:
        return f"was asked to stop (exit code {code})"
    if code == 0:
        return "exited (code 0) while others still needed it: all ranks must make the same calls"
    return f"exited with code {code}"


def _quote(rank: int, outputs: Sequence[RankOutput]) -> list[str]:
    """Returns the last lines of a rank's output, unless the user has seen them."""
    output, seen = outputs[rank], [other.tail.lines(_SAME_LINES) for other in outputs if other.is_shown]
    if output.is_shown or not output.tail.text() or output.tail.lines(_SAME_LINES) in seen:
        return []
    return [f"[{rank}] {line}".rstrip() for line in output.tail.lines(_TAIL_LINES)]


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
