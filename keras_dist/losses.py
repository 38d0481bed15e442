"""Losses for distributed training."""

import functools
from typing import Any

import keras

from keras_dist.cluster import current_backend
from keras_dist.compat import keras_losses
from keras_dist.errors import ConfigurationError
from keras_dist.step import step as step_module
from keras_dist.step.gathering import gather_in_step


def WholeBatch(loss: Any) -> Any:
    """Returns a loss that is computed on the whole batch, whose examples it compares.

    A step sees its share of the batch. A loss that is given to `compile` is computed on the whole batch anyway, unless
    its graph proves that its values depend on one example each, or that it is a mean over the examples. This says so
    aloud, whatever the graph shows. Each replica then gathers labels, predictions and weights of all shares, so its
    memory must hold them.

    The result is the Keras loss itself. A model that is compiled with it is saved as with `loss`, and loads without
    keras_dist. Compile the loaded model with `kd.losses.WholeBatch` again. In one process it computes as `loss` does.

    Args:
        loss: A `keras.losses.Loss`, the name of a loss of Keras, or a function of `y_true` and `y_pred`.

    Returns:
        A `keras.losses.Loss` of the same class with the same name and configuration, or for a function one with the
        same name: for `compile`, or to be called in `train_step` or the step of `kd.run`.

    Raises:
        ConfigurationError: If `loss` is something else.
        NotSupportedError: In a step, if the loss is not reduced to one number (`reduction="none"`).

    Example:

    ```python
    def contrastive(labels, vectors):  # one value for each example
        same = keras.ops.cast(keras.ops.equal(labels[:, None], labels[None, :]), vectors.dtype)
        similarities = keras.ops.matmul(vectors, keras.ops.transpose(vectors))
        return keras.losses.categorical_crossentropy(same, similarities, from_logits=True)

    model.compile("adam", kd.losses.WholeBatch(contrastive))
    ```
    """
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError as error:
            raise _unknown(repr(loss)) from error
    if isinstance(loss, keras.losses.Loss):
        return keras_losses.on_whole_batch(loss)
    if isinstance(loss, type) or not callable(loss) or not hasattr(loss, "__name__"):
        raise _unknown(f"{loss.__module__}.{loss.__qualname__}" if isinstance(loss, type) else type(loss).__name__)
    if loss.__name__ == "<lambda>":
        raise _unknown("a lambda, which a file of the model can't name")

    @functools.wraps(loss)
    def whole(y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        if step_module.current() is None:
            return loss(y_true, y_pred, *args, **kwargs)
        gather = functools.partial(gather_in_step, current_backend())
        y_true, y_pred = keras.tree.map_structure(gather, (y_true, y_pred))
        with step_module.entered(None):
            return loss(y_true, y_pred, *args, **kwargs)

    return keras_losses.on_whole_batch_as(whole, loss)


def _unknown(received: str) -> ConfigurationError:
    return ConfigurationError(
        "kd.losses.WholeBatch() takes one loss: a keras.losses.Loss, the name of one, or a function with a name.",
        received,
        'For example kd.losses.WholeBatch(keras.losses.Dice()). For several outputs: {"a": kd.losses.WholeBatch(...), '
        '"b": "mse"}.',
    )


__all__ = ["WholeBatch"]
