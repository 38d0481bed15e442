"""Starts the ranks of a job and never leaves one behind. Imports neither TensorFlow nor Keras."""
