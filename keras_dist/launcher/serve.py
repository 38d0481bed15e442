"""`keras-dist serve`: a worker or a server of a standing cluster, for one coordinator after another."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import ParameterServerCluster
from keras_dist.launcher.processes import on_stop_signals, signal_session, start_process

ROLES = ("worker", "ps")
CLUSTER_FILE = "cluster.json"
_POLL_SECONDS = 0.1
_PROGRAM = "import sys; from keras_dist.backends.parameter_server.cluster import serve_task; serve_task(*sys.argv[1:])"
EXAMPLES = """\
examples:
  keras-dist serve --role worker --index 0 --cluster cluster.json    one process of a cluster
  keras-dist run --workers 2 --ps 1 --serve                          a whole cluster on this machine

cluster.json has the address of each process, and of the coordinator, the notebook or script that trains:

  {"chief": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223"], "ps": ["127.0.0.1:2224"]}

The coordinator calls kd.init(kd.ParameterServer(cluster="cluster.json")). After it has ended, a new process waits for
the next coordinator. The output of each process is also in a log beside the file, such as cluster.worker-0.log. The
coordinator shows what is added to the logs on its machine. TensorFlow's servers ask for no password: anyone who can
reach their ports can run code as you. Addresses of 127.0.0.1 can be reached from this machine only; protect others with
a firewall or a Kubernetes NetworkPolicy.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("--role", required=True, choices=ROLES, help="the role of this process")
    parser.add_argument("--index", required=True, type=int, metavar="I", help="its index within the role, from 0")
    parser.add_argument("--cluster", required=True, metavar="FILE", help="JSON file with all addresses")


def main(args: argparse.Namespace) -> int:
    try:
        jobs: dict[str, list[str]] = json.loads(Path(args.cluster).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "The file with the addresses of the cluster can't be read.", f"{args.cluster} ({error})", "See --help."
        ) from error
    tasks = jobs.get(args.role, [])
    if not 0 <= args.index < len(tasks):
        raise ConfigurationError(
            "The cluster has no such process.",
            f"--role {args.role} --index {args.index}, in a cluster with {len(tasks)} {args.role!r}",
            "Count from 0, or add its address to the file.",
        )
    return _supervise([(args.role, args.index)], args.cluster, environment.current())


def serve_all(workers: int, servers: int, path: str, environ: Mapping[str, str]) -> int:
    """Runs a whole standing cluster on this machine until a signal to stop. Writes its addresses to a new file."""
    with ParameterServerCluster(workers, environ, servers=servers) as cluster:
        jobs = cluster.jobs
    addresses = json.dumps(jobs) + "\n"
    try:
        with open(path, "x") as file:
            file.write(addresses)
    except OSError as error:
        raise ConfigurationError(
            "A new file for the addresses of the cluster can't be made.", f"{path}: {error.strerror}",
            "If no cluster uses the one that exists, delete it: one that was killed leaves it behind. Or name another "
            "file after `--serve`.",
        ) from error
    print(
        f"keras-dist: workers: {workers}, servers: {servers}; their addresses are in {path}. In the notebook:\n"
        f"  kd.init(kd.ParameterServer(cluster={os.path.abspath(path)!r}))\nCtrl-C ends the cluster.",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    tasks = [(role, index) for role in ROLES for index in range(len(jobs[role]))]
    try:
        return _supervise(tasks, path, environ)
    finally:
        with contextlib.suppress(OSError):
            if Path(path).read_text() == addresses:  # but not a file that another cluster has written meanwhile
                os.remove(path)


def _supervise(tasks: Sequence[tuple[str, int]], path: str, environ: Mapping[str, str]) -> int:
    """Keeps a process running for each task: a new one for each coordinator, so that no state is left.

    Returns 128 + the signal to stop, or the code of a process that can't serve.
    """
    environ = {environment.TENSORFLOW_LOG_LEVEL: "1", **environ}  # otherwise TensorFlow's notes would fill the notebook
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    received: list[int] = []
    with on_stop_signals(received.append):
        try:
            while not received:
                for task in tasks:
                    code = running[task].poll() if task in running else 0
                    if code is not None and code > 0:
                        return code
                    if code is not None:
                        command = [sys.executable, "-c", _PROGRAM, path, task[0], str(task[1])]
                        running[task] = start_process(command, environ, stdin=subprocess.DEVNULL)
                time.sleep(_POLL_SECONDS)
            return 128 + received[0]
        finally:
            for process in running.values():  # they have nothing to save
                signal_session(process, signal.SIGKILL)
                process.wait()
