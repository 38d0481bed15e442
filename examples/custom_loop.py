"""A custom training loop, on one process or many: kd.shard, kd.run, kd.reduce.

python examples/custom_loop.py
keras-dist run -np 2 examples/custom_loop.py
"""

import argparse

import keras
import keras_dist as kd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=64, help="the global batch size")
options = parser.parse_args()

kd.init(seed=1)

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices((images.astype("float32") / 16, labels))
dataset = kd.shard(dataset.shuffle(len(labels), reshuffle_each_iteration=True).batch(options.batch_size))

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)],
)
optimizer = kd.distribute(keras.optimizers.Adam(1e-3))
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step(batch):
    """Trains on one batch. Returns means over this process's share of it."""
    x, y = batch
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_of(y, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    hits = tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.float32)
    return loss, tf.reduce_mean(hits)


@tf.function
def train_step(batch):
    loss, accuracy = kd.run(step, (batch,))
    return kd.reduce("mean", loss), kd.reduce("mean", accuracy)


for epoch in range(options.epochs):
    for batch in dataset:
        loss, accuracy = train_step(batch)
    if kd.is_chief():
        print(f"epoch {epoch + 1}: last batch's loss {float(loss):.6f}, accuracy {float(accuracy):.4f}")
