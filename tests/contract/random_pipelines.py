"""Random stages of `tf.data`: `make test-random` compares what a small model learns from them with one process."""

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.contract.harness import Numbers, plain
from tests.contract.parts import Distribute
from tests.contract.test_loop import Loop

Dataset = tf.data.Dataset
Stage = Callable[[Dataset], Dataset]
Pick = Callable[..., Any]


def random_pipeline(dataset: Dataset, batch: int, pick: Pick, is_endless: bool = False) -> Dataset:
    """Returns a dataset of batches with random stages before and after `batch`.

    Data that are repeated have no seeded noise: what TensorFlow draws after `take` and `repeat` is not determined.

    Args:
        dataset: Single examples, tuples.
        batch: The size of a batch.
        pick: Takes what is chosen, and the options.
        is_endless: The dataset is repeated at the end.
    """
    elements, batches = of_elements(pick), of_batches(pick)
    left_out = "noise" if is_endless or pick("repeats", True, False) else "repeat"
    del elements[left_out], batches[left_out]
    for _ in range(pick("stages before", 0, 1, 2, 3)):
        dataset = elements[pick("stages", *elements)](dataset)
    dataset = batched(dataset, batch, pick)
    for _ in range(pick("stages after", 0, 0, 1, 2)):
        dataset = batches[pick("stages", *batches)](dataset)
    return dataset.repeat() if is_endless else dataset


def batched(dataset: Dataset, batch: int, pick: Pick) -> Dataset:
    drops = batch < 16 and pick("drops", True, False, False)
    ways: dict[str, Stage] = {
        "batch": lambda d: d.batch(batch, drops),
        "parallel batch": lambda d: d.batch(batch, drops, num_parallel_calls=2),
        "padded batch": lambda d: d.padded_batch(batch, drop_remainder=drops),
        "unequal batches": lambda d: d.batch(batch + 1, drops).concatenate(d.batch(batch)),
        "grouped": lambda d: indexed(d).group_by_window(
            lambda index, element: index % 2, lambda key, group: group.batch(batch), window_size=batch
        ).map(lambda index, element: element),
    }  # fmt: skip
    return ways[pick("batches", *["batch"] * 5, *ways)](dataset)


def indexed(dataset: Dataset) -> Dataset:
    """Returns pairs: an index, and an element."""
    return Dataset.zip((Dataset.range(10**6), dataset))


def scaled(*parts: Any) -> Any:
    x, *others = parts
    return tf.nest.map_structure(lambda a: a * 1.5 if a.dtype.is_floating else shifted(a, 1), x), *others


def shifted(a: Any, by: Any) -> Any:
    """Adds 0 or 1; to the number of a word -1, to a text a dot."""
    if a.dtype == tf.string:
        return tf.where(tf.equal(by, 1), a + ".", a)
    return a + tf.cast(by, a.dtype) if a.dtype.is_floating else tf.maximum(a - tf.cast(by, a.dtype), 0)


def noisy(*parts: Any) -> Any:
    """Draws with a seed: the same numbers in each process, if they are drawn for the same examples in order."""
    x, *others = parts
    return tf.nest.map_structure(lambda a: shifted(a, tf.random.uniform([], 0, 2, tf.int32, 3)), x), *others


def augmented(*parts: Any) -> Any:
    """Draws by `tf.random.stateless_uniform`, of a seed that depends on the example."""
    x, *others = parts
    numeric = next(leaf for leaf in tf.nest.flatten(parts) if leaf.dtype.is_floating or leaf.dtype.is_integer)
    seed = [7, tf.cast(tf.reduce_sum(tf.abs(numeric)) * 1000, tf.int32)]
    drawn = tf.random.stateless_uniform([], seed, 0, 2, tf.int32)
    return tf.nest.map_structure(lambda a: shifted(a, drawn), x), *others


def through_python(*parts: Any) -> Any:
    flat = tf.nest.flatten(parts)
    same = tf.numpy_function(lambda *arrays: arrays, flat, [part.dtype for part in flat])
    for new, old in zip(same, flat, strict=True):
        new.set_shape(old.shape)
    return tf.nest.pack_sequence_as(parts, same)


