"""Which rank broke the job, and how to say so."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from keras_dist.launch.output import RankOutput
from keras_dist.launch.processes import Ended

# What a rank prints that fails only because another one is gone.
_LOST_PEER = (
    "PeerLostError",
    "Horovod has been shut down",
    "HorovodInternalError",
    "Collective ops is aborted by",
    "gloo/transport/",  # where its connection errors come from; the script's own are no sign
)
_TAIL_LINES = 40


def lost_peer(text: str) -> bool:
    """True if the rank that wrote this did not fail by itself."""
    return any(mark in text for mark in _LOST_PEER)


def first_cause(ended: Sequence[Ended], is_victim: Callable[[Ended], bool]) -> Ended | None:
    """Returns the end that made all others fail, `None` if none failed.

    Args:
        ended: The ends of the ranks, in order, without those that the launcher brought about.
        is_victim: Whether a rank that failed did so only because another one was gone.

    Returns:
        The first rank that failed by itself; else, if some rank did not find its peer, the first one that
        left with code 0; else the first one that failed.
    """
    failed = [end for end in ended if end.code != 0]
    if not failed:
        return None
    own_failures = [end for end in failed if not is_victim(end)]
    left_early = [end for end in ended if end.code == 0]
    return (own_failures or left_early or failed)[0]


def exit_code(cause: Ended, ended: Sequence[Ended]) -> int:
    """Returns the exit code of the launcher, as a shell would give it, never 0."""
    code = cause.code or next(end.code for end in ended if end.code != 0)
    return code if code > 0 else 128 - code


def describe(cause: Ended, ended: Sequence[Ended], outputs: Sequence[RankOutput], size: int) -> str:
    """Returns the message whose last line names the cause, after what the user has not seen of it yet."""
    # A rank that left early has nothing to tell; the one that missed it knows in which call.
    teller = cause.rank if cause.code else next(end.rank for end in ended if end.code != 0)
    quoted = [] if outputs[teller].is_shown else _quote(teller, outputs[teller])
    log = outputs[cause.rank].log
    sentences = [
        f"keras-dist: rank {cause.rank} {_manner(cause.code)}.",
        *(["All ranks have ended."] if size > 1 else []),
        *([f"Its whole output: {log}"] if log else []),
    ]
    return "\n".join([*quoted, " ".join(sentences)])


def describe_helper(end: Ended, outputs: Sequence[RankOutput]) -> str:
    """Returns the message about a worker or server that was lost while the coordinator goes on."""
    quoted = [] if outputs[end.rank].is_shown or end.code < 0 else _quote(end.rank, outputs[end.rank])
    return "\n".join([*quoted, f"keras-dist: rank {end.rank} {_manner(end.code)}. Rank 0, the coordinator, goes on."])


def _manner(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (not by you? Then by the kernel, out of memory: see `dmesg`)"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code == 0:
        return "exited (code 0) while others still needed it: all ranks must make the same calls"
    return f"exited with code {code}"


def _quote(rank: int, output: RankOutput) -> list[str]:
    return [f"[{rank}] {line}".rstrip() for line in output.tail.lines(_TAIL_LINES)]


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
