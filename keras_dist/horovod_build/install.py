"""Installs a wheel into the environment of the running interpreter."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from keras_dist.horovod_build.source import run_pip

RUNTIME_REQUIREMENTS = ("cloudpickle", "packaging", "psutil", "pyyaml")


def install_wheel(wheel: Path, environ: Mapping[str, str]) -> bool:
    """Installs a wheel of Horovod and what Horovod imports.

    Args:
        wheel: The wheel.
        environ: The environment to run pip in.

    Returns:
        `False` if this wheel is already installed.

    Raises:
        HorovodBuildError: If pip fails.
    """
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if installed_sha256() == sha256:
        return False
    requirements = list(RUNTIME_REQUIREMENTS)
    if sys.version_info >= (3, 12):
        requirements.append("setuptools")  # has distutils, which Horovod's launcher imports and Python 3.12 lacks
    run_pip(["install", *requirements], environ, "install what Horovod imports")
    # The same version may be installed, built for another TensorFlow; only Horovod is reinstalled. The URL has the
    # checksum, since pip before 23.1 (Debian 12) does not record that of a file.
    url = f"{wheel.absolute().as_uri()}#sha256={sha256}"
    run_pip(["install", "--force-reinstall", "--no-deps", url], environ, f"install {wheel.name}")
    return True


def installed_sha256() -> str | None:
    """Returns the checksum of the wheel that Horovod was installed from, `None` if it is unknown."""
    try:
        record = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    archive = json.loads(record or "{}").get("archive_info", {})
    kind, _, value = archive.get("hash", "").partition("=")
    return archive.get("hashes", {}).get("sha256") or (value if kind == "sha256" else None)
