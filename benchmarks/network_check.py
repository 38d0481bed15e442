"""Does the cost model hold? Horovod's all-reduce and steps on 2 to 8 ranks, over links of a bandwidth that is set.

    sudo python benchmarks/network_check.py            # about 5 minutes; needs root, ip and tc (Debian: iproute2)
    sudo python benchmarks/network_check.py --quick    # shows only that it works

Each rank is in a network namespace of its own. A virtual Ethernet cable leads to a bridge, and `tc` (tbf) limits what
the rank sends. Latency and bandwidth are fitted to sums over two ranks; everything else is predicted from them. The
latency is that of this machine: it is not set, since many kernels lack netem.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contestants
import cost_model
import models
import report
from contestants import Case, Sum
from cost_model import Link
from processes import Processes
from runner import ONE_THREAD, PATIENCE, ROOT, ROUND_SECONDS, progress, where

PAGE = ROOT / "docs" / "benchmarks.md"
RANKS, MEGABITS, SIZES = (2, 4, 8), (200, 1000), (1.0, 8.0)
SMALLEST, LARGEST = 1 / 1024, 4.0  # megabytes, of the sums by which latency and bandwidth are found
SUBNET, BRIDGE = "10.77.0", "kdbench"
STEP = Case(models.MLP, 1, 2)


def main() -> int:
    args = parse()
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        sys.exit(f"This needs root, ip and tc. Received: user {os.geteuid()}, without {missing or 'none of them'}")
    os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2", **PATIENCE)
    load, rounds = os.getloadavg()[0], args.rounds or (2 if args.quick else 7)
    ranks, megabits = ((2, 4), MEGABITS[-1:]) if args.quick else (RANKS, MEGABITS)
    computed = {count: compute_seconds(count, rounds) for count in ranks}
    rows: list[tuple[str, float, float]] = []
    try:
        for rate in megabits:
            rows += checked(rate, ranks, computed, rounds)
    except KeyboardInterrupt:
        print("Stopped. What was measured is shown.", file=sys.stderr)
    text = f"{table(rows)}\n\n{where(load)}"
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "table.md").write_text(text + "\n")
    print(text)
    if args.docs:
        PAGE.write_text(report.replaced(PAGE.read_text(), text, *report.markers("network check")))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of each measurement (default: 7, with --quick 2)")
    parser.add_argument("--quick", action="store_true", help="few rounds and links: not to be quoted")
    parser.add_argument("--output", type=Path, default=Path("runs/network_check"), help="folder (default: %(default)s)")
    parser.add_argument("--docs", action="store_true", help="also write the table in docs/")
    args = parser.parse_args()
    if args.docs and (args.quick or args.rounds):
        parser.error("--docs needs the whole run: no --quick, no --rounds.")
    return args


def table(rows: list[tuple[str, float, float]]) -> str:
    lines = ["| | Measured over predicted |", "|---|:---:|"]
    return "\n".join([*lines, *(f"| {name} | {seconds / predicted:.2f} |" for name, seconds, predicted in rows)])


def checked(rate: int, ranks: tuple[int, ...], computed: dict[int, float], rounds: int) -> Iterator[Any]:
    """Yields what was measured and predicted over links of a rate, in megabits per second."""
    link = None
    for count in ranks:
        with progress(f"{count} ranks, {rate} Mbit/s"), network(count, rate) as names, horovod(names) as processes:
            if link is None:
                latency = seconds_of(processes, Sum(SMALLEST, 20), rounds) / 2
                large = seconds_of(processes, Sum(LARGEST, 1), rounds) - 2 * latency
                link = Link(latency, LARGEST * 2**20 / large)
            for size in SIZES:
                predicted = cost_model.ring(count, size * 2**20, link)
                yield title(count, rate, f"{size:g} MB"), seconds_of(processes, Sum(size, 2), rounds), predicted
            # The loop sums all gradients when the last one is there, so nothing goes on meanwhile.
            model = cost_model.Model(computed[count], 4 * models.WEIGHTS[STEP.model])
            predicted = cost_model.step(model, cost_model.ring(count, model.size, link), 0.0)
            yield title(count, rate, f"a step of the {STEP.model}"), seconds_of(processes, STEP, rounds), predicted


def title(count: int, rate: int, what: str) -> str:
    return f"{count} ranks, {rate} Mbit/s: {what}"


def seconds_of(processes: Processes, job: Case | Sum, rounds: int, contestant: str = "horovod_loop") -> float:
    """Returns the median of the seconds of one sum or step on the slowest rank."""
    processes.run(contestants.build, contestant, job, timeout=ROUND_SECONDS)
    each = job.times if isinstance(job, Sum) else job.executions * job.steps_per_execution
    found = []
    for _ in range(rounds):
        results = processes.run(contestants.time_round, contestant, job, timeout=ROUND_SECONDS)
        found.append(max(seconds for seconds, _ in results) / each)
    return statistics.median(found)


def compute_seconds(count: int, rounds: int) -> float:
    """Returns the seconds of a step in as many processes that don't talk: they share the cores of this machine."""
    with progress(f"{count} processes that don't talk"), Processes([dict(os.environ)] * count) as processes:
        return seconds_of(processes, STEP, rounds, "plain_keras")


@contextlib.contextmanager
def network(count: int, megabits: int) -> Iterator[list[str]]:
    """Makes namespaces, each with a cable to a bridge, of a limited rate. Returns their names, and removes all."""
    names = [f"{BRIDGE}{index}" for index in range(count)]
    try:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for index, name in enumerate(names):
            run("ip", "netns", "add", name)
            # Its end is called eth0; the other one, at the bridge, has the name of the namespace.
            run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", name, "master", BRIDGE, "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{index + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            limit = ["rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms"]
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def horovod(names: list[str]) -> Processes:
    """Returns processes that have called `hvd.init()`, each in its namespace, as on a host of its own."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments([HostInfo(name, 1) for name in names], len(names)))
    same = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"{SUBNET}.254",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_SIZE": str(len(names)),
        "HOROVOD_CROSS_SIZE": str(len(names)),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
    }
    environments = [
        {**os.environ, **same, "HOROVOD_RANK": str(rank), "HOROVOD_CROSS_RANK": str(rank), "HOROVOD_HOSTNAME": name}
        for rank, name in enumerate(names)
    ]
    prefix = [["ip", "netns", "exec", name] for name in names]
    return Processes(environments, "contestants.horovod_loop", close=server.stop, prefix=prefix)


if __name__ == "__main__":
    sys.exit(main())
