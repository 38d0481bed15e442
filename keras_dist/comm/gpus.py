"""Which GPU is whose, where each rank is a process of its own."""

from __future__ import annotations

import tensorflow as tf

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.topology import Topology


def pin_gpu(topology: Topology) -> None:
    """Gives each rank of a host its own GPU, before TensorFlow takes them all.

    Raises:
        ConfigurationError: If there are fewer GPUs than ranks on this host, or TensorFlow has taken them.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    # A launcher such as Slurm may show each rank its own GPU only.
    index = 0 if len(gpus) == 1 and topology.local_size > 1 and _sees_one_of_many() else topology.local_rank
    if index >= len(gpus):
        raise ConfigurationError(
            "There are more ranks than GPUs on this host.",
            f"{topology.local_size} ranks, {len(gpus)} GPU(s)",
            "Start one rank per GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU.",
        )
    try:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], True)
    except RuntimeError as error:
        raise ConfigurationError(
            "TensorFlow has taken the GPUs before each rank could be given its own.",
            str(error),
            "Move `kd.init()` above everything that uses TensorFlow.",
        ) from error


def _sees_one_of_many() -> bool:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and "," not in visible
