"""Callbacks: only what Keras lacks. Keras's own work unchanged."""

from keras_dist.callbacks.chief_only import ChiefOnly as ChiefOnly
