"""What schedulers tell a launcher of its place among the nodes: Slurm, Kubernetes, or the user's own variables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from keras_dist import environment, store
from keras_dist.errors import ConfigurationError

JOB_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes's variable in a pod of an Indexed Job
_FIRST_PORT, _PORTS = 20000, 10000  # below the range from which Linux assigns ports
_LARGEST_STEP = 0xFFFFFFF0  # <slurm/slurm.h>: larger ones are no steps of `srun`, but the batch script, `salloc`, ...


@dataclasses.dataclass(frozen=True)
class Told:
    """What a scheduler tells a launcher.

    Args:
        count: Number of launchers, which are the nodes of the job.
        index: Of this one.
        rendezvous: `"host:port"` of node 0.
        has_munge: Whether MUNGE proves to the launchers that all are of the same user.
        ranks: How many ranks each has, if the user doesn't say it.
        binds: Whether each launcher already has its own cores.
    """

    count: str | None = None
    index: str | None = None
    rendezvous: str | None = None
    has_munge: bool = False
    ranks: int | None = None
    binds: bool = False


def told(environ: Mapping[str, str]) -> Told:
    """Returns what this launcher was told. What the user has set comes before what the scheduler says.

    Raises:
        ConfigurationError: If Slurm's list of nodes can't be read.
    """
    if environ.get(environment.LAUNCHER):  # a rank, whose place is that of its own launcher
        return Told()
    found = next((told for read in SCHEDULERS if (told := read(environ)) is not None), Told())
    return dataclasses.replace(
        found,
        count=environ.get(environment.NNODES) or found.count,
        index=environ.get(environment.NODE_RANK) or found.index,
        rendezvous=environ.get(environment.RENDEZVOUS) or found.rendezvous,
    )


def _slurm(environ: Mapping[str, str]) -> Told | None:
    """A task of `srun`. The shell of `salloc` and the script of `sbatch` are none: a launcher there is alone."""
    step = environ.get("SLURM_STEP_ID", "")
    tasks, index = environ.get("SLURM_STEP_NUM_TASKS"), environ.get("SLURM_PROCID")
    if not step.isdecimal() or int(step) >= _LARGEST_STEP or not tasks or not index:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    host = store.LOOPBACK if environ.get("SLURM_STEP_NUM_NODES") == "1" else first_host(nodes)
    job = environ.get("SLURM_JOB_ID", "0")
    port = _FIRST_PORT + (int(job if job.isdecimal() else 0) + int(step)) % _PORTS
    binds = bool(environ.get("SLURM_CPU_BIND_LIST")) and tasks != environ.get("SLURM_STEP_NUM_NODES")
    return Told(tasks, index, f"{host}:{port}", has_munge=True, ranks=1, binds=binds)


def _indexed_job(environ: Mapping[str, str]) -> Told | None:
    """A pod of an Indexed Job of Kubernetes, also of a JobSet. Its variables say the number of pods and node 0."""
    index = environ.get(JOB_INDEX)
    return Told(index=index) if index and environ.get(environment.NNODES) else None


# In order of preference.
SCHEDULERS: tuple[Callable[[Mapping[str, str]], Told | None], ...] = (_slurm, _indexed_job)


def first_host(nodes: str) -> str:
    """Returns the first host of a list in Slurm's form.

    Raises:
        ConfigurationError: If it has another form.

    Example:

    >>> first_host("gpu[07-09,12],login1"), first_host("rack[2-3]n[1-4]x")
    ('gpu07', 'rack2n1x')
    """
    found = re.match(r"(?:[^\[\],]+|\[\d[\d,-]*\])+", nodes)
    if found is None:
        raise ConfigurationError(
            "Slurm's list of nodes can't be read.", f"SLURM_JOB_NODELIST={nodes!r}", "Set --rendezvous HOST:PORT."
        )
    return re.sub(r"\[(\d+)[\d,-]*\]", r"\1", found[0])
