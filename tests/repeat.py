"""Runs tests again and again, each round with another seed: `python -m tests.repeat ROUNDS [pytest arguments]`.

Faults happen at random moments, so once is no proof. Stops at the first failure, and says how to repeat it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

FAULTS = ["tests/multiprocess/test_parameter_server_faults.py", "-m", ""]


def main(rounds: int, arguments: list[str]) -> int:
    first = int(os.environ.get("FAULT_SEED") or random.SystemRandom().randrange(10**6))
    began = time.monotonic()
    for number in range(rounds):
        seed, start = first + number, time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *(arguments or FAULTS)]
        environ = {**os.environ, "FAULT_SEED": str(seed)}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        took, all_took = time.monotonic() - start, time.monotonic() - began
        if done.returncode:
            print(done.stdout)
            print(f"round {number + 1} of {rounds} failed after {took:.0f} s: make repeat N=1 SEED={seed}")
            return done.returncode
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
        print(f"round {number + 1} of {rounds}, seed {seed}: {last}; {all_took:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
