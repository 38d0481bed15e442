"""Two hosts for tests: network namespaces with a cable between them. Only root can make them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ADDRESSES = ("10.77.9.1", "10.77.9.2")
NETNS = Path("/etc/netns")  # what is in the folder of a namespace stands there for the same file in /etc


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(names: Sequence[str], etc_hosts: str) -> Iterator[None]:
    """Makes two namespaces, with this /etc/hosts, and removes them. Skips the test where this is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root, with `ip` (Debian: iproute2), can make network namespaces")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                (NETNS / name).mkdir(parents=True)
                (NETNS / name / "hosts").write_text(etc_hosts)
            ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system lets nobody make network namespaces: {error.stderr.decode().strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        if NETNS.is_dir() and not any(NETNS.iterdir()):
            NETNS.rmdir()
