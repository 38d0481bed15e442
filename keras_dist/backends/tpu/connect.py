"""Connects to a TPU within a time limit, and explains what went wrong."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from keras_dist import environment
from keras_dist.backends.tpu import place as tpu_place
from keras_dist.backends.tpu.place import TPUAddress
from keras_dist.comm.watchdog import call_in_thread, why_no_grpc
from keras_dist.errors import ConfigurationError, DistributionError, PeerLostError
from keras_dist.logging import logger

_Result = TypeVar("_Result")
# Distributions of TensorFlow without TPU support. Others may have it, such as that in the image of a TPU VM.
_WITHOUT_TPU = ("tensorflow", "tensorflow-cpu")


def connect(place: TPUAddress, seconds: float) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Connects to a TPU and initializes it. Each of finding, connecting and initializing may take `seconds`."""
    start = time.monotonic()
    _wait_for_servers(place.addresses, seconds)
    resolver = _within(seconds, place, "find", lambda: resolve(place))
    workers = [address for addresses in resolver.cluster_spec().as_dict().values() for address in addresses]
    _wait_for_servers(workers, seconds)
    if workers:
        _within(seconds, place, "connect to", lambda: tf.config.experimental_connect_to_cluster(resolver))
    try:
        _within(seconds, place, "initialize", lambda: tf.tpu.experimental.initialize_tpu_system(resolver))
    except tf.errors.OpError as error:
        raise _not_initialized(place, workers, error) from error
    logger().debug("TPU %s (%s): initialized in %.1f s", place.target, place.reason, time.monotonic() - start)
    return resolver


def resolve(place: TPUAddress, service: Any = None) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Returns TensorFlow's resolver of a TPU, with its workers' addresses. `service`: Google's API by default."""
    make = tf.distribute.cluster_resolver.TPUClusterResolver
    try:
        resolver = make(place.target, zone=place.zone, project=place.project, service=service)
        resolver.cluster_spec()  # asks the API
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_resolved(place, error) from error
    return resolver


def _wait_for_servers(addresses: Sequence[str], seconds: float) -> None:
    """Waits until a gRPC server answers at each address. TensorFlow would wait forever and ignore Ctrl-C."""
    deadline = time.monotonic() + seconds
    missing = dict.fromkeys(addresses, "")
    while missing := {address: why for address in missing if (why := why_no_grpc(address))}:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"Not all workers of the TPU answer; waited {seconds:g} s.",
                f"{', '.join(f'{address} ({why})' for address, why in missing.items())}; "
                f"{len(addresses) - len(missing)} of {len(addresses)} answer",
                "Check the addresses and the firewall, and that the workers run TensorFlow's server (on a pod slice "
                "of TPU VMs: a runtime version that ends in -pod). If they need more time, set "
                f"{environment.JOIN_TIMEOUT} (seconds).",
            )
        time.sleep(0.2)


def _within(seconds: float, place: TPUAddress, what: str, function: Callable[[], _Result]) -> _Result:
    """Calls a function that may wait forever: for a metadata server that does not answer, or a TPU that is in use."""
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"The TPU didn't answer within {seconds:g} s.",
                f"tried to {what} {place.target!r} ({place.reason})",
                "Check that no other process uses the TPU, that its state is READY, and that TensorFlow's server "
                f"listens at its addresses. If it needs more time, set {environment.JOIN_TIMEOUT} (seconds).",
            )

    return call_in_thread(function, check)


def _not_resolved(place: TPUAddress, error: Exception) -> DistributionError:
    words, received = str(error), f"TPU {place.target!r}, {place.reason}"
    by_address = "or give the workers' addresses: kd.TPU('grpc://10.0.0.2:8470')"
    if "Google API client" in words:
        return ConfigurationError(
            "A TPU is named, but the packages that look up its address are not installed.",
            received,
            f"python -m pip install google-api-python-client oauth2client, {by_address}, or kd.TPU('local') on the "
            "TPU VM itself.",
        )
    if "not yet ready" in words:
        state = words.rpartition("state: ")[2].strip('"')
        return ConfigurationError(
            "The TPU is not ready.",
            f"{received}, state {state}",
            f"Wait for the state READY: `gcloud compute tpus tpu-vm describe {place.target}`. "
            "Create a preempted or terminated TPU again.",
        )
    if isinstance(error, urllib.error.URLError | OSError):
        return ConfigurationError(
            "A TPU is named, but Google's metadata server, which knows its zone, can't be reached.",
            f"{received} ({words})",
            f"Start the script on a VM of the TPU's project, {by_address}.",
        )
    if "Could not lookup TPU metadata" in words:
        return ConfigurationError(
            "Google's API doesn't know the TPU, or doesn't answer this machine.",
            f"{received} ({words.partition('Exception: ')[2] or words})",
            "Look for it with `gcloud compute tpus tpu-vm list`, give the VM access to the API (scope "
            f"cloud-platform), {by_address}.",
        )
    return ConfigurationError("The TPU can't be found.", f"{received} ({words})", f"Check its name, {by_address}.")


def _not_initialized(place: TPUAddress, workers: Sequence[str], error: Exception) -> DistributionError:
    where = f"TPU {place.target!r}, {place.reason}"
    plain = [name for name in _WITHOUT_TPU if environment.installed_version(name) is not None]
    if not workers and plain and environment.installed_version(tpu_place.TENSORFLOW) is None:
        return ConfigurationError(
            "The installed TensorFlow can't use a TPU.",
            f"{plain[0]} {environment.installed_version(plain[0])}; {where}",
            f"Install {tpu_place.TENSORFLOW} into its own environment: `make setup TF=tpu` in a clone of keras_dist, "
            "or `python -m pip install '.[tpu]'` in a fresh one.",
        )
    headings = ("", "Graph execution error:")  # the first line of many of TensorFlow's errors
    words = next((line for line in str(error).splitlines() if line.strip() not in headings), "")
    if "unknown device" in words or "No OpKernel" in words or not (workers or tpu_place.local_chips()):
        return ConfigurationError(
            "There is no TPU at the workers." if workers else "There is no TPU on this machine.",
            where + (f", connected to {', '.join(workers)}" if workers else f" ({words})"),
            "The addresses must be those of TPU workers, port 8470."
            if workers
            else f"Unset {tpu_place.NAME} to use this machine without a TPU, or name a TPU elsewhere: "
            "kd.TPU('grpc://10.0.0.2:8470').",
        )
    return ConfigurationError(
        "The TPU can't be initialized.",
        f"{where} ({words})",
        "Check that no other process uses it (`sudo lsof -w /dev/accel* /dev/vfio/*`), and that it is READY.",
    )
