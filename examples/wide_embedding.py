"""Trains a wide model on a log of clicks, with the large table split over parameter servers.

    python examples/wide_embedding.py                               # one process
    keras-dist run --workers 2 --ps 2 examples/wide_embedding.py    # a coordinator, 2 workers, 2 servers

The log is synthetic. Each column is a category (a user, an advertisement, a site), and each category has a hidden
weight. The probability of a click depends on the sum of these weights and on two numbers. So the best possible AUC is
known, and the script prints it beside the AUC that it reached. `--dataset FOLDER` reads your own log: CSV files with a
header and the same columns (`--write FOLDER` writes the synthetic one as an example).

The categories of all columns are hashed into one table, of which a batch needs few rows. Each worker reads its own part
of the files (`kd.shard`); the coordinator feeds the synthetic log.
"""

import argparse
from pathlib import Path

import keras
import keras_dist as kd
import numpy as np
import tensorflow as tf

COLUMNS = {"user": 2_000, "advertisement": 500, "site": 200}  # the number of categories of each
NUMBERS = ["hour", "price"]
FIELDS = [*COLUMNS, *NUMBERS, "click"]


def click_log(count: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns the columns, the clicks, and the probability of each click."""
    hidden, random = np.random.default_rng(1), np.random.default_rng(seed)
    weights = {name: hidden.normal(size=kinds) for name, kinds in COLUMNS.items()}
    kinds = {name: random.integers(kinds, size=count) for name, kinds in COLUMNS.items()}
    numbers = {name: random.normal(size=count).astype("float32") for name in NUMBERS}
    logit = sum(weights[name][kinds[name]] for name in COLUMNS) + 0.5 * numbers["hour"] - 0.5 * numbers["price"]
    probability = 1 / (1 + np.exp(-logit))
    words = {name: np.char.add(name, kinds[name].astype(str)) for name in COLUMNS}
    return {**words, **numbers}, (random.random(count) < probability).astype("float32"), probability


def rows_of(columns: dict[str, tf.Tensor], rows: int) -> dict[str, tf.Tensor]:
    """Returns the inputs of the model: the row of the table for each category, and the numbers."""
    places = [tf.strings.to_hash_bucket_fast(columns[name], rows) for name in COLUMNS]
    numbers = [tf.cast(columns[name], tf.float32) for name in NUMBERS]
    return {"rows": tf.stack(places, axis=-1), "numbers": tf.stack(numbers, axis=-1)}


def from_log(seed: int, count: int, rows: int, batch: int) -> tf.data.Dataset:
    columns, clicks, _ = click_log(count, seed)
    data = tf.data.Dataset.from_tensor_slices((columns, clicks)).shuffle(count)
    return data.batch(batch).map(lambda x, y: (rows_of(x, rows), y))


def from_files(folder: Path, part: str, rows: int, batch: int):
    """Returns data of which each worker reads its own part of the lines."""
    files = sorted(str(path) for path in folder.glob(f"{part}-*.csv"))
    defaults = [""] * len(COLUMNS) + [0.0] * (len(NUMBERS) + 1)

    def read(context: tf.distribute.InputContext) -> tf.data.Dataset:
        lines = tf.data.Dataset.from_tensor_slices(files).flat_map(lambda file: tf.data.TextLineDataset(file).skip(1))
        own = lines.shard(context.num_input_pipelines, context.input_pipeline_id).shuffle(10_000)
        return own.batch(context.get_per_replica_batch_size(batch)).map(parsed)

    def parsed(lines: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        *columns, clicks = tf.io.decode_csv(lines, defaults)
        return rows_of(dict(zip(FIELDS[:-1], columns, strict=True)), rows), clicks

    return kd.shard(read)


def write(folder: Path, part: str, seed: int, count: int, files: int = 4) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    columns, clicks, _ = click_log(count, seed)
    table = np.stack([*columns.values(), clicks.astype(int)], axis=1)
    for index, lines in enumerate(np.array_split(table, files)):
        text = "\n".join(",".join(line) for line in [FIELDS, *lines])
        (folder / f"{part}-{index}.csv").write_text(text + "\n")


def build_model(rows: int, width: int) -> keras.Model:
    places = keras.Input([len(COLUMNS)], dtype="int64", name="rows")
    numbers = keras.Input([len(NUMBERS)], name="numbers")
    # Wide: the sum of one weight for each category. Deep: a vector for each category, through a small network.
    wide = keras.layers.Flatten()(kd.layers.ShardedEmbedding(rows, 1, "zeros", name="wide")(places))
    deep = keras.layers.Flatten()(kd.layers.ShardedEmbedding(rows, width, name="deep")(places))
    deep = keras.layers.Dense(16, activation="relu")(keras.layers.Concatenate()([deep, numbers]))
    outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()([wide, numbers, deep]))
    return keras.Model({"rows": places, "numbers": numbers}, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, metavar="FOLDER", help="read train-*.csv and test-*.csv")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the synthetic log there, and end")
    parser.add_argument("--examples", type=int, default=40_000, help="size of the synthetic log (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="columns of the table (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--mode", choices=["sync", "async"], help="of parameter servers (default: sync)")
    args = parser.parse_args()
    if args.write:
        write(args.write, "train", 2, args.examples)
        write(args.write, "test", 3, args.examples // 4)
        return
    kd.init(kd.ParameterServer(mode=args.mode) if args.mode else "auto")
    keras.utils.set_random_seed(1)

    model = kd.distribute(build_model(args.rows, args.width))
    model.compile(keras.optimizers.Adam(0.005), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
    if args.dataset:
        train, test = (from_files(args.dataset, part, args.rows, args.batch) for part in ("train", "test"))
    else:
        train = from_log(2, args.examples, args.rows, args.batch)
        test = from_log(3, args.examples // 4, args.rows, args.batch)
    model.fit(train, epochs=args.epochs, verbose=2)
    result = model.evaluate(test, verbose=0, return_dict=True)
    if not args.dataset:
        _, clicks, probability = click_log(args.examples // 4, 3)
        print(f"best possible AUC: {float(keras.metrics.AUC()(clicks, probability)):.4f}")
    print(f"test loss: {result['loss']:.4f}, AUC: {result['auc']:.4f}")


if __name__ == "__main__":
    main()
