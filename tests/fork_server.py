"""Starts real processes in a moment: imports TensorFlow once, then forks for each script that it is asked to run.

    python fork_server.py

Each line of its input is a JSON object with a `number`, and is answered by a line: `{"number": ..., "answer": ...}`.
`{"run": [script, argument, ...], "environ": {...}, "folder": working directory, "output": file, "errors": file}` starts
a process, and is answered by its PID; `{"ended": PID}` by its exit code, or `null`. When its input ends, it kills what
still runs.
"""

import contextlib
import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import traceback
from typing import NoReturn

import keras  # noqa: F401
import tensorflow  # noqa: F401

from keras_dist.backends.parameter_server import backend, cluster  # noqa: F401

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run(command: list[str], environ: dict[str, str], folder: str, output: str, errors: str) -> NoReturn:
    """Becomes the process that was asked for, and ends as any other does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for path, number in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    code = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def exit_code(pid: int) -> int | None:
    """Returns how a process ended, as `subprocess` would, `None` if it still runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    gc.collect()
    gc.freeze()  # so that a search for garbage does not copy what all share
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "run" in order:
            pid = os.fork()
            if not pid:
                run(order["run"], order["environ"], order["folder"], order["output"], order["errors"])
            codes[pid], answer = None, pid
        else:
            pid = order["ended"]
            codes[pid] = answer = exit_code(pid) if codes[pid] is None else codes[pid]
        print(json.dumps({"number": order["number"], "answer": answer}), flush=True)
    for pid in [pid for pid, code in codes.items() if code is None]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


main()
