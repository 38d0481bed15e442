"""The network interfaces of this machine, by what Linux says in /sys."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from keras_dist.launcher.nodes import ipv4_of

_INTERFACES = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


def interfaces() -> dict[str, dict[str, Any]]:
    """Returns the interfaces by name, with their IPv4 address, state and speed in Mbit/s."""
    return {name: _describe(name) for _, name in socket.if_nameindex()}


def infiniband() -> list[str]:
    """Returns the names of the InfiniBand and RoCE devices."""
    return sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []


def _describe(name: str) -> dict[str, Any]:
    return {"address": ipv4_of(name), "state": _read(name, "operstate"), "mbit_per_s": _speed(name)}


def _speed(name: str) -> int | None:
    with contextlib.suppress(ValueError):
        speed = int(_read(name, "speed") or "")
        return speed if speed > 0 else None
    return None


def _read(name: str, file: str) -> str | None:
    try:
        return (_INTERFACES / name / file).read_text().strip()
    except OSError:  # a virtual interface has no speed
        return None
