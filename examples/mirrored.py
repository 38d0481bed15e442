"""Trains on all GPUs of this machine in one process, without a launcher.

To try it without GPUs, use CPU devices:

    python examples/mirrored.py --devices CPU:0 CPU:1
"""

import argparse
from pathlib import Path

import keras
import keras_dist as kd

from digits_dataset import load
from digits_distributed import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on several devices of this machine in one process.")
    parser.add_argument("--devices", nargs="+", metavar="NAME", help="such as GPU:0 GPU:1 (default: all GPUs)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="the global batch size")
    parser.add_argument("--data-dir", type=Path, default="runs/data", help="where the dataset is kept")
    args = parser.parse_args()
    keras.utils.set_random_seed(1)
    kd.init(kd.Mirrored(devices=args.devices))
    print(f"{kd.num_replicas()} devices")

    train, validation, _ = (data.batch(args.batch_size) for data in load("digits", args.data_dir))
    model = kd.distribute(build_model(train.element_spec[0].shape[1:]))
    model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(train, validation_data=validation, epochs=args.epochs, verbose=2).history
    print(f"loss: {history['loss'][-1]:.4f}, validation accuracy: {history['val_accuracy'][-1]:.4f}")


if __name__ == "__main__":
    main()
