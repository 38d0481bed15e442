"""TensorFlow's resolver against a metadata server on this machine and a stub of Google's API; our errors for its."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from keras_dist.backends.tpu import connect
from keras_dist.backends.tpu.place import Place
from keras_dist.errors import ConfigurationError

pytestmark = pytest.mark.timeout(60)
POD = Place("name", "my-tpu", "found by TPU_NAME")
ANSWERS = {
    "/computeMetadata/v1/project/project-id": b"my-project",
    "/computeMetadata/v1/instance/zone": b"projects/1/zones/us-central2-b",
}


class Api:
    """Google's API of TPUs, with one TPU of two workers."""

    def __init__(self, state: str = "READY") -> None:
        self.state = state
        self.asked: list[str] = []

    def projects(self) -> Api:
        return self

    locations = nodes = projects

    def get(self, name: str) -> Api:
        self.asked.append(name)
        return self

    def execute(self) -> dict[str, Any]:
        if self.state == "unknown":
            raise LookupError("404, not found")
        endpoints = [{"ipAddress": f"10.0.0.{worker}", "port": "8470"} for worker in (1, 2)]
        return {"state": self.state, "networkEndpoints": endpoints}


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A metadata server; gives what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = ANSWERS.get(self.path) if self.headers.get("Metadata-Flavor") == "Google" else None
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def workers(resolver: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = resolver.cluster_spec().as_dict()
    return found


def test_a_name_is_looked_up_in_the_project_of_this_machine(metadata: list[str]) -> None:
    api = Api()
    assert workers(connect.resolve(POD, api)) == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert set(api.asked) == {"projects/my-project/locations/us-central2-b/nodes/my-tpu"}
    assert sorted(metadata) == sorted(ANSWERS)


def test_what_is_known_is_not_asked_for(metadata: list[str]) -> None:
    api = Api()
    connect.resolve(Place("name", "my-tpu", "", project="p", zone="z"), api)
    assert set(api.asked) == {"projects/p/locations/z/nodes/my-tpu"}
    assert metadata == []


def test_addresses_and_local_ask_nobody(metadata: list[str]) -> None:
    addresses = Place("addresses", "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470", "")
    assert workers(connect.resolve(addresses)) == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert workers(connect.resolve(Place("local", "local", ""))) == {}
    assert metadata == []


def message(place: Place, api: Api | None) -> str:
    with pytest.raises(ConfigurationError) as raised:
        connect.resolve(place, api)
    return str(raised.value)


@pytest.mark.parametrize("state", ["CREATING", "PREEMPTED"])
def test_a_tpu_that_is_not_ready(metadata: list[str], state: str) -> None:
    text = message(POD, Api(state))
    assert f"The TPU is not ready.\nReceived: TPU 'my-tpu', found by TPU_NAME, state {state}\n" in text


def test_a_tpu_that_nobody_knows(metadata: list[str]) -> None:
    text = message(POD, Api("unknown"))
    assert "Google's API doesn't know the TPU" in text
    assert "(404, not found)" in text


def test_the_packages_that_ask_the_api_are_missing(metadata: list[str]) -> None:
    text = message(POD, None)
    assert "are not installed.\nReceived: TPU 'my-tpu', found by TPU_NAME\n" in text
    assert "python -m pip install google-api-python-client oauth2client" in text


def test_no_metadata_server(monkeypatch: pytest.MonkeyPatch, metadata: list[str]) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    text = message(POD, Api())
    assert re.search(r"metadata server.* can't be reached.\n.*refused.*\nRemedy:.*kd.TPU\('grpc://", text)
