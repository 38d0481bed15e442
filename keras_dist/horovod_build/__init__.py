"""Builds a Horovod wheel for the installed TensorFlow, caches it, installs it and tests it.

Horovod's last release, 0.28.1, is a source distribution that neither compiles with current versions of TensorFlow nor
reports stalled ranks over Gloo. Two small patches fix both. The modules, in the order of the work: `requirements`
(what the machine lacks), `cache` (finds an existing wheel; the patches), `source` (fetch and install), `build`
(compile, with progress), `smoke_test` (two processes all-reduce). None of them imports TensorFlow.
"""

from keras_dist.errors import DistributionError


class HorovodBuildError(DistributionError):
    """Horovod could not be fetched, patched, compiled or installed, or its test failed."""
