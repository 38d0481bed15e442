"""The process that compiles, in the environment of the TPU compiler. It does one dry run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_dist.diagnostics.report import Report, target_of


def main(request: str, channel: int) -> None:
    """Does one dry run, and sends progress and result to the process that asked for it, as lines of JSON."""
    from keras_dist.errors import DistributionError

    with os.fdopen(channel, "w") as out:

        def send(event: str, **values: Any) -> None:
            out.write(json.dumps({"event": event, **values}) + "\n")
            out.flush()

        try:
            for report in _reports(json.loads(request), send):
                send("report", report=dataclasses.asdict(report))
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


def _reports(request: dict[str, Any], send: Any) -> Iterator[Report]:
    send("progress", what="starting TensorFlow", seconds=None)
    from keras_dist.compat import tpu_emulation
    from keras_dist.diagnostics import captured
    from keras_dist.diagnostics.check import DryRun

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
    cache = captured.Cache(Path(request["cache"]) if request["cache"] else None)
    yield from DryRun(strategy, found, target, start_task, cache).reports(batch, request["trials"])


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
    return Captured(model, specs)
