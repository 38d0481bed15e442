"""Trains a small network on handwritten digits with Keras: a few seconds on a CPU.

`digits.py` is plain Keras. `digits_distributed.py` is the same script, distributed.
"""

import argparse
import time
from pathlib import Path

import keras
import tensorflow as tf

from digits_dataset import CLASSES, load


def build_model(image_shape: tuple[int, ...]) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="the global batch size")
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits", help="mnist is downloaded")
    parser.add_argument("--data-dir", type=Path, default="runs/data", help="where the dataset is kept")
    parser.add_argument("--output", type=Path, default="runs/digits", help="folder for all output")
    parser.add_argument("--seed", type=int, help="makes runs repeatable")
    args = parser.parse_args()
    if args.seed is not None:
        keras.utils.set_random_seed(args.seed)

    train, validation, test = load(args.dataset, args.data_dir)
    train = train.cache().shuffle(10_000).batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
    validation, test = (data.batch(args.batch_size).cache() for data in (validation, test))

    model = build_model(train.element_spec[0].shape[1:])
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    args.output.mkdir(parents=True, exist_ok=True)
    callbacks = [
        keras.callbacks.ModelCheckpoint(args.output / "best.keras", "val_accuracy", save_best_only=True),
        keras.callbacks.TensorBoard(args.output / "tensorboard" / time.strftime("%Y%m%d-%H%M%S")),
        keras.callbacks.CSVLogger(args.output / "history.csv"),
    ]
    model.fit(train, validation_data=validation, epochs=args.epochs, callbacks=callbacks, verbose=2)
    model.save(args.output / "model.keras")

    _, accuracy = model.evaluate(test, verbose=0)
    print(f"test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
