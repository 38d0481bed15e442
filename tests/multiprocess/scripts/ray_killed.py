"""The example of Ray Train on two nodes of one CPU each, whose second worker fails, once.

    python ray_killed.py STORAGE STEP kill|raise
"""

import functools
import json
import os
import signal
import sys
from typing import Any

import ray
import ray.train
import ray_train  # of examples/
from ray.cluster_utils import Cluster
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, Any]) -> None:
    """The training of the example, with another callback."""
    import keras

    import keras_dist as kd

    class Killed(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            if kd.rank() == 1 and self.step == config["step"] and not os.path.exists(config["killed"]):
                open(config["killed"], "x").close()
                if config["raises"]:
                    raise ValueError("a worker that raises")
                os.kill(os.getpid(), signal.SIGKILL)

    plain = keras.Model.fit

    @functools.wraps(plain)
    def fit(*args: Any, callbacks: Any, **kwargs: Any) -> Any:
        return plain(*args, callbacks=[*callbacks, Killed()], **kwargs)

    keras.Model.fit = fit
    ray_train.train(config)


if __name__ == "__main__":
    storage, step, how = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=True)
    config = {"commits": f"{storage}/commits", "killed": f"{storage}/killed", "step": int(step)}
    trainer = TensorflowTrainer(
        train,
        train_loop_config={**config, "raises": how == "raise"},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(
            name="digits", storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    print("found:" + json.dumps(trainer.fit().metrics))
    ray.shutdown()
    cluster.shutdown()
