"""Random scripts that crash at random batches, and start again: `make test-random` compares them with one process."""

import random
from typing import Any

import keras

import keras_dist as kd
from keras_dist.training import resuming
from tests.contract.harness import Numbers, plain, same
from tests.contract.parts import Distribute
from tests.contract.random_programs import Program
from tests.contract.test_files import Crash

STARTS = 4  # of a script: the last one is not interrupted


def run_resumed(seed: int, distribute: Distribute, replicas: int) -> tuple[Numbers, str]:
    """Returns the numbers of two calls of `fit`, in one process at once, else after crashes; and what was chosen."""
    choices, crashes = random.Random(seed), list[Any]()
    if distribute is same:
        return script(seed, replicas, distribute, [[], []])
    for start in range(STARTS):
        every, left = choices.choice((1, 2, 3, "epoch")), choices.randint(1, 20) if start < STARTS - 1 else 0
        crashes.append((every, left))
        commits = [kd.callbacks.Commit(f"commits-{number}", every) for number in range(2)]
        resuming._complete.clear()  # in another process nothing would have ended
        try:
            crashing = [[commit, crash_after(left)] for commit in commits]
            numbers, chosen = script(seed, replicas, distribute, crashing)
        except Crash:
            continue
        return numbers, f"{chosen}, committed every, crashed after: {crashes}"
    raise AssertionError("the last start has crashed")


def crash_after(batches: int) -> keras.callbacks.Callback:
    """Returns a callback that raises; its count is no state of a run, and is not committed."""
    left = [batches]

    def crash(batch: int, logs: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Crash

    return keras.callbacks.LambdaCallback(on_train_batch_end=crash)


def script(
    seed: int, replicas: int, distribute: Distribute, callbacks: list[list[Any]]
) -> tuple[Numbers, str]:
    """The script, started once, with these callbacks in its two calls of `fit`."""
    keras.backend.clear_session()  # in another process a layer would have the same name again
    program, results = Program(seed, replicas), {}
    program.begin(distribute)
    for number, more in enumerate(callbacks):
        history, _ = program.fit(*more)
        results[f"fit {number}"] = [history, program.distributed.get_weights()]
        results[f"evaluate {number}"] = program.evaluate()
        action = program.random.choice([program.compile, program.freeze, program.perturb])
        program.chosen.setdefault("actions", []).append(action.__name__)
        action()
    results["optimizer"] = program.optimizer_variables()
    return {name: plain(value) for name, value in results.items()}, str(program.chosen)
