"""The models of the benchmarks and their data, in Keras and in torch. Each exists once in each of them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FEATURES, CLASSES = 784, 10  # what the four models of the notes take: images of 28 x 28 pixels, as rows
COUNT = 4096  # of examples
# Arguments alike in Keras and in torch, learning rate first. Adam's is small: rounding must not grow into other losses.
OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {"SGD": (1e-3, {"momentum": 0.9}), "Adam": (1e-5, {})}

TINY, MLP, CNN, TRANSFORMER = "tiny MLP", "MLP", "CNN", "transformer"
MODELS = (TINY, MLP, CNN, TRANSFORMER)
WEIGHTS = {TINY: 101_770, MLP: 6_331_146, CNN: 34_826, TRANSFORMER: 269_962}
DIGITS = {"digits, 8 x 8": 8, "digits, 28 x 28": 28}  # the network of examples/digits.py, and the side of its images
RESNET, SIDE = "ResNet50", 64  # for a GPU, and the side of its images
UNITS = {TINY: (128,), MLP: (2048, 2048, 256)}
WIDTH, HEADS, BLOCKS, HIDDEN = 128, 4, 2, 256  # of the transformer; its tokens are the 28 rows of an image


# --- Keras ---


def keras_model(name: str) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(_LAYERS[name]()) if name in _LAYERS else _keras_digits(DIGITS[name])


def keras_optimizer(name: str) -> Any:
    import keras

    rate, options = OPTIMIZERS[name]
    return getattr(keras.optimizers, name)(rate, **options)


def keras_loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(name: str, batch: int, parts: int = 1, part: int = 0) -> Any:
    """Returns endless batches: of all examples, or of every n-th one, as sharded for Horovod."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(examples(name)).shard(parts, part).repeat().batch(batch).prefetch(2)


def examples(name: str) -> tuple[Any, Any]:
    """Returns noise of shape (examples, features), float32, and its labels, int64."""
    import numpy as np

    numbers, features = np.random.default_rng(0), 3 * SIDE**2 if name == RESNET else DIGITS.get(name, 28) ** 2
    return numbers.normal(size=(COUNT, features)).astype("float32"), numbers.integers(CLASSES, size=COUNT)


def _dense(*units: int) -> list[Any]:
    import keras

    hidden = [keras.layers.Dense(count, activation="relu") for count in units]
    return [keras.Input([FEATURES]), *hidden, keras.layers.Dense(CLASSES)]


def _convolutions() -> list[Any]:
    """The convnet of Keras's own MNIST example, without Dropout."""
    import keras

    layers = keras.layers
    stack: list[Any] = [keras.Input([FEATURES]), layers.Reshape([28, 28, 1])]
    for filters in (32, 64):
        stack += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()]
    return [*stack, layers.Flatten(), layers.Dense(CLASSES)]


def _transformer() -> list[Any]:
    import keras

    layers = keras.layers
    tokens = keras.Input([FEATURES])
    x = layers.Dense(WIDTH)(layers.Reshape([28, 28])(tokens))
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(x, x)
        x = layers.LayerNormalization(epsilon=1e-5)(x + attended)
        hidden = layers.Dense(WIDTH)(layers.Dense(HIDDEN, activation="relu")(x))
        x = layers.LayerNormalization(epsilon=1e-5)(x + hidden)
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x))
    return [keras.Input([FEATURES]), keras.Model(tokens, outputs)]


def _resnet() -> list[Any]:
    import keras

    shape = (SIDE, SIDE, 3)
    network = keras.applications.ResNet50(weights=None, input_shape=shape, classes=CLASSES, classifier_activation=None)
    return [keras.Input([3 * SIDE**2]), keras.layers.Reshape(shape), network]


_LAYERS: dict[str, Callable[[], list[Any]]] = {
    TINY: lambda: _dense(*UNITS[TINY]),
    MLP: lambda: _dense(*UNITS[MLP]),
    CNN: _convolutions,
    TRANSFORMER: _transformer,
    RESNET: _resnet,
}


def _keras_digits(side: int) -> Any:
    import keras

    sys.path.insert(0, str(EXAMPLES))
    from digits import build_model

    layers = [keras.Input([side * side]), keras.layers.Reshape([side, side, 1]), build_model((side, side, 1))]
    return keras.Sequential(layers)


# --- torch ---


def torch_model(name: str) -> Any:
    import torch

    torch.manual_seed(1)
    return {TINY: _torch_dense, MLP: _torch_dense, CNN: _torch_cnn, TRANSFORMER: _torch_transformer}[name](name)


def torch_optimizer(name: str, weights: Any, fused: bool | None) -> Any:
    import torch

    rate, options = OPTIMIZERS[name]
    return getattr(torch.optim, name)(weights, rate, fused=fused, **options)


def _torch_dense(name: str) -> Any:
    from torch import nn

    layers: list[Any] = []
    for before, after in zip((FEATURES, *UNITS[name]), UNITS[name], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(UNITS[name][-1], CLASSES))


def _torch_cnn(_: str) -> Any:
    from torch import nn

    stack: list[Any] = [nn.Unflatten(1, (1, 28, 28))]
    for before, after in ((1, 32), (32, 64)):
        stack += [nn.Conv2d(before, after, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stack, nn.Flatten(), nn.Linear(1600, CLASSES))


def _torch_transformer(_: str) -> Any:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Linear(28, WIDTH)
            block = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(block, BLOCKS)
            self.outputs = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outputs(self.blocks(self.tokens(x.view(-1, 28, 28))).mean(1))

    return Transformer()
