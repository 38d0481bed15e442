"""A cluster of processes on this machine, for Horovod over Gloo: its rendezvous and each rank's environment."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from keras_dist import environment
from keras_dist.errors import ConfigurationError

LOOPBACK = "127.0.0.1"
HOST = "localhost"


class LocalCluster:
    """Lets `size` processes on this machine find each other, over the loopback interface alone.

    It starts no process: whoever starts them gives each one its `environment(rank)`.

    Args:
        size: Number of processes.
        environ: What the processes inherit, usually `environment.current()`.

    Raises:
        ConfigurationError: If `size` is less than one, or Horovod is not installed.

    Example:

    >>> with LocalCluster(2, environment.current()) as cluster:
    ...     ranks = [subprocess.Popen(command, env=cluster.environment(rank)) for rank in range(2)]
    ...     codes = [rank.wait() for rank in ranks]
    """

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        if size < 1:
            raise ConfigurationError(
                "A cluster needs at least one process.", f"size={size}", "Use `-np 1` or more."
            )
        self.size = size
        self._inherited = dict(environ)
        # The mark of another cluster's rank, if we run inside one: these processes are none of its children.
        self._inherited.pop(environment.INITIALIZED_BY, None)
        self._server = _start_rendezvous_server(size)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},  # bounds the time that close() takes
            name="keras_dist-rendezvous",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Port of the rendezvous, chosen by the kernel."""
        return int(self._server.server_address[1])

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the whole environment of one rank.

        The number of threads is left alone: TensorFlow shares the cores well enough among ranks, and a cap
        set here would change the order of its sums, hence the numbers, behind the user's back.

        Args:
            rank: Index of the process, `0 <= rank < size`.
        """
        return {
            "PYTHONUNBUFFERED": "1",  # what a rank printed is there, even if it is killed
            "NCCL_SOCKET_IFNAME": "lo",
            **self._inherited,
            "KERAS_DIST_LAUNCHER": "local",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port),
            "HOROVOD_HOSTNAME": HOST,
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(self.size),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": str(self.size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
        }

    def close(self) -> None:
        """Stops the rendezvous and frees its port. The processes are to be ended before."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_rendezvous_server(size: int) -> Any:
    """Returns Horovod's own key-value server, bound to the loopback interface and a free port."""
    try:
        import socketserver

        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise ConfigurationError(
            "Horovod is not installed.", f"ImportError: {error}", "Build it with `keras-dist install-horovod`."
        ) from error

    # Not Horovod's `RendezvousServer`: it listens on every interface of the machine.
    class LoopbackServer(RendezvousHTTPServer):
        request_queue_size = 128  # all ranks connect at the same moment; the default of 5 drops some for 1 s

        def server_bind(self) -> None:
            # Past HTTPServer's own, which asks the name server who 127.0.0.1 is and may wait for it.
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = LOOPBACK, self.server_address[1]

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A rank that dies in the middle of a request is the launcher's to report, not ours."""

    server = LoopbackServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.init(get_host_assignments([HostInfo(HOST, size)], size))
    return server
