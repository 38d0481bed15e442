"""The process that compiles, in the environment of the TPU compiler. It does one dry run."""

from __future__ import annotations

import json
import os
import pickle
import traceback
from pathlib import Path
from typing import Any


def main(request: str, channel: int) -> None:
    """Does one dry run, and sends progress and result to the process that asked for it, as lines of JSON.

    Args:
        request: JSON, from `process.py`.
        channel: The file descriptor to write them to.
    """
    from keras_dist.errors import DistributionError

    with os.fdopen(channel, "w") as out:

        def send(event: str, **values: Any) -> None:
            out.write(json.dumps({"event": event, **values}) + "\n")
            out.flush()

        try:
            send("report", report=_dry_run(json.loads(request), send))
        except DistributionError as error:
            send("error", problem=error.problem, received=error.received, remedy=error.remedy)
        except Exception as error:
            traceback.print_exc()
            send(
                "error",
                problem="The step can't be traced for a TPU.",
                received=f"{type(error).__name__}: {error}",
                remedy="The traceback above shows where. Plain Keras must be able to trace it without `run_eagerly`.",
            )


def _dry_run(request: dict[str, Any], send: Any) -> dict[str, Any]:
    send("progress", what="starting TensorFlow", seconds=None)
    from keras_dist.compat import tpu_emulation
    from keras_dist.diagnostics import captured
    from keras_dist.diagnostics.check import CompilerCache, DryRun
    from keras_dist.diagnostics.targets import target_of

    target = target_of(request["target"])
    strategy = tpu_emulation.emulated_strategy(target.replicas)

    def start_task(what: str, seconds: float | None) -> None:
        send("progress", what=what, seconds=seconds)

    if request["script"]:
        start_task("running the script up to `fit`", None)
        found = captured.run(Path(request["script"]), request["arguments"], strategy)
    else:
        found = _load(request, strategy)
    batch = request["batch"] or captured.batch_of(found.specs)
    cache = CompilerCache(Path(request["cache"]) if request["cache"] else None)
    run = DryRun(strategy, found.model, found.specs, target, start_task, cache)
    report = run.run(batch, request["trials"])
    for spec in found.varying:
        report.forbidden.append(_varying(spec, request["script"]))
    return report.as_json()


def _load(request: dict[str, Any], strategy: Any) -> Any:
    """Loads a model and the specification of a batch from files."""
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
            "The model can't be loaded in the process of the dry run.",
            str(error).splitlines()[0],
            "Put its custom classes into a module that can be imported, registered with "
            "@keras.saving.register_keras_serializable(), or use `keras-dist dry-run train.py`.",
        ) from error
    return Captured(model, specs, [])


def _varying(spec: str, script: str) -> dict[str, Any]:
    return {
        "op": "input", "layer": "", "file": script, "line": 0,
        "why": f"the data have no fixed shape, {spec}: pad each example in the dataset (`padded_batch`)",
    }  # fmt: skip
