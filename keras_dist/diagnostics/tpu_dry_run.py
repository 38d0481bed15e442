"""`kd.tpu_dry_run`: the dry run of an existing model, in a notebook or a script."""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from keras_dist.diagnostics.process import SEARCH_SECONDS, dry_run
from keras_dist.diagnostics.report import Report, Shape
from keras_dist.errors import ConfigurationError

if TYPE_CHECKING:
    import keras


def tpu_dry_run(
    model: keras.Model, batch: Any, target: str = "v5e-8", trials: int = 6, stream: TextIO | None = None,
    search_seconds: float = SEARCH_SECONDS,
) -> Report:  # fmt: skip
    """Compiles a model's training step for a TPU with the real TPU compiler, without a TPU.

    The compiler runs in a separate process and a separate environment, which the first call makes (1 to 2 GB, some
    minutes). Its results are cached. `keras-dist dry-run train.py` does the same for a script.

    Args:
        model: A compiled model. Custom classes must be in a module that can be imported, registered with
            `@keras.saving.register_keras_serializable()`.
        batch: A batch as `fit` would get it from a dataset: `(x, y)`. Only shapes and dtypes matter.
        target: The TPU: `"v2-8"`, `"v3-8"`, `"v4-8"`, `"v5e-8"`, `"v5p-8"`, `"v6e-8"`, `"tpu7x-8"`, and larger ones.
        trials: Compilations to find the largest batch that fits; 0 for none.
        stream: Where progress is shown. Default: standard error.
        search_seconds: Time limit for the trials, 300 s by default. A report that it ends names what is `missing`.

    Returns:
        A report. `print` shows it as text; its attributes have the values: `compiles`, `fits`, `forbidden`, `memory`,
        `largest_batch`, `flops`, `bytes_accessed`, `gradient_reductions`.

    Raises:
        ConfigurationError: If the target is unknown, or the model isn't compiled or can't be loaded.

    Example:

    ```python
    report = kd.tpu_dry_run(model, (images, labels), target="v5e-8")
    print(report)
    assert report.ok
    ```
    """
    import tensorflow as tf

    from keras_dist.diagnostics.captured import specs_of

    if not getattr(model, "compiled", False):
        raise ConfigurationError(
            "Only a compiled model has a training step.", f"the model {model.name!r}", "Call model.compile(...) first."
        )
    shapes = tf.nest.map_structure(lambda spec: Shape(tuple(spec.shape), spec.dtype.name), specs_of(batch))
    with tempfile.TemporaryDirectory(prefix="keras_dist-dry-run-") as folder:
        path, specs = Path(folder) / "model.keras", Path(folder) / "specs.pickle"
        model.save(path)
        specs.write_bytes(pickle.dumps(shapes))
        *_, report = dry_run(
            target, stream or sys.stderr, model=str(path), specs=str(specs), trials=trials,
            search_seconds=search_seconds,
        )  # fmt: skip
        return report
