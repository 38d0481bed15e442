"""A client of the key-value store in which ranks report that they have joined, failed, or wait, and in which call.

Both `keras-dist run` and `horovodrun` serve one, which Horovod needs to start (PUT and GET over HTTP). It runs as long
as the launcher. No data of the training goes through it.
"""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.request
from collections.abc import Callable, Mapping

from keras_dist import environment, store
from keras_dist.environment import Launch
from keras_dist.errors import PeerLostError

_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 2


class Rendezvous:
    """A client of a key-value store, at a host and port. A `secret` signs the requests, if the store has one."""

    def __init__(self, address: tuple[str, int], secret: str = "") -> None:
        self._address = f"http://{address[0]}:{address[1]}"
        self._secret = secret
        # The user's proxy is for the internet, not for the launcher.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def put(self, key: str, value: str) -> None:
        """Stores a text. Ignores errors: the store only improves messages, so it must not break training."""
        request = self._request("PUT", key, value.encode())
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._open(request, timeout=_REQUEST_SECONDS).close()

    def get(self, key: str) -> str | None:
        """Returns a stored text, `None` if there is none or the store has ended."""
        try:
            with self._open(self._request("GET", key), timeout=_REQUEST_SECONDS) as response:
                return str(response.read().decode())
        except (OSError, http.client.HTTPException):
            return None

    def _request(self, method: str, key: str, body: bytes | None = None) -> urllib.request.Request:
        path = f"/keras_dist_{key}/v"
        signature = {store.SIGNATURE: store.signature(self._secret, method, path, body or b"")} if self._secret else {}
        return urllib.request.Request(self._address + path, data=body, headers=signature, method=method)


def join(launch: Launch) -> Rendezvous | None:
    """Waits until every rank has called `kd.init()`, and returns the launcher's store, if there is one."""
    if launch.rendezvous is None:
        return None
    rendezvous = Rendezvous(launch.rendezvous)
    rendezvous.put(f"joined_{launch.topology.rank}", "1")
    names = {rank: f"rank {rank} of {launch.topology.size}" for rank in range(launch.topology.size)}
    wait_for_ranks(names, lambda rank: rendezvous.get(f"joined_{rank}") is not None)
    return rendezvous


def wait_for_ranks(names: Mapping[int, str], has_joined: Callable[[int], bool], hint: str = "") -> None:
    """Waits until ranks have joined. After the time limit the `PeerLostError` names the missing ones, and the hint."""
    seconds = join_seconds()
    deadline = time.monotonic() + seconds
    missing = list(names)
    while missing := [rank for rank in missing if not has_joined(rank)]:
        if time.monotonic() > deadline:
            raise not_joined(seconds, f"missing: {', '.join(names[rank] for rank in missing)}", hint)
        time.sleep(_POLL_SECONDS)


def not_joined(seconds: float, received: str, hint: str = "") -> PeerLostError:
    """Returns the error of a rank that has waited too long for the others to join."""
    return PeerLostError(
        f"Not all ranks have joined within {seconds:g} s.",
        received,
        f"Look at the output of the missing ranks: each must call `kd.init()`. {hint}If they only need longer, set "
        f"{environment.JOIN_TIMEOUT} (seconds).",
    )


def join_seconds() -> float:
    """Returns the time limit for joining."""
    return environment.seconds(environment.JOIN_TIMEOUT, environment.JOIN_SECONDS)
