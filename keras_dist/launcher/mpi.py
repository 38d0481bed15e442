"""Ranks on this machine that send by Open MPI, through shared memory, instead of by Gloo.

A process can join others by MPI only if it was described to a server of PMIx, which `mpirun` is. Here `mpirun` starts
one `sleep` for each rank, and the launcher starts the ranks itself, each with the environment of one of these
placeholders. So output, logs, failures and restarts are those of every other cluster. `mpirun` removes the segments of
shared memory of ranks that have died, and ends with the cluster.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.launcher.cluster import Cluster, inherited
from keras_dist.launcher.descendants import JOB
from keras_dist.launcher.nodes import LOOPBACK

MPI_PACKAGES = "sudo apt-get install -y openmpi-bin libopenmpi-dev"
_START_SECONDS = 30.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.01
_OPTIONS = (
    "--bind-to", "none",  # kd.init() gives each rank its cores
    "--mca", "pml", "ob1", "--mca", "btl", "self,vader",  # shared memory only
    "--mca", "oob_tcp_if_include", "lo",
    "--mca", "odls_base_sigkill_timeout", "0",  # the placeholders have nothing to save
)  # fmt: skip


class MPICluster(Cluster):
    """A cluster for Horovod over Open MPI. Nothing of it leaves this machine.

    Raises:
        ConfigurationError: If Horovod was built without MPI, or `mpirun` is missing or fails.
    """

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        check_mpi(environ)
        super().__init__(size, environ)
        self._mpirun = self._start_mpirun()
        try:
            self._places = self._wait_for_places()
        except BaseException:
            self.close()
            raise

    def _variables(self, rank: int) -> dict[str, str]:
        return {
            # Ranks that wait let others compute: without it a rank that shares its core takes the time of another.
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **self._places[rank],
            "HOROVOD_CONTROLLER": "mpi",
            "HOROVOD_CPU_OPERATIONS": "mpi",
            environment.STORE: f"{LOOPBACK}:{self.port}",
        }

    def close(self) -> None:
        self._mpirun.terminate()
        try:
            self._mpirun.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._mpirun.kill()
            self._mpirun.communicate()
        super().close()

    def _start_mpirun(self) -> subprocess.Popen[bytes]:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        place = ["--host", f"{LOOPBACK}:{self.size}", "-np", str(self.size)]
        # Killed by SIGKILL it would leave files behind. If the launcher dies, `descendants` ends it.
        return subprocess.Popen(
            ["mpirun", *root, *_OPTIONS, *place, "sleep", "infinity"],
            env={**inherited(self._environ), JOB: self.job},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _wait_for_places(self) -> list[dict[str, str]]:
        """Returns the variables with which `mpirun` describes each rank."""
        deadline = time.monotonic() + _START_SECONDS
        while self._mpirun.poll() is None and time.monotonic() < deadline:
            found = {int(place["OMPI_COMM_WORLD_RANK"]): place for place in self._places_now()}
            if len(found) == self.size:
                return [found[rank] for rank in range(self.size)]
            time.sleep(_POLL_SECONDS)
        self._mpirun.kill()
        output, _ = self._mpirun.communicate()
        raise ConfigurationError(
            "`mpirun` could not describe the ranks.",
            output.decode(errors="replace").strip() or f"nothing within {_START_SECONDS:g} s",
            "Use Gloo: HOROVOD_CONTROLLER=gloo.",
        )

    def _places_now(self) -> list[dict[str, str]]:
        places = []
        for child in _children(self._mpirun.pid):
            try:
                raw = Path(f"/proc/{child}/environ").read_bytes().decode(errors="surrogateescape")
            except OSError:  # it has ended
                continue
            variables = dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
            if "OMPI_COMM_WORLD_RANK" in variables:
                places.append(dict(variables.items() - inherited(self._environ).items()))
        return places


def check_mpi(environ: Mapping[str, str]) -> None:
    """Checks that ranks can use MPI here.

    Raises:
        ConfigurationError: If Horovod was built without MPI, or `mpirun` is missing.
    """
    if not built_with_mpi():
        raise ConfigurationError(
            "The installed Horovod was built without MPI.",
            "HOROVOD_CONTROLLER=mpi",
            "Build it with `keras-dist install-horovod --mpi`, or leave the variable out.",
        )
    if shutil.which("mpirun", path=environ.get("PATH")) is None:
        raise ConfigurationError("`mpirun` is not on the PATH.", "HOROVOD_CONTROLLER=mpi", MPI_PACKAGES)


def built_with_mpi() -> bool:
    """Returns whether the installed Horovod is linked with MPI. Importing it would take seconds."""
    try:
        found = importlib.util.find_spec("horovod.tensorflow")
    except ImportError:  # it is not installed
        return False
    folders = found.submodule_search_locations if found is not None else None
    libraries = [library for folder in folders or () for library in Path(folder).glob("mpi_lib*.so")]
    return any(b"\0libmpi" in library.read_bytes() for library in libraries)


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
