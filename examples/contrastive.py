"""Learns without labels what two views of a digit have in common: SimCLR, with a loss that compares the whole batch.

python examples/contrastive.py
keras-dist run -np 2 examples/contrastive.py
"""

import argparse
from pathlib import Path

import keras
import keras_dist as kd
import tensorflow as tf

from digits_dataset import load


def build_encoder(image_shape: tuple[int, ...]) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64),
            keras.layers.UnitNormalization(),
        ]
    )


def view(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Shifts and dims an image. The same seed gives the same view, on any number of processes."""
    size = tf.shape(image)
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    shifted = tf.image.stateless_random_crop(padded, size, seed)
    return tf.image.stateless_random_brightness(shifted, 0.3, seed)


class SimCLR(keras.Model):
    """Compares each image with the other view of all images of the batch."""

    def __init__(self, encoder: keras.Model, temperature: float = 0.1) -> None:
        super().__init__()
        self.encoder, self.temperature = encoder, temperature
        self.tracker = keras.metrics.Mean("loss")

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker]

    def call(self, images: tf.Tensor) -> tf.Tensor:
        return self.encoder(images)

    def contrastive_loss(self, views: tuple[tf.Tensor, tf.Tensor], training: bool) -> tf.Tensor:
        # A step sees a share of the batch. Here all shares meet: without these calls each would compare its own only.
        first, second = (kd.gather(self.encoder(images, training=training)) for images in views)
        similarities = keras.ops.matmul(first, keras.ops.transpose(second)) / self.temperature
        labels = keras.ops.arange(keras.ops.shape(first)[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, compared, from_logits=True)
            for compared in (similarities, keras.ops.transpose(similarities))
        ]
        return keras.ops.mean(losses)

    def train_step(self, views: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = self.contrastive_loss(views, training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, views: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        self.tracker.update_state(self.contrastive_loss(views, training=False))
        return {"loss": self.tracker.result()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from two views of each handwritten digit.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="the global batch size")
    parser.add_argument("--dataset", choices=["digits", "mnist"], default="digits", help="mnist is downloaded")
    parser.add_argument("--data-dir", type=Path, default="runs/data", help="where the dataset is kept")
    args = parser.parse_args()
    keras.utils.set_random_seed(1)
    kd.init()

    train, _, test = load(args.dataset, args.data_dir)

    def views(data: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
        def pair(index: tf.Tensor, example: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            image, seed = tf.cast(example[0], tf.float32) / 255, tf.cast(index, tf.int32)
            return view(image, [seed, 0]), view(image, [seed, 1])

        return data.enumerate().map(pair).batch(batch_size, drop_remainder=True)

    model = kd.distribute(SimCLR(build_encoder(train.element_spec[0].shape)))
    model.compile(keras.optimizers.Adam(1e-3))
    history = model.fit(views(train, args.batch_size), epochs=args.epochs, verbose=2).history
    test_loss = model.evaluate(views(test, args.batch_size), verbose=0)

    # How good are the vectors? Each test image gets the label of the training image that is most like it.
    (images, labels), (known, known_labels) = (
        next(iter(data.map(lambda image, label: (tf.cast(image, tf.float32) / 255, label)).batch(100_000)))
        for data in (test, train)
    )
    similarities = model.predict(images, verbose=0) @ model.predict(known, verbose=0).T
    accuracy = (known_labels.numpy()[similarities.argmax(axis=1)] == labels.numpy()).mean()
    if kd.is_chief():
        print(f"loss: {history['loss'][-1]:.4f}, test loss: {test_loss:.4f}, nearest neighbour: {accuracy:.4f}")


if __name__ == "__main__":
    main()
