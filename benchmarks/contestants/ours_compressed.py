"""keras_dist over Horovod with compressed gradients. The variable COMPRESSION says how: fp16 or bf16."""

import os

from contestants.ours import build as build
from contestants.ours import build_sum as build_sum


def start() -> None:
    import keras_dist as kd

    kd.init(kd.Horovod(compression=os.environ["COMPRESSION"]))
