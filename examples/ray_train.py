"""Training under Ray Train, on two workers that Ray starts: `python examples/ray_train.py`.

Ray sets `TF_CONFIG` for each worker, so `kd.init()` needs nothing else. If a worker is lost, Ray starts all of them
again, and `Commit` lets `fit` resume at the next batch. On several machines the storage must be a folder, or a mount,
that all of them share.
"""

import argparse
import os
import tempfile
from typing import Any

import ray.train
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, Any]) -> None:
    """Runs on each worker."""
    import keras
    import keras_dist as kd
    from sklearn.datasets import load_digits

    kd.init()
    keras.utils.set_random_seed(1)

    class Report(keras.callbacks.Callback):
        """Sends the logs of an epoch to Ray. All workers must report, and do it after the same epoch."""

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            ray.train.report({"epoch": epoch, **(logs or {})})

    images, labels = load_digits(return_X_y=True)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    model = kd.distribute(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    commit = kd.callbacks.Commit(config["commits"], every=10)
    callbacks = [Report(), commit]
    history = model.fit(images / 16, labels, batch_size=64, epochs=5, verbose=0, callbacks=callbacks).history
    with tempfile.TemporaryDirectory() as folder:
        model.save(os.path.join(folder, "digits.keras"))  # on all workers: the chief writes
        checkpoint = ray.train.Checkpoint.from_directory(folder) if kd.is_chief() else None
        ray.train.report({name: values[-1] for name, values in history.items()}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", default="runs/ray", help="a folder that all machines share (runs/ray)")
    storage = os.path.abspath(parser.parse_args().storage)
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"commits": os.path.join(storage, "digits", "commits")},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="digits", storage_path=storage, failure_config=ray.train.FailureConfig(max_failures=2)
        ),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.6f}, accuracy {result.metrics['accuracy']:.4f}: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
