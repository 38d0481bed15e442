"""Versions of what is installed, by the packages' metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
