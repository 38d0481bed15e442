"""Where the TPU is: explicit words, then the environment, then this machine's chips; and what a pod slice allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keras_dist.backends.tpu import place as tpu_place
from keras_dist.backends.tpu.place import Place
from keras_dist.errors import ConfigurationError

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


def test_the_reason_and_what_else_is_known() -> None:
    assert tpu_place.find("local", {}).reason == "chosen by the script"
    assert tpu_place.find(None, GKE).reason == "found by KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
    assert tpu_place.find(None, GKE).addresses == ["10.4.0.2:8470", "10.4.0.3:8470"]
    assert tpu_place.find(None, CONFIG) == Place("name", "node-1", "found by TPU_CONFIG", "p", "z")


def test_chips_of_this_machine(bus: Path) -> None:
    assert tpu_place.find(None, {}, bus) == Place("local", "local", "found 2 x TPU v5e")
    assert tpu_place.find(None, NAMED, bus).kind == "name"


def test_nothing_found() -> None:
    with pytest.raises(ConfigurationError, match=r"No TPU was found.\nReceived: no name, neither KUBE_.*TPU_NAME"):
        tpu_place.find(None, {}, NOWHERE)


@pytest.mark.parametrize(
    ("name", "environ", "received"),
    [
        (3, {}, "name=3"),
        ("my tpu", {}, "name='my tpu'"),
        ("grpc://", {}, "name='grpc://'"),
        ("grpc://a:8470,b c", {}, "name='grpc://a:8470,b c'"),
        ("grpc://a:99999", {}, "name='grpc://a:99999'"),
        (None, {"TPU_NAME": "grpc://a:b"}, "TPU_NAME='grpc://a:b'"),
        (None, {"TPU_CONFIG": "{"}, "TPU_CONFIG='{'"),
        (None, {"TPU_CONFIG": "[]"}, "TPU_CONFIG='[]'"),
    ],
)
def test_what_can_not_be_read(name: object, environ: dict[str, str], received: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        tpu_place.find(name, environ, NOWHERE)  # type: ignore[arg-type]
    assert raised.value.received == received


def slice_of(hosts: int, worker: int) -> dict[str, str]:
    return {"TPU_WORKER_HOSTNAMES": ",".join(f"h{i}" for i in range(hosts)), "TPU_WORKER_ID": str(worker)}


def test_a_pod_slice_is_led_by_its_worker_0_by_name() -> None:
    named, local = Place("name", "my-pod", ""), Place("local", "local", "")
    tpu_place.check_worker(named, slice_of(4, 0))
    tpu_place.check_worker(local, slice_of(1, 0))
    with pytest.raises(ConfigurationError, match="led by one process, on its worker 0.\nReceived: TPU_WORKER_ID=2"):
        tpu_place.check_worker(named, slice_of(4, 2))
    with pytest.raises(ConfigurationError, match="reaches its own chips only"):
        tpu_place.check_worker(local, slice_of(4, 0))
