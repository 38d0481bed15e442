"""A tiny program that becomes another one, which the kernel kills as soon as its parent has ended.

    python die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

A launcher that is killed by SIGKILL can't clean up, so each rank asks the kernel to do it (Linux's
`PR_SET_PDEATHSIG`, which survives `exec`). A `preexec_fn` could ask too, but it runs Python between fork and exec,
where a lock that another thread of the parent holds is never released. This program costs about 20 ms instead, in all
ranks at the same time.

The kernel watches the *thread* that started the process: start ranks from a thread that lives as long as they do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def wrap(command: list[str]) -> list[str]:
    """Returns the command that runs `command` as a child that dies with this process."""
    # With -I and -S this program ignores the user's PYTHON* variables and site-packages; the command still gets the
    # variables.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"keras-dist: can't run {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
