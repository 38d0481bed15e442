"""The launcher's key-value store, used to say who is missing, who failed and who waits where.

Both `keras-dist run` and `horovodrun` serve one for Horovod's own start (PUT and GET over HTTP); it lives as
long as the launcher. Nothing of training goes through it.
"""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.request

from keras_dist import environment
from keras_dist.errors import PeerLostError
from keras_dist.topology import Topology

_SCOPE = "keras_dist"
_POLL_SECONDS = 0.05
_DEFAULT_JOIN_SECONDS = 300.0
_REQUEST_SECONDS = 2


class Rendezvous:
    """A client of the launcher's key-value store.

    Args:
        address: Host and port of the store.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._base = f"http://{address[0]}:{address[1]}/{_SCOPE}"
        # A proxy of the user's is for the world outside, not for the launcher.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def put(self, key: str, value: str) -> None:
        """Stores a text. Errors are ignored: the store serves messages, and must not break training."""
        request = urllib.request.Request(f"{self._base}_{key}/v", data=value.encode(), method="PUT")
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._open(request, timeout=_REQUEST_SECONDS).close()

    def get(self, key: str) -> str | None:
        """Returns a stored text, `None` if there is none or the store is gone."""
        try:
            with self._open(f"{self._base}_{key}/v", timeout=_REQUEST_SECONDS) as response:
                text: str = response.read().decode()
                return text
        except (OSError, http.client.HTTPException):
            return None

    def wait_for_all(self, topology: Topology) -> None:
        """Waits until every rank has arrived.

        Raises:
            PeerLostError: After the time limit, with the missing ranks.
        """
        self.put(f"joined_{topology.rank}", "1")
        limit = join_seconds()
        deadline = time.monotonic() + limit
        missing = list(range(topology.size))
        while missing := [rank for rank in missing if self.get(f"joined_{rank}") is None]:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"Not all ranks have called `kd.init()` within {limit:g} s.",
                    f"missing: {', '.join(f'rank {rank}' for rank in missing)} of {topology.size}",
                    f"Look at the output of the missing ranks, or set {environment.JOIN_TIMEOUT} (seconds) "
                    "if they only need longer.",
                )
            time.sleep(_POLL_SECONDS)


def join_seconds() -> float:
    """Returns the time limit of joining.

    Raises:
        ConfigurationError: If the user's setting isn't a positive number.
    """
    return environment.seconds(environment.JOIN_TIMEOUT, _DEFAULT_JOIN_SECONDS)
