"""Several promised cases in one training: `make test` tries these instead of each by itself.

If one fails, `make test-full` says which of its parts it is.
"""

import csv

import keras
import numpy as np
import tensorflow as tf

from tests.contract.harness import NOT_TPU, Numbers, contract
from tests.contract.parts import (
    BATCH,
    COUNT,
    FEATURES,
    Distribute,
    compiled,
    evaluated,
    files,
    fitted,
    numbers,
    of_words,
    predictions,
    stack,
)
from tests.contract.test_callbacks import WithRate, events, only_the_chief_shows_progress, with_bars
from tests.contract.test_losses import ActivityRegularization, Penalized, weights
from tests.contract.test_models import Parts, Smoothed, Watched


@contract("together-losses", of=NOT_TPU)
def test_losses(distribute: Distribute) -> Numbers:
    inputs = keras.Input([FEATURES])
    penalized = ActivityRegularization()(Penalized(4, "tanh")(inputs))
    hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(penalized)
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in "abcd"})
    losses = {
        "a": keras.losses.MeanSquaredError(reduction="sum"),
        "b": keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
        "c": lambda y, prediction: tf.reduce_mean(tf.abs(y - prediction)),
        "d": "mse",
    }
    options = {"loss_weights": {"a": 0.05, "b": 2.0, "c": 1.0, "d": 0.5}, "metrics": {"d": "mae"}}
    model = compiled(distribute, keras.optimizers.SGD(0.05), losses, model, **options)
    x, y = numbers()
    data = x, {"a": y, "b": -y, "c": 2 * y, "d": y**2}
    weight = {"a": weights(), "b": weights()[::-1].copy(), "c": np.ones(COUNT), "d": weights()}
    result = fitted(model, *data, batch_size=BATCH, sample_weight=weight)
    evaluation = model.evaluate(*data, batch_size=BATCH, sample_weight=weight, verbose=0, return_dict=True)
    return {**result, "evaluation": evaluation, "predictions": predictions(model, x)}


@contract("together-metrics", of=NOT_TPU)
def test_metrics(distribute: Distribute) -> Numbers:
    model = stack(Watched(3), keras.layers.Dense(1, "sigmoid"))
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"]
    metrics += [Smoothed(), Parts(name="parts")]
    model = compiled(distribute, loss="binary_crossentropy", model=model, metrics=metrics, weighted_metrics=["mae"])
    x, y = numbers()
    data, weight = (x, (y > 0).astype("float64")), {"sample_weight": weights()}
    result = fitted(model, *data, validation_data=(x[:9], data[1][:9]), **weight)
    return {**result, "evaluation": evaluated(model, *data, return_dict=True, **weight)}


@contract("callbacks", sizes=(3,), verify=only_the_chief_shows_progress)
def test_callbacks(distribute: Distribute) -> Numbers:
    """Files of the chief alone, decisions of all ranks, a bar that ends with the metrics of all. What a callback that
    writes leaves behind, all ranks have.
    """
    stopping = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)
    callbacks = [
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.ModelCheckpoint("epoch-{epoch}.keras"),
        board := WithRate("logs", write_graph=False),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.5),
        stopping,
    ]
    model = compiled(distribute, keras.optimizers.SGD(0.1), metrics=["mae"], steps_per_execution=1)
    result = with_bars(model, epochs=5, validation_data=numbers(9), callbacks=callbacks)
    assert [name for name in files() if not name.startswith("logs")] == [
        "epoch-1.keras", "epoch-2.keras", "epoch-3.keras", "log.csv",
    ]  # fmt: skip
    with open("log.csv") as file:
        written = [float(row["loss"]) for row in csv.DictReader(file)]
    loaded = keras.models.load_model("epoch-3.keras")
    saved = {"weights": loaded.get_weights(), "steps": loaded.optimizer.iterations}
    told = {"stopped": stopping.stopped_epoch, "rate": model.optimizer.learning_rate, "written": written}
    told["epochs"] = board.epochs
    return {**result, **told, "saved": saved, "events": events("logs")}


@contract("together-data", of=NOT_TPU)
def test_data(distribute: Distribute) -> Numbers:
    x, y = numbers()
    words = np.array(["a", "b", "c", "d", "e"])[np.arange(COUNT) * 3 % 5]
    model = compiled(distribute, model=of_words(["a", "b", "c"]), weighted_metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices(({"x": x, "word": words}, y, weights()))
    validation = data.take(13).batch(5)
    result = fitted(model, data.shuffle(COUNT).batch(BATCH).prefetch(2), epochs=4, validation_data=validation,
                    validation_freq=2)  # fmt: skip
    return {**result, "evaluation": model.evaluate(validation, verbose=0)}
