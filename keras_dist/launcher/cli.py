"""`keras-dist run`: the launcher's command line."""

import argparse
import functools
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import Cluster, ParameterServerCluster
from keras_dist.launcher.job import COMMIT_SECONDS, LAUNCHABLE, command_of, launch, make_cluster
from keras_dist.launcher.joining import Nodes, follow, own_address, parse_hosts, started
from keras_dist.launcher.nodes import Place, address_of, free_ports, told_by
from keras_dist.launcher.output import CHIEF, MODES
from keras_dist.launcher.processes import LocalRanks, inherited, on_stop_signals
from keras_dist.launcher.serve import CLUSTER_FILE, serve_all

EXAMPLES = """\
examples:
  keras-dist run -np 4 train.py --epochs 10      4 processes of a script, with its own arguments
  keras-dist run -np 4 -m project.train          a module
  keras-dist run -np 2 -- python -X dev train.py any other program
  keras-dist run --workers 4 --ps 2 train.py     parameter servers: one coordinator, 4 workers, 2 servers
  keras-dist run --workers 2 --ps 1 --serve      a cluster for notebooks, with its addresses in cluster.json
  keras-dist run -np 2 --output all train.py     shows the output of all ranks, each line with its rank
  keras-dist run -np 2 --log-dir logs train.py   writes the whole output of each rank to logs/rank-0.log, ...
  keras-dist run -np 4 --max-restarts 3 train.py resumes from the last commit after a crash, at most three times
  keras-dist run -H a:4,b:4 train.py             4 processes on each of the hosts a and b, over ssh
  keras-dist run --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 -np 4 train.py
                                                 4 processes on each of 2 machines: the same line on the other one,
                                                 with --node-rank 1. 10.0.0.1 is node 0
  keras-dist run --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 --workers 4 --ps 2 train.py
                                                 parameter servers: all 7 processes, spread over the 2 machines
  srun --ntasks=8 keras-dist run train.py        under Slurm: each task is a rank

Several machines need a secret, the same in KERAS_DIST_SECRET on each (docs/clusters.md).

Options come before the script; everything after it goes to the script. The exit code is 0 if all ranks succeeded,
else that of the rank that failed first (128 + the signal, if a signal killed it). It is 75 if SIGTERM asked the ranks
to stop and they have committed: the same command resumes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "keras-dist run -np N [options] (script.py | -m module | -- program) [arguments]"
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("-np", "--num-processes", metavar="N", help="number of processes (ranks)")
    add("--nnodes", metavar="N", help="number of machines (nodes); -np is the number of processes of this one")
    add("--node-rank", metavar="I", help="index of this node, from 0; its ranks come in this order")
    add("--rendezvous", metavar="HOST:PORT", help="where node 0 listens for the launchers of the others")
    add("--interface", metavar="NAME", help="network interface of this node (default: the one that leads to node 0)")
    add("-H", "--hosts", metavar="HOST:N,...", help="start N ranks on each of these hosts, over ssh, instead of -np")
    add("--ssh", default="ssh", metavar="COMMAND", help="the ssh command with its options (default: nodes)")
    add("--workers", metavar="N", help="parameter servers: number of workers, instead of -np")
    add("--ps", metavar="N", help="parameter servers: number of servers (default: 1)")
    add("--serve", action="store_true", help="parameter servers: keep them running, for notebooks; without a script")
    backends = "{" + ",".join(["auto", *LAUNCHABLE]) + "}"
    add("--backend", default="auto", metavar=backends, help="how the ranks communicate (default: auto)")
    output = "whose output is shown: that of rank 0 (default), or of all ranks, each line with its rank"
    add("--output", default=CHIEF, choices=MODES, help=output)
    add(
        "--log-dir", metavar="DIR",
        help="write the whole output of each rank to DIR/rank-N.log; rank 0 then does not write to the terminal "
        "itself, so Keras does not update its progress bar in place",
    )  # fmt: skip
    add(
        "--max-restarts", default="0", metavar="N",
        help="start all ranks again after a crash, at most N times (default: 0); a script with kd.callbacks.Commit "
        "resumes from its last commit. Stops if there is no new commit between two crashes. The logs of a restart are "
        "rank-0.restart-1.log, ...",
    )  # fmt: skip
    add(
        "--grace", default=f"{COMMIT_SECONDS:g}", metavar="SECONDS",
        help=f"how long ranks that handle SIGTERM may take to commit and end after it (default: {COMMIT_SECONDS:g}); "
        "less than the scheduler waits before it kills",
    )  # fmt: skip
    add("-m", dest="module", action="store_true", help="run a module, as `python -m` does; comes last")
    # Takes everything that follows, even if it looks like an option.
    add("target", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    environ = environment.current()
    if args.hosts is None:
        for option, value in told_by(environ).items():
            if getattr(args, option) is None and not (option == "num_processes" and args.workers is not None):
                setattr(args, option, value)
    args.max_restarts, args.grace = _integer(args.max_restarts, "--max-restarts", 0), _grace(args.grace)
    place = None if args.hosts is not None else _place(args, environ)
    is_alone = place is None and args.hosts is None
    served = _parameter_servers(args, is_alone)
    if served is not None and args.serve:
        if not is_alone:
            raise ConfigurationError(
                "--serve starts a cluster on one machine only.", "--serve, and several nodes",
                "On several, start `keras-dist serve` for each worker and server (docs/parameter_servers.md).",
            )
        return serve_all(*served, args.target[0] if args.target else CLUSTER_FILE, environ)
    command = _command(args.module, args.target, environ)
    here = LocalRanks(command, environ, args.output, None if args.log_dir is None else Path(args.log_dir))
    size = 0 if args.hosts is not None else _size(args, command, place, served)
    new_cluster: Callable[..., Cluster] = functools.partial(make_cluster, args.backend, size, environ)
    if served is not None:
        new_cluster = functools.partial(ParameterServerCluster, served[0], environ, servers=served[1])
    if args.hosts is not None:
        return _run_over_ssh(args, here, new_cluster)
    if place is None:
        return launch(here, new_cluster, args.max_restarts, args.grace)
    # While it waits for the other nodes: the kernel keeps from process 1 of a pod what it has no handler for.
    with on_stop_signals():
        if place.index == 0:
            return _lead(args, here, new_cluster, place, size)
        return follow(place, size, _backend(args), here)


def _lead(
    args: argparse.Namespace, here: LocalRanks, new_cluster: Callable[..., Cluster], place: Place, size: int,
    check: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    with Nodes(place, size, _backend(args), here) as nodes:
        nodes.wait_for_all(check)
        if args.hosts is None:  # else what the hosts show comes here, so they need not repeat this launcher's messages
            here.console.others += [functools.partial(node.channel.send, "show") for node in nodes.others]
        nodes.code = launch(here, functools.partial(new_cluster, nodes.all), args.max_restarts, args.grace)
    return nodes.code


def _run_over_ssh(args: argparse.Namespace, here: LocalRanks, new_cluster: Callable[..., Cluster]) -> int:
    others = {"-np": args.num_processes, "--nnodes": args.nnodes}
    if given := [name for name, value in others.items() if value is not None]:
        received = f"-H {args.hosts} with {', '.join(given)}"
        raise ConfigurationError("-H already sets the number of processes of each host.", received, "Leave them out.")
    if args.max_restarts:
        raise ConfigurationError(
            "--max-restarts needs rank 0 on this machine, to see its commits.",
            f"-H {args.hosts} --max-restarts {args.max_restarts}",
            "Start the launcher on each host with --nnodes, --node-rank and --rendezvous (docs/clusters.md).",
        )
    hosts = parse_hosts(args.hosts)
    address = own_address(hosts) if args.interface is None else address_of(args.interface)
    secret, (port,), count = secrets.token_hex(), free_ports(1), len(hosts) + 1
    shown = ["--backend", args.backend, "--output", args.output, *(["--log-dir", args.log_dir] if args.log_dir else [])]
    shown += ["--workers", args.workers, "--ps", args.ps or "1"] if args.workers else []
    target = [*(["-m"] if args.module else []), *args.target]

    def command(index: int, size: int) -> list[str]:
        place = ["--nnodes", str(count), "--node-rank", str(index), "--rendezvous", f"{address}:{port}"]
        return [sys.executable, "-m", "keras_dist", "run", *place, "-np", str(size), *shown, *target]

    with on_stop_signals(), started(hosts, command, secret, inherited(here.environ), args.ssh) as check:
        return _lead(args, here, new_cluster, Place(count, 0, address, port, secret), 0, check)


def _backend(args: argparse.Namespace) -> str:
    if args.workers is not None:
        return f"parameter_server (--workers {args.workers} --ps {args.ps or 1})"
    return next(iter(LAUNCHABLE)) if args.backend == "auto" else str(args.backend)


def _place(args: argparse.Namespace, environ: Mapping[str, str]) -> Place | None:
    """Returns where this node is among several, `None` if it is the only one."""
    options = {"--nnodes": args.nnodes, "--node-rank": args.node_rank, "--rendezvous": args.rendezvous}
    given = {name: value for name, value in options.items() if value}
    if given == {"--nnodes": "1"} or (not given and args.interface is None):
        return None
    host, _, port = (options["--rendezvous"] or "").rpartition(":")
    received = " ".join(f"{name} {value}" for name, value in given.items()) or f"--interface {args.interface}"
    remedy = "For example `keras-dist run --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 -np 4 train.py`."
    if len(given) < len(options):
        missing = ", ".join(name for name in options if name not in given)
        raise ConfigurationError(f"Several nodes also need {missing}.", received, remedy)
    if ":" in host:
        raise ConfigurationError("Addresses are IPv4.", received, "Give the IPv4 address of node 0, or its name.")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigurationError("--rendezvous must be the host of node 0, and a port.", received, remedy)
    count, index = _integer(given["--nnodes"], "--nnodes"), given["--node-rank"]
    if not (index.isdecimal() and int(index) < count):
        raise ConfigurationError("--node-rank must be an index, from 0 to --nnodes - 1.", received, remedy)
    if count == 1:
        return None
    secret = environ.get(environment.SECRET, "")
    has_munge = environment.is_slurm_task(environ) and not secret
    return Place(count, int(index), host, int(port), secret, args.interface, has_munge)


def _size(
    args: argparse.Namespace, command: Sequence[str], place: Place | None, served: tuple[int, int] | None
) -> int:
    """Returns the number of processes of this node. Without -np, those of parameter servers are spread evenly."""
    if args.num_processes is None and served is not None:
        total, (count, index) = 1 + sum(served), (1, 0) if place is None else (place.count, place.index)
        if total < count:
            received = f"{total} processes on {count} nodes"
            raise ConfigurationError("There are more nodes than processes.", received, "Use fewer nodes.")
        return total // count + (index < total % count)
    if args.num_processes is None:
        misplaced = any(word in ("-np", "--num-processes") for word in command)
        raise ConfigurationError(
            "The number of processes is missing.",
            f"-np after the script, as an argument of the script: {' '.join(command)}" if misplaced else "no -np",
            "Give it before the script: `keras-dist run -np 2 train.py`.",
        )
    return _integer(args.num_processes, "-np")


def _parameter_servers(args: argparse.Namespace, is_alone: bool) -> tuple[int, int] | None:
    """Returns the numbers of workers and servers. Several nodes may have -np, as the number of processes of each."""
    ranks = args.num_processes is not None and (is_alone or args.workers is None)
    if args.workers is None and args.ps is None and not args.serve and (is_alone or args.backend != "parameter_server"):
        return None
    if args.workers is None or ranks or args.backend not in ("auto", "parameter_server"):
        raise ConfigurationError(
            "Parameter servers need --workers, and optionally --ps, instead of -np.",
            f"--workers {args.workers}, --ps {args.ps}, -np {args.num_processes}, --backend {args.backend}",
            "For example `keras-dist run --workers 4 --ps 2 train.py`.",
        )
    return _integer(args.workers, "--workers"), _integer(args.ps or "1", "--ps")


def _integer(text: str, option: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        kind = "a positive integer" if least else "an integer from 0 on"
        remedy = f"Use `{option} {least}` or more."
        raise ConfigurationError(f"The number after {option} must be {kind}.", f"{option} {text}", remedy)
    return int(text)


def _grace(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        problem = "--grace must be a number of seconds, 0 or more."
        raise ConfigurationError(problem, f"--grace {text}", "Use for example `--grace 60`.")
    return float(text)


def _command(module: bool, target: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    command = command_of(target, sys.executable, is_module=module)
    if not command:
        raise ConfigurationError("There is nothing to run.", "no script", "Name one: `keras-dist run -np 2 train.py`.")
    if command[0] == sys.executable and command[1].endswith(".py") and not Path(command[1]).is_file():
        received = f"{command[1]} in {Path.cwd()}"
        raise ConfigurationError("The script was not found.", received, "Check its name and the folder.")
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise ConfigurationError(
            "The program was not found.", command[0],
            "Name a script that ends in .py, a module with `-m`, or a program on the PATH.",
        )
    return command
