"""A script of the two lines on Horovod's own workers under Ray: `python ray_horovod.py SCRIPT`."""

import json
import runpy
import sys
from typing import Any

import ray
from horovod.ray import RayExecutor


def train(path: str) -> dict[str, Any]:
    import keras_dist as kd

    history: dict[str, Any] = runpy.run_path(path)["history"]
    return {"size": kd.size(), "loss": history["loss"][-1], "accuracy": history["accuracy"][-1]}


if __name__ == "__main__":
    ray.init(num_cpus=2)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()
    print("found:" + json.dumps(executor.run(train, args=[sys.argv[1]])))
    executor.shutdown()
