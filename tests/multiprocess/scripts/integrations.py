"""KerasHub, KerasRS, scikit-learn's wrapper, mlflow and Orbax, as their guides use them, if they are installed."""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_dist as kd

WORDS = ["the", "a", "film", "was", "plot", "very", "good", "bad", "great", "boring", "fun", "awful", "actor", "scene"]
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def sentences(count: int = 44) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(0)
    texts = np.array([" ".join(random.choice(WORDS, random.randint(3, 8))) for _ in range(count)])
    return texts, np.array([int("good" in text or "fun" in text) for text in texts])


def numbers(model: Any, history: Any) -> dict[str, Any]:
    weights = [np.asarray(weight, np.float64) for weight in model.get_weights()]
    logs = {name: np.ravel(values).astype(float).tolist() for name, values in history.history.items()}
    return {"weights": [float(np.sum(np.cos(np.arange(each.size)) * each.ravel())) for each in weights], **logs}


def compiled(model: Any, rate: float, **options: Any) -> Any:
    """Returns a language model, distributed."""
    model = kd.distribute(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, **options)
    return model


def bert() -> Any:
    import keras_hub

    return keras_hub.models.BertBackbone(
        vocabulary_size=len(WORD_PIECES), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, dropout=0.0
    )


def text_classifier() -> dict[str, Any]:
    """It takes strings: the preprocessor is in `fit`."""
    import keras_hub

    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORD_PIECES, lowercase=True)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=10)
    model = keras_hub.models.BertTextClassifier(bert(), num_classes=2, preprocessor=preprocessor, dropout=0.0)
    model = compiled(model, 1e-3, metrics=["accuracy"])
    return numbers(model, model.fit(*sentences(), batch_size=12, epochs=2, verbose=0))