def of_elements(pick: Pick) -> dict[str, Stage]:
    def parallel() -> dict[str, Any]:
        return pick("parallel", {}, {"num_parallel_calls": 2}, {"num_parallel_calls": tf.data.AUTOTUNE})  # type: ignore[no-any-return]

    return {
        "shuffle": lambda d: d.shuffle(pick("buffer", 3, 100), 5, pick("reshuffles", True, False)),
        "map": lambda d: d.map(scaled, **parallel()),
        "noise": lambda d: d.map(noisy),
        "augmented": lambda d: d.map(augmented, **parallel()),
        "numpy": lambda d: d.map(through_python, **parallel()),
        "filter": lambda d: indexed(d).filter(lambda index, _: index % 3 != 1).map(lambda _, element: element),
        "cache": lambda d: d.cache(),
        "take": lambda d: d.take(20),
        "skip": lambda d: d.skip(2),
        "shard": lambda d: d.shard(2, 1),
        "repeat": lambda d: d.repeat(2),
        "prefetch": lambda d: d.prefetch(2),
        "concatenate": lambda d: d.concatenate(d.take(3)),
        "interleave": lambda d: Dataset.range(2).interleave(lambda part: d.shard(2, part), 2, 1, **parallel()),
        "flat map": lambda d: d.flat_map(lambda *element: Dataset.from_tensors(element).repeat(2)),
        "batch and unbatch": lambda d: d.batch(4).unbatch(),
        "scan": lambda d: d.scan(0, lambda state, element: (state + 1, element)),
        "sample": lambda d: Dataset.sample_from_datasets([d, d.map(scaled)], [0.4, 0.6], seed=3),
        "choose": lambda d: Dataset.choose_from_datasets([d, d.map(scaled)], Dataset.range(2).repeat()),
        "generator": lambda d: Dataset.from_generator(d.as_numpy_iterator, output_signature=d.element_spec),
        "zip": lambda d: Dataset.zip((d, Dataset.range(1000))).map(lambda element, _: element),
        "window": lambda d: d.window(4, 3).flat_map(lambda *parts: Dataset.zip(parts)),
        "take while": lambda d: indexed(d).take_while(lambda index, _: index < 15).map(lambda _, element: element),
        "options": lambda d: d.with_options(deterministic()),
    }  # fmt: skip


def of_batches(pick: Pick) -> dict[str, Stage]:
    kept = "shuffle", "map", "noise", "numpy", "cache", "skip", "repeat", "prefetch", "concatenate", "scan", "options"
    elements = of_elements(pick)
    return {
        **{name: elements[name] for name in kept},
        "take": lambda d: d.take(2),
        "rebatch": lambda d: d.rebatch(pick("rebatched", 2, 3, 5)),
        "unbatch and batch": lambda d: d.unbatch().batch(3),
        "filter": lambda d: indexed(d).filter(lambda index, _: index != 1).map(lambda _, element: element),
    }


def deterministic() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 1
    return options


def is_counted_once_more(dataset: Dataset | None) -> bool:
    """True for data of which plain Keras counts one more batch at the end, if it executes single steps.

    See https://github.com/keras-team/keras/issues/23084. On ranks the metrics are right.
    """
    if dataset is None or dataset.cardinality() != tf.data.UNKNOWN_CARDINALITY:
        return False
    return any(spec.shape[0] is not None for spec in tf.nest.flatten(dataset.element_spec))


def run_pipelines(seed: int, distribute: Distribute, replicas: int) -> tuple[Numbers, str]:
    """Returns the numbers of a small model with several pipelines, and what they are."""
    choices, chosen = random.Random(seed), list[Any]()
    numbers = np.random.RandomState(seed)
    keras.utils.set_random_seed(seed)

    def pick(what: str, *options: Any) -> Any:
        chosen.append((what, option := choices.choice(options)))
        return option

    def pipeline(is_endless: bool = False) -> Dataset:
        count = choices.randint(16, 40)
        x = numbers.normal(size=(count, 3))
        parts = (x, x.sum(1, keepdims=True)) + ((numbers.uniform(size=count),) if pick("weights", True, False) else ())
        return random_pipeline(Dataset.from_tensor_slices(parts), pick("batch", 1, 2, 3, 4, 8, 64), pick, is_endless)

    results: Numbers = {}
    for number in range(3):
        inputs = keras.Input([3])
        model = distribute(keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs))))
        is_endless = pick("endless", *[False] * 4, True)
        of_epoch = {"steps_per_epoch": pick("steps an epoch", 1, 2, 5)} if is_endless else {}
        data, held_out, of_loop = pipeline(is_endless), pipeline(), pipeline()
        validation = pipeline() if pick("validates", True, False) else None
        steps = (2, 3) if any(is_counted_once_more(each) for each in (data, validation, held_out)) else (1, 1, 3)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse", weighted_metrics=["mae"],
                      steps_per_execution=pick("steps", *steps))  # fmt: skip
        epochs = pick("epochs", 1, 2, 3)
        fitted = model.fit(data, epochs=epochs, verbose=0, validation_data=validation, **of_epoch)
        results[f"fit {number}"] = [fitted.history, model.get_weights()]
        results[f"evaluate {number}"] = model.evaluate(held_out, verbose=0)
        results[f"predict {number}"] = model.predict(held_out.map(lambda x, *_: x), verbose=0)
        loop = Loop(distribute, model=model)
        loop.optimizer.learning_rate = 0.003  # with large ones a loop diverges, and so does rounding
        results[f"loop {number}"] = loop.train(distribute, of_loop)
    return plain(results), str(chosen)
