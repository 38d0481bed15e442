"""A web server that counts what is asked for, and stops in the middle of a file."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SECONDS = 60


class Files:
    """A server of files. Calls `meanwhile` with the path in the middle of a file, and before an error (404).

    Args:
        content: The files by their paths.
        meanwhile: The function.
        header: A name and its value, without which there are no files.
    """

    def __init__(
        self, content: Mapping[str, bytes], meanwhile: Callable[[str], object] = lambda path: None,
        header: tuple[str, str | None] = ("", None),
    ) -> None:  # fmt: skip
        self.requests: Counter[str] = Counter()
        files = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                files.requests[self.path] += 1
                if (body := content.get(self.path)) is None or self.headers.get(header[0]) != header[1]:
                    meanwhile(self.path)
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):  # the rank was killed
                    self.wfile.write(body[: len(body) // 2])
                    meanwhile(self.path)
                    self.wfile.write(body[len(body) // 2 :])

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Files:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def until_waiting(pids: Callable[[], set[int]], count: int) -> None:
    """Returns as soon as so many of these processes wait for a lock of a file."""
    deadline = time.monotonic() + SECONDS
    while len(pids() & set(_waiting())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _waiting() -> Iterator[int]:
    """Yields the processes that wait for a lock: `1: -> FLOCK ADVISORY WRITE 4711 ...`."""
    for line in Path("/proc/locks").read_text().splitlines():
        if (fields := line.split())[1] == "->":
            yield int(fields[5])
