"""Which rank failed first, and the message about it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from keras_dist.launch.output import RankOutput
from keras_dist.launch.processes import Ended

# What a rank prints that fails only because another one has gone.
_LOST_PEER = (
    "PeerLostError",
    "Horovod has been shut down",
    "HorovodInternalError",
    "Collective ops is aborted by",
    "gloo/transport/",  # marks Gloo's connection errors; those of the script prove nothing
)
_TAIL_LINES = 40


def lost_peer(text: str) -> bool:
    """True if the output of a rank shows that another rank failed first."""
    return any(mark in text for mark in _LOST_PEER)


def first_cause(ended: Sequence[Ended], lost_its_peer: Callable[[Ended], bool]) -> Ended | None:
    """Returns the end that made all others fail, `None` if none failed.

    Args:
        ended: The ends of the ranks, in order, without those caused by the launcher.
        lost_its_peer: Whether a failed rank failed only because another one had gone.

    Returns:
        The first rank that failed by itself; else, if some rank lost its peer, the first one that left with
        code 0; else the first one that failed.
    """
    failed = [end for end in ended if end.code != 0]
    if not failed:
        return None
    failed_by_themselves = [end for end in failed if not lost_its_peer(end)]
    left_early = [end for end in ended if end.code == 0]
    return (failed_by_themselves or left_early or failed)[0]


def exit_code(cause: Ended, ended: Sequence[Ended]) -> int:
    """Returns the exit code of the launcher, as a shell would give it, never 0."""
    code = cause.code or next(end.code for end in ended if end.code != 0)
    return code if code > 0 else 128 - code


def describe(cause: Ended, ended: Sequence[Ended], outputs: Sequence[RankOutput], size: int) -> str:
    """Returns the message about the cause. Its last line names the rank, after output that was not shown yet."""
    # The output of a rank that left early shows nothing; a rank that lost it shows in which call.
    quoted_rank = cause.rank if cause.code else next(end.rank for end in ended if end.code != 0)
    sentences = [
        f"keras-dist: rank {cause.rank} {_manner(cause.code)}.",
        *(["All ranks have ended."] if size > 1 else []),
        *_where_its_output_is(outputs[cause.rank]),
    ]
    return "\n".join([*_quote(quoted_rank, outputs), " ".join(sentences)])


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


def _manner(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (if not by you, then by the kernel, out of memory: see `dmesg`)"
    if code == -signal.SIGSTOP:
        return "was stopped (SIGSTOP, or a debugger), so the other ranks got no answer from it"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code == 0:
        return "exited (code 0) while others still needed it: all ranks must make the same calls"
    return f"exited with code {code}"


def _quote(rank: int, outputs: Sequence[RankOutput]) -> list[str]:
    """Returns the last lines of a rank's output, unless the user has seen them."""
    output = outputs[rank]
    return [] if output.is_shown else [f"[{rank}] {line}".rstrip() for line in output.tail.lines(_TAIL_LINES)]


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
