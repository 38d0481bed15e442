"""Callbacks that Keras lacks. Keras's own callbacks work unchanged."""

from keras_dist.callbacks.chief_only import ChiefOnly as ChiefOnly
from keras_dist.callbacks.commit import Commit as Commit
from keras_dist.callbacks.timing import Timing as Timing
from keras_dist.callbacks.warmup import LearningRateWarmup as LearningRateWarmup
