"""Random scripts that crash at random batches, and start again: `make test-random` compares them with one process."""

import random
from typing import Any

import keras
import numpy as np

import keras_dist as kd
from tests.contract.harness import Numbers, plain, same
from tests.contract.parts import Distribute
from tests.contract.random_programs import Program
from tests.contract.test_files import Crash, Crashing

STARTS = 4  # of a script: the last one is not interrupted


def run_resumed(seed: int, distribute: Distribute) -> tuple[Numbers, str]:
    """Returns the numbers of two calls of `fit`, in one process at once, else after crashes; and what was chosen."""
    choices, crashes = random.Random(seed), list[Any]()
    if distribute is same:
        return script(seed, distribute, Crashing(0))
    for _ in range(STARTS - 1):
        crashing = Crashing(choices.randint(1, 20))
        crashes.append((every := choices.choice((1, 2, 3, "epoch")), crashing.left))
        try:
            script(seed, distribute, crashing, every)
        except Crash:
            continue
        break
    numbers, chosen = script(seed, distribute, Crashing(0), 2)
    return numbers, f"{chosen}, committed every, and crashed after: {crashes}"


def script(seed: int, distribute: Distribute, crashing: Crashing, every: Any = 1) -> tuple[Numbers, str]:
    """The script, started once. It crashes only with a positive number of batches."""
    keras.backend.clear_session()  # in another process a layer would have the same name again
    program, results = Program(seed), {}
    program.begin(distribute)
    for number in range(2):
        more = [] if distribute is same else [kd.callbacks.Commit(f"commits-{number}", every), crashing]
        history, _ = program.fit(*more)
        results[f"fit {number}"] = [history, program.distributed.get_weights()]
        results[f"evaluate {number}"] = program.evaluate()
        action = program.random.choice([program.compile, program.freeze, program.perturb])
        program.chosen.setdefault("actions", []).append(action.__name__)
        action()
    if not program.accumulates and program.step != "two optimizers":  # see `Program.run`
        results["optimizer"] = [np.asarray(variable) for variable in program.distributed.optimizer.variables]
    return {name: plain(value) for name, value in results.items()}, str(program.chosen)
