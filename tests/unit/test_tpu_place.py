"""Where the TPU is, whether its libtpu fits, what TensorFlow's resolver finds: our errors for theirs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from keras_dist.backends.tpu import backend as tpu_backend
from keras_dist.backends.tpu import place as tpu_place
from keras_dist.backends.tpu.place import TPUAddress
from keras_dist.errors import ConfigurationError
from tests.multiprocess.servers import Files

NOWHERE = Path("/nonexistent")
GKE = {"KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "grpc://10.4.0.2:8470,grpc://10.4.0.3:8470"}
NAMED = {"TPU_NAME": "my-tpu"}
CONFIG = {"TPU_CONFIG": json.dumps({"tpu_node_name": "node-1", "project": "p", "zone": "z"})}


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """A PCI bus with two TPU v5e chips, Google's network card, and somebody else's card."""
    cards = [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063")]
    for index, (vendor, device) in enumerate(cards):
        card = tmp_path / f"0000:00:0{index}.0"
        card.mkdir()
        (card / "vendor").write_text(f"{vendor}\n")
        (card / "device").write_text(f"{device}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "environ", "kind", "target"),
    [
        ("local", NAMED, "local", "local"),
        ("other-tpu", {**GKE, **NAMED}, "name", "other-tpu"),
        ("grpc://10.0.0.2:8470", NAMED, "addresses", "grpc://10.0.0.2:8470"),
        ("10.0.0.2:8470", {}, "addresses", "grpc://10.0.0.2:8470"),
        ("grpc://10.0.0.2, 10.0.0.3:9000,", {}, "addresses", "grpc://10.0.0.2:8470,grpc://10.0.0.3:9000"),
        (None, {**GKE, **NAMED, **CONFIG}, "addresses", "grpc://10.4.0.2:8470,grpc://10.4.0.3:8470"),
        ("", {**NAMED, **CONFIG}, "name", "my-tpu"),
        (None, {"TPU_NAME": "local"}, "local", "local"),
        (None, {"TPU_NAME": "", **CONFIG}, "name", "node-1"),
    ],
)
def test_the_order(name: str | None, environ: dict[str, str], kind: str, target: str) -> None:
    place = tpu_place.find(name, environ, NOWHERE)
    assert (place.kind, place.target) == (kind, target)


def test_chips_of_this_machine(bus: Path) -> None:
    assert tpu_place.find(None, {}, bus) == TPUAddress("local", "local", "found 2 x TPU v5e")
    assert tpu_place.find(None, NAMED, bus).kind == "name"


def test_nothing_found() -> None:
    with pytest.raises(ConfigurationError, match=r"No TPU was found.\nReceived: no name, neither KUBE_.*TPU_NAME"):
        tpu_place.find(None, {}, NOWHERE)


@pytest.mark.parametrize(
    ("name", "environ", "received"),
    [
        (3, {}, "name=3"),
        ("my tpu", {}, "name='my tpu'"),
        ("grpc://a:99999", {}, "name='grpc://a:99999'"),
        (None, {"TPU_NAME": "grpc://a:b"}, "TPU_NAME='grpc://a:b'"),
        (None, {"TPU_CONFIG": "{"}, "TPU_CONFIG='{'"),
    ],
)
def test_what_can_not_be_read(name: object, environ: dict[str, str], received: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        tpu_place.find(name, environ, NOWHERE)  # type: ignore[arg-type]
    assert raised.value.received == received


def slice_of(hosts: int, worker: int) -> dict[str, str]:
    return {"TPU_WORKER_HOSTNAMES": ",".join(f"h{i}" for i in range(hosts)), "TPU_WORKER_ID": str(worker)}


def test_a_pod_slice_is_led_by_its_worker_0_by_name() -> None:
    named, local = TPUAddress("name", "my-pod", ""), TPUAddress("local", "local", "")
    tpu_place.check_worker(named, slice_of(4, 0))
    tpu_place.check_worker(local, slice_of(1, 0))
    with pytest.raises(ConfigurationError, match="led by one process, on its worker 0.\nReceived: TPU_WORKER_ID=2"):
        tpu_place.check_worker(named, slice_of(4, 2))
    with pytest.raises(ConfigurationError, match="reaches its own chips only"):
        tpu_place.check_worker(local, slice_of(4, 0))


pytestmark = pytest.mark.timeout(60)


def versions(tensorflow: str | None, libtpu: str | None) -> None:
    tpu_place.check({"tensorflow-tpu": tensorflow, "libtpu": libtpu}.get)


@pytest.mark.parametrize(
    ("tensorflow", "version"),
    [(None, None), (None, "0.0.51"), ("2.20.0", "0.0.14"), ("2.20.1", "0.0.30.post1"), ("2.31.0", "0.0.99")],
)
def test_what_fits(tensorflow: str | None, version: str | None) -> None:
    versions(tensorflow, version)


@pytest.mark.parametrize(
    ("tensorflow", "version", "problem", "remedy"),
    [
        ("2.20.0", "0.0.51", "would kill the process", "'tensorflow-tpu==2.20.0' 'libtpu==0.0.23'"),
        ("2.20.0", None, "is installed without libtpu", "libtpu==0.0.23"),
        ("2.19.1", "0.0.11", "runs with 0.0.10", "'tensorflow-tpu==2.19.1' 'libtpu==0.0.10'"),
    ],
)
def test_what_does_not(tensorflow: str, version: str | None, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        versions(tensorflow, version)
    assert problem in str(raised.value)
    assert remedy in str(raised.value)


def test_it_is_told_before_tensorflow_is_imported(tmp_path: Path) -> None:
    """A package `tensorflow` that ends the process stands for the real one, which aborts."""
    for name, version in {"tensorflow_tpu": "2.20.0", "libtpu": "0.0.51"}.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for package in ("tensorflow", "keras"):
        (tmp_path / f"{package}.py").write_text("import os\nos._exit(134)\n")
    root = Path(__file__).resolve().parents[2]
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\n"
        "import keras_dist as kd\n"
        "try: kd.init()\n"
        "except kd.ConfigurationError as error: print(error); print('tensorflow' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "The installed libtpu doesn't fit tensorflow-tpu 2.20.0: importing TensorFlow would kill the process.",
        "Received: libtpu 0.0.51; tensorflow-tpu 2.20.0 runs with 0.0.14 to 0.0.30",
        "Remedy: Install the pair: python -m pip install 'tensorflow-tpu==2.20.0' 'libtpu==0.0.23'",
        "False",
    ]


POD = TPUAddress("name", "my-tpu", "found by TPU_NAME")
ANSWERS = {
    "/computeMetadata/v1/project/project-id": b"my-project",
    "/computeMetadata/v1/instance/zone": b"projects/1/zones/us-central2-b",
}


def api_of(state: str = "READY") -> mock.MagicMock:
    api = mock.MagicMock()
    answer = api.projects().locations().nodes().get().execute
    answer.side_effect = LookupError("404, not found") if state == "unknown" else None
    endpoints = [{"ipAddress": f"10.0.0.{worker}", "port": "8470"} for worker in (1, 2)]
    answer.return_value = {"state": state, "networkEndpoints": endpoints}
    return api


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    with Files(ANSWERS, header=("Metadata-Flavor", "Google")) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server


def workers(resolver: Any) -> dict[str, list[str]]:
    return resolver.cluster_spec().as_dict()


def test_a_name_is_looked_up_in_the_project_of_this_machine(metadata: Files) -> None:
    api = api_of()
    assert workers(tpu_backend.resolve(POD, api)) == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    get, name = api.projects().locations().nodes().get, "projects/my-project/locations/us-central2-b/nodes/my-tpu"
    assert {str(call) for call in get.call_args_list if call != mock.call()} == {str(mock.call(name=name))}
    assert metadata.requests == dict.fromkeys(ANSWERS, 1)


def test_addresses_and_local_ask_nobody(metadata: Files) -> None:
    addresses = TPUAddress("addresses", "grpc://10.0.0.2:8470,grpc://10.0.0.3:8470", "")
    assert workers(tpu_backend.resolve(addresses)) == {"worker": ["10.0.0.2:8470", "10.0.0.3:8470"]}
    assert workers(tpu_backend.resolve(TPUAddress("local", "local", ""))) == {}
    assert not metadata.requests


@pytest.mark.parametrize(
    ("api", "words"),
    [
        (api_of("CREATING"), ["The TPU is not ready.\nReceived: TPU 'my-tpu', found by TPU_NAME, state CREATING\n"]),
        (api_of("unknown"), ["Google's API doesn't know the TPU", "(404, not found)"]),
        (None, ["are not installed.\nReceived: TPU 'my-tpu', found by TPU_NAME\n",
                "python -m pip install google-api-python-client oauth2client"]),
    ],
    ids=["not ready", "unknown", "packages are missing"],
)  # fmt: skip
def test_a_tpu_that_is_not_found(metadata: Files, api: Any, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        tpu_backend.resolve(POD, api)
    assert [word for word in words if word not in str(raised.value)] == []


def test_no_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    expected = r"metadata server.* can't be reached.\n.*refused.*\nRemedy:.*kd.TPU\('grpc://"
    with pytest.raises(ConfigurationError, match=expected):
        tpu_backend.resolve(POD, api_of())
