"""The place of this process among the ranks, and the collectives that a script or a step can call."""

from typing import Any

from keras_dist.comm.backend import Backend
from keras_dist.errors import DistributionError

_backend: Backend | None = None


def is_started() -> bool:
    """True after `kd.init()`."""
    return _backend is not None


def set_backend(backend: Backend) -> None:
    global _backend
    _backend = backend


def current_backend() -> Backend:
    """Returns the backend that `kd.init()` has started, and raises before."""
    if _backend is None:
        raise DistributionError(
            "keras_dist is not initialized.", "a call before kd.init()",
            "Call kd.init() first, at the top of the script.",
        )
    return _backend


def used_backend() -> Backend:
    """Returns the backend to a script that now shares its work: no warning at the end says that it did not."""
    backend = current_backend()
    backend.is_used = True
    return backend


def rank() -> int:
    """Returns the index of this process, `0 <= rank < size`."""
    return used_backend().topology.rank


def size() -> int:
    """Returns the number of processes that train together."""
    return current_backend().topology.size


def num_replicas() -> int:
    """Returns the number of shares of a global batch: `size()`, times the devices of a process if it has several."""
    return current_backend().num_replicas


def local_rank() -> int:
    """Returns the index of this process among the processes on the same host."""
    return used_backend().topology.local_rank


def is_chief() -> bool:
    """Returns True on the one process that writes files. Guard your script's own files by `if kd.is_chief(): ...`."""
    return current_backend().topology.is_chief


def barrier() -> None:
    """Waits until all ranks have made this call. Every rank must call it.

    Raises:
        MismatchError: If another rank is in a different call.
        PeerLostError: If another rank is gone.
    """
    current_backend().all_gather_object("kd.barrier()")


def broadcast(value: Any) -> Any:
    """Returns the chief's value on every rank. Every rank must call it.

    Args:
        value: Number, text, bytes, array or tensor, or lists, tuples, sets and dicts of them. Only the chief's value
            is used.

    Raises:
        ConfigurationError: If the value is, or contains, something else. No pickle is sent: it could run code.
        MismatchError: If another rank is in a different call.
        PeerLostError: If another rank is gone.

    Example:

    ```python
    run_name = kd.broadcast(time.strftime("%H%M%S"))  # one name for all
    ```
    """
    backend = current_backend()
    return backend.all_gather_object("kd.broadcast()", value if backend.topology.is_chief else None)[0]


def all_reduce(gradients: Any) -> Any:
    """Returns the gradients of the global batch, for a step that clips, measures or adds them up itself.

    A step computes gradients on a share of the batch, and an optimizer from `kd.distribute` reduces them when it
    applies them. What the step does before, or without an optimizer, sees only the share: call this first. What the
    optimizer does itself (`clipnorm`, `clipvalue`, `global_clipnorm`, `gradient_accumulation_steps`) needs nothing. In
    one process the gradients stay as they are.

    Call it in `train_step` of a distributed model, or in a function that `kd.run` runs. Every rank must call it in
    every step, also one whose share is empty; if one does not, the others wait until the watchdog or Horovod's stall
    inspector ends them. So don't put it under a condition that may differ between ranks. The gradients are sent once
    more than without it.

    Args:
        gradients: List or other structure of gradients of means over this replica's share: tensors, `tf.IndexedSlices`
            or `None`.

    Returns:
        The same structure, the same on every replica.

    Raises:
        ConfigurationError: If it is called outside of a step.
        NotSupportedError: If several LossScaleOptimizers have scaled a loss in the step. With mirrored, central_storage
            and parameter servers also inside a `tf.cond`, a loop or a `tf.function` of the step.

    Example:

    ```python
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = kd.all_reduce(tape.gradient(loss, self.trainable_variables))
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}
    ```
    """
    from keras_dist.step import optimizer  # needs TensorFlow, which the rest of this module does not

    return optimizer.all_reduce(used_backend(), gradients)


def gather(tensor: Any) -> Any:
    """Returns the rows of all replicas' shares, in the order of the global batch. Gradients flow back to all of them.

    A step sees its share of the batch. What compares examples with each other (an in-batch contrastive loss, hard
    negatives) needs all of them: gather what it compares first. The gradients are those of one process, both if every
    replica then computes the same from all rows, and if each computes the mean over its own rows, compared with all.
    The first needs no index of the own rows. In one process the tensor is returned as it is. For a loss of `compile`,
    see also `kd.losses.WholeBatch`.

    Call it in `train_step`, `test_step`, a layer or a loss of a distributed model, or in a function that `kd.run` runs.
    Every rank must call it in every step, also one whose share is empty; if one does not, the others wait until the
    watchdog or Horovod's stall inspector ends them. So don't put it under a condition that may differ between ranks.
    The memory of each replica must hold all rows. Update metrics with the share's own rows, or with one number: those
    of all rows would be counted by every replica.

    Args:
        tensor: Tensor of shape `(rows, ...)` of numbers or bools, with the rows of this replica's share. The number of
            rows may differ between the replicas, the other axes not.

    Returns:
        Tensor of shape `(all rows, ...)` and the same dtype, with the same values on every replica.

    Raises:
        ConfigurationError: If it is called outside of a step, or `tensor` is no such tensor.
        NotSupportedError: On a TPU, if the batch is smaller than the others, or no multiple of the number of cores.

    Example:

    ```python
    def train_step(self, data):
        first, second = data  # two views of each image
        with tf.GradientTape() as tape:
            anchors = kd.gather(self.encoder(first, training=True))
            others = kd.gather(self.encoder(second, training=True))
            similarities = keras.ops.matmul(anchors, keras.ops.transpose(others)) / 0.1
            labels = keras.ops.arange(keras.ops.shape(anchors)[0])
            losses = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
            loss = keras.ops.mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
    ```
    """
    from keras_dist.step import gathering  # as above

    gathering.check_rows(tensor)
    return gathering.gather_in_step(used_backend(), tensor)
