"""Finds the TPU, and checks that the installed libtpu fits. Imports no TensorFlow and connects to nothing.

The script's choice comes first, then the environment's, then this machine. With a libtpu that does not fit the
installed tensorflow-tpu, importing TensorFlow kills the process, and no error can be caught. pip installs such a pair
by default: tensorflow-tpu 2.20.0 requires any libtpu 0.0.x. Measured in 2026-11.
"""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from keras_dist.environment import installed_version
from keras_dist.errors import ConfigurationError

GKE = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
NAME = "TPU_NAME"
CONFIG = "TPU_CONFIG"
WORKER_ID = "TPU_WORKER_ID"
WORKER_HOSTS = "TPU_WORKER_HOSTNAMES"

_GRPC = "grpc://"
_PORT = 8470
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+)(?::(?P<port>\d{1,5}))?")
_TPU_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")

# The chips' ids on the PCI bus, from JAX. Google's network and storage cards have the same vendor.
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_CHIPS = {
    "0x0027": "TPU v2 or v3", "0x005e": "TPU v4", "0x0062": "TPU v5p", "0x0063": "TPU v5e",
    "0x006f": "TPU v6e", "0x0076": "TPU7x",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TPUAddress:
    """Where a TPU is: on this machine, at workers reached by gRPC, or where Google's API says that its name is."""

    kind: Literal["local", "addresses", "name"]
    target: str  # the argument of `TPUClusterResolver`
    reason: str  # how it was found
    project: str | None = None  # of a named TPU; `None` to ask the metadata server
    zone: str | None = None  # likewise

    @property
    def addresses(self) -> list[str]:
        """`"host:port"` of each worker of the kind `"addresses"`."""
        return [part.removeprefix(_GRPC) for part in self.target.split(",")] if self.kind == "addresses" else []


def find(name: str | None, environ: Mapping[str, str], devices: Path = _PCI_DEVICES) -> TPUAddress:
    """Returns where the TPU is; `name` is what the script calls it: `"local"`, addresses, a name, or `None`."""
    if name is not None and not isinstance(name, str):
        raise _unreadable("name", name)
    if name:
        return _read(name, "name", "chosen by the script")
    for variable in (GKE, NAME):
        if environ.get(variable):
            return _read(environ[variable], variable, f"found by {variable}")
    if text := environ.get(CONFIG):  # of Google's older training services
        try:
            config = json.loads(text)
            named = config["tpu_node_name"]
        except (ValueError, KeyError, TypeError):
            raise _unreadable(CONFIG, text) from None
        found = _read(str(named), CONFIG, f"found by {CONFIG}")
        return dataclasses.replace(found, project=config.get("project"), zone=config.get("zone"))
    if chips := local_chips(devices):
        return TPUAddress("local", "local", f"found {len(chips)} x {chips[0]}")
    raise ConfigurationError(
        "No TPU was found.",
        f"no name, neither {GKE}, {NAME} nor {CONFIG} in the environment, no TPU chip on this machine's PCI bus",
        "On a TPU VM, Colab or Kaggle, choose a TPU as the machine's accelerator. Name a TPU elsewhere: "
        "kd.init(kd.TPU('my-tpu')) or kd.TPU('grpc://10.0.0.2:8470'). To try a model without a TPU: "
        "`keras-dist dry-run train.py --target v5e-8`.",
    )


def local_chips(devices: Path = _PCI_DEVICES) -> list[str]:
    """Returns the kinds of the TPU chips on the PCI bus of this machine."""
    chips = []
    for device in sorted(devices.glob("*")):
        try:
            vendor, model = ((device / part).read_text().strip() for part in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and model in _CHIPS:
            chips.append(_CHIPS[model])
    return chips


def check_worker(place: TPUAddress, environ: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` on a host that can't lead its pod slice: worker 0 does, and names the whole slice."""
    hosts = [host for host in environ.get(WORKER_HOSTS, "").split(",") if host]
    if len(hosts) < 2:
        return
    worker = environ.get(WORKER_ID, "0")
    received = f"{WORKER_ID}={worker}, {WORKER_HOSTS} of {len(hosts)} hosts, TPU {place.target!r}"
    if worker != "0":
        raise ConfigurationError(
            "A pod slice is led by one process, on its worker 0.",
            received,
            "Start the script on worker 0 only: `gcloud compute tpus tpu-vm ssh NAME --worker=0`.",
        )
    if place.kind == "local":
        raise ConfigurationError(
            "This host is one of several in a pod slice, and 'local' reaches its own chips only.",
            received,
            f"Name the whole slice: `export {NAME}=<the name of the TPU> TPU_LOAD_LIBRARY=0`, then start the script "
            "on worker 0.",
        )


def _read(text: str, variable: str, reason: str) -> TPUAddress:
    text = text.strip()
    if text == "local":
        return TPUAddress("local", "local", reason)
    if _GRPC in text or "," in text or ":" in text:  # not in the name of a TPU
        addresses = []
        for part in filter(None, map(str.strip, text.split(","))):
            found = _ADDRESS.fullmatch(part.removeprefix(_GRPC))
            if found is None or int(port := found["port"] or _PORT) >= 2**16:
                raise _unreadable(variable, text)
            addresses.append(f"{_GRPC}{found['host']}:{port}")
        return TPUAddress("addresses", ",".join(addresses), reason)
    if not _TPU_NAME.fullmatch(text):
        raise _unreadable(variable, text)
    return TPUAddress("name", text, reason)


def _unreadable(variable: str, value: object) -> ConfigurationError:
    example = '{"tpu_node_name": "my-tpu"}' if variable == CONFIG else "'local', 'my-tpu' or 'grpc://10.0.0.2:8470'"
    return ConfigurationError(
        "The name of the TPU is invalid." if variable == "name" else f"The name of the TPU in {variable} is invalid.",
        f"{variable}={value!r}",
        f"Pass for example {example}. Separate the addresses of several workers by commas.",
    )


# The oldest libtpu that works with a minor version of tensorflow-tpu, the newest, and the one to install. Others are
# unknown and not checked.
_PAIRS = {"2.19": ("0.0.10", "0.0.10", "0.0.10"), "2.20": ("0.0.14", "0.0.30", "0.0.23")}
TENSORFLOW = "tensorflow-tpu"


def check_before_tensorflow() -> None:
    """Raises `ConfigurationError` if TensorFlow is not imported yet and importing it would kill this process."""
    if "tensorflow" not in sys.modules:
        check()


def check(version_of: Callable[[str], str | None] = installed_version) -> None:
    """Raises `ConfigurationError` if the installed libtpu doesn't fit the installed tensorflow-tpu."""
    tensorflow = version_of(TENSORFLOW)
    fitting = _PAIRS.get(".".join((tensorflow or "").split(".")[:2]))
    if fitting is None:
        return
    oldest, newest, to_install = fitting
    libtpu = version_of("libtpu")
    if libtpu is not None and _release(oldest) <= _release(libtpu) <= _release(newest):
        return
    raise ConfigurationError(
        f"The installed libtpu doesn't fit {TENSORFLOW} {tensorflow}: importing TensorFlow would kill the process."
        if libtpu
        else f"{TENSORFLOW} {tensorflow} is installed without libtpu, so it can't use a TPU.",
        f"libtpu {libtpu or 'not installed'}; {TENSORFLOW} {tensorflow} runs with "
        + (oldest if oldest == newest else f"{oldest} to {newest}"),
        f"Install the pair: python -m pip install '{TENSORFLOW}=={tensorflow}' 'libtpu=={to_install}'",
    )


def _release(version: str) -> tuple[int, ...]:
    """Returns the release of a version as numbers, `(0, 0, 23)` for `0.0.23.dev1`."""
    return tuple(map(int, itertools.takewhile(str.isdecimal, version.split(".")[:3])))
