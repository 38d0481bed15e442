"""Trains a model whose tables stay in the memory of the host, while every GPU of this machine computes.

The data are synthetic: users and items with hidden tastes, and how much a user likes an item. To try it without GPUs,
use CPU devices:

    python examples/large_tables.py --devices CPU:1 CPU:2
"""

import argparse

import keras
import keras_dist as kd
import numpy as np

TASTES = 4


def ratings(users: int, items: int, count: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    random = np.random.default_rng(1)
    user, item = random.integers(users, size=count), random.integers(items, size=count)
    liking = np.sum(random.normal(size=(users, TASTES))[user] * random.normal(size=(items, TASTES))[item], axis=1)
    return (user.astype("int32"), item.astype("int32")), liking.astype("float32")


def build_model(users: int, items: int, width: int) -> keras.Model:
    inputs = [keras.Input([], dtype="int32", name=name) for name in ("user", "item")]
    tables = [keras.layers.Embedding(n, width, name=f"table_{i}") for i, n in enumerate((users, items))]
    vectors = [table(one) for table, one in zip(tables, inputs, strict=True)]
    return keras.Model(inputs, keras.ops.sum(keras.layers.multiply(vectors), axis=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep the tables on the host, compute on every device.")
    parser.add_argument("--devices", nargs="+", metavar="NAME", help="the devices that compute (default: all GPUs)")
    parser.add_argument("--users", type=int, default=2_000)
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--width", type=int, default=8, help="of the tables")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    keras.utils.set_random_seed(1)
    kd.init(kd.CentralStorage(compute_devices=args.devices))

    x, y = ratings(args.users, args.items, 40 * args.users)
    model = kd.distribute(build_model(args.users, args.items, args.width))
    for variable in model.variables:
        print(f"{variable.path}: {variable.value.device.rpartition('device:')[2]}")
    model.compile(keras.optimizers.Adam(0.02), "mse")
    history = model.fit(x, y, batch_size=1024, epochs=args.epochs, validation_split=0.1, verbose=2).history
    print(f"loss: {history['loss'][-1]:.4f}, validation loss: {history['val_loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
