"""A tiny program that becomes another one, which the kernel kills as soon as its parent is gone.

    python die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

A launcher ended by SIGKILL can clean up nothing, so each rank asks the kernel to do it (Linux's
`PR_SET_PDEATHSIG`, which survives `exec`). A `preexec_fn` could ask too, but runs Python between fork and exec,
where a thread of the parent (TensorFlow's, the rendezvous server's) may hold a lock for ever. This costs some
20 ms a rank instead, all ranks at once.

The kernel watches the *thread* that started the process: start ranks from a thread that lives as long as they may.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def wrap(command: list[str]) -> list[str]:
    """Returns the command that runs `command` as a child that dies with this process.

    Args:
        command: The program and its arguments.

    Example:

    >>> subprocess.Popen(wrap([sys.executable, "train.py"]), start_new_session=True)
    """
    # -I and -S: neither the user's PYTHON* variables nor site-packages concern this program; the variables
    # stay in the environment for the command itself.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent went before the kernel was asked
        sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"keras-dist: can't run {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
