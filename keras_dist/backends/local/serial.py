"""One process, one device."""

import tensorflow as tf

from keras_dist.comm.backend import Priority
from keras_dist.comm.devices import warn_of_unused_gpus
from keras_dist.environment import Launch
from keras_dist.training.model import LocalTraining


class Serial(LocalTraining):
    """One process with plain Keras.

    Example:

    >>> import keras_dist as kd
    >>> kd.init("serial")
    >>> kd.size()
    1
    """

    name = "serial"

    @classmethod
    def priority(cls, launch: Launch | None) -> Priority:
        return Priority(1, "no launcher found; to use more processes: keras-dist run -np N script.py")

    def start(self, launch: Launch | None) -> None:
        warn_of_unused_gpus(["GPU:0"])

    def describe_devices(self) -> str:
        gpus = len(tf.config.list_physical_devices("GPU"))
        return f"{gpus} GPU" if gpus else "CPU"
