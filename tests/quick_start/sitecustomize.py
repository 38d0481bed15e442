"""Python runs this when it starts, in every process of the tests: Keras is imported without scikit-learn.

Keras imports scikit-learn for wrappers that no test uses, with SciPy: a fifth of the time that a process needs to
start. A script that imports scikit-learn itself gets it.
"""

import sys


class _NotForKeras:
    """Finds no scikit-learn while Keras is being imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        keras = sys.modules.get("keras")
        if name == "sklearn" and getattr(getattr(keras, "__spec__", None), "_initializing", False):
            raise ModuleNotFoundError("No module named 'sklearn' while Keras is imported in a test", name=name)


sys.meta_path.insert(0, _NotForKeras())  # type: ignore[arg-type]
