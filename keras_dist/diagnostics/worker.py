"""The process that compiles: in the check's own environment, told by a request what to do. Ends with it."""

from __future__ import annotations

import json
import os
import pickle
import traceback
from pathlib import Path
from typing import Any


def main(request: str, channel: int) -> None:
    """Does one dry run, and tells the process that has asked what comes of it, one line of JSON each time.

    Args:
        request: JSON, from `process.py`.
        channel: The file descriptor to tell it by.
    """
    from keras_dist.errors import DistributionError

    with os.fdopen(channel, "w") as out:

        def say(event: str, **values: Any) -> None:
            out.write(json.dumps({"event": event, **values}) + "\n")
            out.flush()

        try:
            say("report", report=_dry_run(json.loads(request), say))
        except DistributionError as error:
            say("error", problem=error.problem, received=error.received, remedy=error.remedy)
        except Exception as error:
            traceback.print_exc()
            say(
                "error",
                problem="The step can't be traced for a TPU.",
                received=f"{type(error).__name__}: {error}",
                remedy="The traceback above shows where. What plain Keras can trace without `run_eagerly` goes.",
            )


def _dry_run(request: dict[str, Any], say: Any) -> dict[str, Any]:
    say("progress", what="starting TensorFlow", seconds=None)
    from keras_dist.compat import tpu_compiler
    from keras_dist.diagnostics import captured
    from keras_dist.diagnostics.check import Answers, DryRun
    from keras_dist.diagnostics.targets import target_of

    target = target_of(request["target"])
    strategy = tpu_compiler.emulated_strategy(target.replicas)

    def tell(what: str, seconds: float | None) -> None:
        say("progress", what=what, seconds=seconds)

    if request["script"]:
        tell("running the script up to `fit`", None)
        found = captured.run(Path(request["script"]), request["arguments"], strategy)
    else:
        found = _load(request, strategy)
    batch = request["batch"] or captured.batch_of(found.specs)
    answers = Answers(Path(request["answers"]) if request["answers"] else None)
    run = DryRun(strategy, found.model, found.specs, target, tell, answers)
    report = run.run(batch, request["trials"])
    for spec in found.varying:
        report.forbidden.append(_varying(spec, request["script"]))
    return report.as_json()


def _load(request: dict[str, Any], strategy: Any) -> Any:
    """Takes a model and the specification of a batch from files, where a running process has put them."""
    import keras
    import tensorflow as tf

    from keras_dist.diagnostics.captured import Captured
    from keras_dist.errors import ConfigurationError

    shapes = pickle.loads(Path(request["specs"]).read_bytes())
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), shapes)
    try:
        with strategy.scope():
            model = keras.saving.load_model(request["model"])
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "The model can't be rebuilt in the process of the dry run.",
            str(error).splitlines()[0],
            "Put its own classes into a module that can be imported, registered with "
            "@keras.saving.register_keras_serializable(), or use `keras-dist dry-run train.py`.",
        ) from error
    return Captured(model, specs, [])


def _varying(spec: str, script: str) -> dict[str, Any]:
    return {
        "op": "input", "layer": "", "file": script, "line": 0,
        "why": f"the data have no fixed shape, {spec}: pad each example in the data set (`padded_batch`)",
    }  # fmt: skip
