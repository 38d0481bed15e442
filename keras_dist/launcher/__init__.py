"""Starts ranks and ends them: `keras-dist run`, and as a function `kd.launch`. Imports no TensorFlow."""
