"""`keras-dist dry-run`, which compiles a script for a TPU without a TPU, and `keras-dist env`."""
