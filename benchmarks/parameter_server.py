"""Parameter servers: steps per second with more workers, and the memory of the coordinator.

    python benchmarks/parameter_server.py            # some 20 minutes on idle cores
    python benchmarks/parameter_server.py --quick    # shows only that it works

Steps: the same model on the same batches of 64, in both modes, with 1, 2 and 4 workers and a server; fed by the
coordinator, or read by the workers (`kd.shard(function)`). The tables show the steps per second divided by those of one
worker that is fed in the same mode, and these divided by plain Keras in one process: more is better. In "sync" a step
is one batch that all workers share; in "async" it is a whole batch on one worker. More workers help only if each has
its own core and if a step is more work than sending it: use a machine with 6 cores or more. `bench.py` has a comparison
with a hand-written `ClusterCoordinator` loop.

All processes stay alive and are idle while it is another one's turn. They are not stopped as in the other benchmarks: a
TensorFlow server is slow for seconds after it was stopped. They take turns in a random order, so what disturbs the
machine disturbs all. Absolute times depend on the machine and are not shown.

Memory: the peak size of the coordinator's process after training on data of one size, of 4 times and of 16 times that
size. It should grow with arrays, which are held whole, and not with data that is streamed or read by the workers.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import ps_contestants as contestants
import report
from ps_contestants import MLP, MODES, SOURCES, TABLE, WAYS, Case
from report import Comparison
from runner import ONE_THREAD, ROOT, ROUND_SECONDS, TIMES, parsed, parser_of, progress, save

from keras_dist.testing import WorkerPool

BEGIN, END = "<!-- parameter_server benchmark: begin -->", "<!-- parameter_server benchmark: end -->"
PAGE = ROOT / "docs" / "parameter_servers.md"
MEMORY = "memory.json"
WORKERS = (1, 2, 4)
FACTORS = (1, 4, 16)
STEPS, QUICK_STEPS = 40, 8
MEGABYTES, QUICK_MEGABYTES = 16, 2


def main() -> None:
    args = parse()
    if not args.render:
        load = os.getloadavg()[0]
        os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2")
        args.output.mkdir(parents=True, exist_ok=True)
        if "memory" in args.only:
            sizes = memory(QUICK_MEGABYTES if args.quick else MEGABYTES)
            (args.output / MEMORY).write_text(json.dumps(sizes, indent=1) + "\n")
        comparisons: list[Comparison] = []
        for model in (TABLE, MLP) if "steps" in args.only else ():
            comparisons += compared(model, args.workers, QUICK_STEPS if args.quick else STEPS, args.rounds)
            save(comparisons, load, args.output)
    write(args.output, args.docs)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "runs/parameter_server")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="how many, 1 first (default: 1 2 4)")
    parser.add_argument("--only", choices=["steps", "memory"], action="append", help="can be repeated (default: both)")
    args = parsed(parser)
    if args.workers[0] != 1:
        parser.error(f"--workers must begin with 1, which all are compared with. Received: {args.workers}")
    if args.docs and (args.quick or args.only or args.rounds < 15 or tuple(args.workers) != WORKERS):
        parser.error("--docs needs the whole run: no --quick, no --only, 15 rounds or more, 1 2 4 workers.")
    args.only = args.only or ["steps", "memory"]
    return args


# --- Steps per second ---


def compared(model: str, workers: Sequence[int], steps: int, rounds: int) -> Iterator[Comparison]:
    """Times one model with all numbers of workers, in both modes, fed both ways."""
    with progress(f"{model}, {rounds} rounds"):
        times = timed(model, workers, steps, rounds)
    for mode in MODES:
        fed = Case(mode, WAYS[0], 1)
        first = times[fed]
        # Steps per second are as the inverse of the times.
        yield Comparison(f"{model}: over plain Keras in one process", f"{mode}, {title(fed)}", times[PLAIN], first)
        for case in cases(workers):
            if case.mode == mode and case != fed:
                yield Comparison(group(model, mode), title(case), first, times[case])


PLAIN = Case("plain", WAYS[0], 0)


def group(model: str, mode: str) -> str:
    return f"{model}, {mode}: over 1 worker that is fed"


def cases(workers: Sequence[int]) -> list[Case]:
    return [Case(mode, way, count) for mode in MODES for way in WAYS for count in workers]


def title(case: Case) -> str:
    return f"{case.workers} worker{'s' * (case.workers > 1)}, {case.way}"


def timed(model: str, workers: Sequence[int], steps: int, rounds: int) -> dict[Case, list[float]]:
    """Returns the seconds of each round, by case."""
    order, times = random.Random(0), {case: [] for case in [PLAIN, *cases(workers)]}
    with contextlib.ExitStack() as stack:
        pools = {count: stack.enter_context(WorkerPool(count, "parameter_server")) for count in workers}
        pools[0] = stack.enter_context(WorkerPool(1, "serial"))
        for case in times:  # traces and warms up
            pools[case.workers].run(contestants.time_fit, model, case, steps, timeout=ROUND_SECONDS)
        for _ in range(rounds):
            losses = {}
            for case in order.sample(list(times), len(times)):
                pool = pools[case.workers]
                ((seconds, loss),) = pool.run(contestants.time_fit, model, case, steps, timeout=ROUND_SECONDS)
                times[case].append(seconds)
                if case.mode != "async":
                    losses[str(case)] = loss
            contestants.check_alike(losses)
    return times


# --- Memory ---


def memory(megabytes: int) -> dict[str, list[int]]:
    """Returns the largest sizes of the coordinator's process, in MB, after data of each size; by source."""
    sizes = {}
    with tempfile.TemporaryDirectory(prefix="keras_dist-benchmark-") as folder:
        for source in SOURCES:
            with progress(f"memory: {source}"), WorkerPool(2, "parameter_server") as pool:
                (sizes[source],) = pool.run(
                    contestants.peaks, source, megabytes, FACTORS, folder, timeout=ROUND_SECONDS
                )
    return sizes


def memory_table(sizes: dict[str, list[int]]) -> str:
    header = " | ".join(f"{factor}×" for factor in FACTORS)
    lines = [f"| Peak of the coordinator, MB, by size of the data | {header} |", "|---|" + ":---:|" * len(FACTORS)]
    lines += [f"| {source} | {' | '.join(str(size) for size in peaks)} |" for source, peaks in sizes.items()]
    return "\n".join(lines)


# --- What comes out ---


def write(output: Path, to_docs: bool) -> None:
    """Makes the tables of what was saved, in their folder, and in docs/ if asked to."""
    parts = []
    if (output / TIMES).exists():
        times = json.loads((output / TIMES).read_text())
        table = report.table([Comparison(**each) for each in times["comparisons"]])
        parts += [table.replace("Time over the rival's", "Steps per second, ratio"), times["where"]]
    if (output / MEMORY).exists():
        parts.append(memory_table(json.loads((output / MEMORY).read_text())))
    text = "\n\n".join(parts)
    print(text)
    (output / "table.md").write_text(text + "\n")
    if to_docs:
        PAGE.write_text(report.replaced(PAGE.read_text(), text, BEGIN, END))


if __name__ == "__main__":
    sys.exit(main())
