"""The error of a build that was started and failed."""

from __future__ import annotations

from keras_dist.errors import DistributionError


class HorovodBuildError(DistributionError):
    """Horovod could not be fetched, corrected, compiled or installed, or its proof failed."""
