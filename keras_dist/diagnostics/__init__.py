"""Tools that look at a script before it is trained: `keras-dist dry-run`."""
