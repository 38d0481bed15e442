r"""Two processes without Horovod, over TensorFlow's own collectives. Start each in its own shell, or on its own host:

    cluster='"cluster": {"worker": ["localhost:2222", "localhost:2223"]}'
    TF_CONFIG="{$cluster, \"task\": {\"type\": \"worker\", \"index\": 0}}" python examples/multi_worker.py
    TF_CONFIG="{$cluster, \"task\": {\"type\": \"worker\", \"index\": 1}}" python examples/multi_worker.py

Vertex AI and Kubernetes operators set TF_CONFIG. On one machine the launcher does:

    keras-dist run --backend multi_worker -np 2 examples/multi_worker.py
"""

import keras
import keras_dist as kd
from sklearn.datasets import load_digits

kd.init()  # reads TF_CONFIG; without it, this is one process
keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
model = kd.distribute(model)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
history = model.fit(images / 16, labels, batch_size=64, epochs=5, verbose=0).history

if kd.is_chief():
    for epoch, (value, accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True)):
        print(f"epoch {epoch + 1}: loss {value:.6f}, accuracy {accuracy:.4f}")