def masked_language_model() -> dict[str, Any]:
    import keras_hub

    model = keras_hub.models.BertMaskedLM(bert(), preprocessor=None)
    model = compiled(model, 1e-3, weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()])
    random = np.random.RandomState(1)
    x = {
        "token_ids": random.randint(5, len(WORD_PIECES), (44, 10)),
        "segment_ids": np.zeros((44, 10), int),
        "padding_mask": np.ones((44, 10), int),
        "mask_positions": random.randint(0, 10, (44, 3)),
    }
    y, weights = random.randint(5, len(WORD_PIECES), (44, 3)), random.randint(0, 2, (44, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(12)
    return numbers(model, model.fit(data, epochs=2, verbose=0))


def gpt() -> Any:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=20, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16, dropout=0.0
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def trained_gpt(model: Any) -> dict[str, Any]:
    model = compiled(model, 1e-2, weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()])
    random = np.random.RandomState(2)
    x = {"token_ids": random.randint(0, 20, (30, 7)), "padding_mask": random.randint(0, 2, (30, 7))}
    x["padding_mask"][:, 0] = 1
    data = (x, random.randint(0, 20, (30, 7)), x["padding_mask"])
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(8)
    return numbers(model, model.fit(dataset, epochs=2, verbose=0))


def causal_language_model() -> dict[str, Any]:
    return trained_gpt(gpt())


def lora() -> dict[str, Any]:
    model = gpt()
    model.backbone.enable_lora(rank=2)
    return trained_gpt(model)


def retrieval() -> dict[str, Any]:
    """As in the guide "Basic retrieval": each user against the items of the batch."""
    import keras_rs

    class Retrieval(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = layers.Embedding(30, 4), layers.Embedding(40, 4)
            self.retrieval = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)

        def build(self, shape: Any) -> None:
            self.users.build(shape)
            self.items.build(shape)
            self.retrieval.candidate_embeddings = self.items.embeddings  # the same variable
            self.retrieval.build(shape)

        def call(self, inputs: Any, training: bool = False) -> Any:
            embeddings = self.users(inputs)
            found = {} if training else {"predictions": self.retrieval(embeddings)}
            return {"user_embeddings": embeddings, **found}

        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            candidates = self.items(y["movie_id"])
            scores = ops.matmul(y_pred["user_embeddings"], ops.transpose(candidates))
            own = ops.arange(ops.shape(scores)[0])
            return ops.mean(keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True))

    random = np.random.RandomState(3)
    data = (random.randint(0, 30, 50), {"movie_id": random.randint(0, 40, 50)})
    model = kd.distribute(Retrieval())
    model.compile(keras.optimizers.Adagrad(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(16)
    return numbers(model, model.fit(dataset, epochs=2, verbose=0))


def ranking() -> dict[str, Any]:
    """As in the guide "List-wise ranking"."""
    import keras_rs

    random = np.random.RandomState(4)
    x, y = random.normal(size=(46, 5, 6)).astype("float32"), random.randint(0, 5, (46, 5)).astype("float32")
    inputs = keras.Input([5, 6])
    outputs = ops.squeeze(layers.Dense(1)(layers.Dense(8, "relu")(inputs)), -1)
    model = kd.distribute(keras.Model(inputs, outputs))
    model.compile(
        keras.optimizers.Adagrad(0.1),
        keras_rs.losses.ListMLELoss(),
        metrics=[keras_rs.metrics.NDCG(k=3, name="ndcg"), keras_rs.metrics.MeanReciprocalRank(name="mrr")],
    )
    return numbers(model, model.fit(x, y, batch_size=12, epochs=2, verbose=0))


def scikit_learn() -> dict[str, Any]:
    from keras.wrappers import SKLearnClassifier
    from sklearn.datasets import load_digits

    def build(X: Any, y: Any) -> Any:
        model = keras.Sequential([keras.Input(X.shape[1:]), layers.Dense(12, "relu"), layers.Dense(10, "softmax")])
        model = kd.distribute(model)
        model.compile("adam", "categorical_crossentropy")
        return model

    x, y = load_digits(return_X_y=True)
    fitted = SKLearnClassifier(model=build, fit_kwargs={"epochs": 2, "batch_size": 24, "verbose": 0})
    fitted.fit(x[:100] / 16, y[:100])
    return {"score": float(np.mean(fitted.predict(x[:100] / 16) == y[:100])), **numbers(fitted.model_, fitted.history_)}


def tracked() -> dict[str, Any]:
    """By `mlflow.autolog`: what the chief has logged."""
    import mlflow

    with tempfile.TemporaryDirectory() as folder:
        mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
        mlflow.tensorflow.autolog(log_models=False, log_datasets=False)
        model = keras.Sequential([keras.Input([4]), layers.Dense(8, "relu"), layers.Dense(1)])
        model = kd.distribute(model)
        model.compile("sgd", "mse", metrics=["mae"])
        x = np.random.RandomState(5).normal(size=(50, 4)).astype("float32")
        with mlflow.start_run() as run:
            history = model.fit(x, x.sum(1, keepdims=True), batch_size=12, epochs=3, verbose=0)
        client = mlflow.MlflowClient()
        logged = [client.get_metric_history(run.info.run_id, name) for name in ("loss", "mae")]
        mlflow.tensorflow.autolog(disable=True)
    return {"logged": [each.value for values in logged for each in values], **numbers(model, history)}


def checkpoints() -> dict[str, Any]:
    """By `OrbaxCheckpoint`: which ones it has kept, and how training goes on from the last one."""
    folder = os.path.abspath("checkpoints")
    callback = keras.callbacks.OrbaxCheckpoint(folder, save_best_only=True, max_to_keep=2)
    model = kd.distribute(keras.Sequential([keras.Input([4]), layers.Dense(8, "relu"), layers.Dense(1)]))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x = np.random.RandomState(5).normal(size=(50, 4)).astype("float32")
    options = {"batch_size": 12, "validation_split": 0.2, "verbose": 0}
    history = model.fit(x, x.sum(1, keepdims=True), epochs=4, callbacks=[callback], **options)
    kd.barrier()
    loaded = kd.distribute(keras.models.load_model(folder))
    again = loaded.fit(x, x.sum(1, keepdims=True), **options).history
    return {"kept": sorted(map(int, os.listdir(folder))), "again": again, **numbers(model, history)}


if devices := int(os.environ.get("DEVICES", "0")):
    two = [tf.config.LogicalDeviceConfiguration()] * devices
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
kd.init()
CASES = {
    "keras_hub": (text_classifier, masked_language_model, causal_language_model, lora),
    "keras_rs": (retrieval, ranking),
    "sklearn": (scikit_learn,),
    "mlflow": (tracked,),
    "orbax": (checkpoints,),
}
results = {}
for function in (function for package, functions in CASES.items() if find_spec(package) for function in functions):
    keras.utils.set_random_seed(0)
    results[function.__name__] = function()
if kd.is_chief():
    Path(sys.argv[1]).write_text(json.dumps(results))
