"""keras_dist: two lines that make a Keras 3 `model.fit` script a distributed one, with the same numbers."""
