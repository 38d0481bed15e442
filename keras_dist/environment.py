"""The rank of this process among the others."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_dist import store
from keras_dist.errors import ConfigurationError
from keras_dist.permissions import write_whole


@dataclasses.dataclass(frozen=True)
class Topology:
    """The rank of this process in the cluster. It never changes after `kd.init()`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes on the same host
    local_size: int = 1

    @property
    def is_chief(self) -> bool:
        """True on the one process that writes files and shows progress."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


GLIBC_TUNABLES = "GLIBC_TUNABLES"  # glibc's own
LOG_LEVEL = "KERAS_DIST_LOG"
BACKEND = "KERAS_DIST_BACKEND"
BIND = "KERAS_DIST_BIND"
HOROVOD_CONTROLLER = "HOROVOD_CONTROLLER"  # Horovod's own: gloo or mpi
COMMITTED = "KERAS_DIST_COMMITTED"  # the file in which the chief notes its commits for `keras-dist run`
INITIALIZED_BY = "KERAS_DIST_INITIALIZED_BY"
JOIN_TIMEOUT = "KERAS_DIST_JOIN_TIMEOUT"
LAUNCHER = "KERAS_DIST_LAUNCHER"
NNODES = "KERAS_DIST_NNODES"
NODE_RANK = "KERAS_DIST_NODE_RANK"
RENDEZVOUS = "KERAS_DIST_RENDEZVOUS"
SECRET = "KERAS_DIST_SECRET"  # which the launchers of all nodes of a job know
PLACE = "KERAS_DIST_PLACE"  # of a rank among those of its own launcher: "1/4" is the second of four
PYTHON_BREAKPOINT = "PYTHONBREAKPOINT"
STORE = "KERAS_DIST_STORE"
TENSORFLOW_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
TF_CONFIG = "TF_CONFIG"
TPU_CHECK = "KERAS_DIST_TPU_CHECK"
TPU_LOG_DIR = "TPU_LOG_DIR"
VERIFY = "KERAS_DIST_VERIFY"
WAIT_TIMEOUT = "KERAS_DIST_WAIT_TIMEOUT"
ANSWER_TIMEOUT = "KERAS_DIST_ANSWER_TIMEOUT"

# What launchers, schedulers and users set for ranks, except secrets.
_OF_LAUNCHERS = (
    "CUDA_VISIBLE_DEVICES", "HOROVOD_", "KERAS_DIST_", "NCCL_", "OMPI_COMM_WORLD_", "PET_", "PMI_", "SLURM_", "SLURMD_",
    TF_CONFIG, "TPU_",
)  # fmt: skip
_SECRET = ("JWT", "KEY", "PASSWORD", "SECRET", "TOKEN")

COMMITTED_EXIT_CODE = os.EX_TEMPFAIL  # of a rank that was asked to stop and has committed: 75, restart me


def current() -> dict[str, str]:
    """Returns a copy."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    return os.environ.get(name, default)


def launcher_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_OF_LAUNCHERS) and not any(word in name for word in _SECRET)
    }


def seconds(name: str, default: float) -> float:
    """Returns a time limit that the user may have set, or `default`."""
    text = get(name)
    try:
        number = default if text is None else float(text)
    except ValueError:
        number = -1
    if number <= 0:
        raise ConfigurationError(
            f"{name} must be a positive number of seconds.", f"{name}={text!r}",
            f"Unset it for the default of {default:g} s.",
        )
    return number


def join_seconds() -> float:
    return seconds(JOIN_TIMEOUT, 300.0)


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution, `None` if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def cores() -> int:
    """Returns how many this process may use."""
    return len(os.sched_getaffinity(0))


def cache_folder() -> Path:
    return _folder("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """For what keras_dist has to remember for this user that is no cache."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    home = os.environ.get(variable)
    # The XDG specification: a relative path is invalid and must be ignored.
    return (Path(home) if home and Path(home).is_absolute() else Path.home() / default) / "keras_dist"


def set_defaults(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_values(values: Mapping[str, str]) -> None:
    os.environ.update(values)


def note_commit(step: int) -> None:
    """Tells `keras-dist run --max-restarts` that ranks that crash later have come further than those before."""
    if path := get(COMMITTED):
        with contextlib.suppress(OSError):  # training continues, though it may not be restarted
            write_whole(Path(path), str(step).encode())


def check_host_name(several_hosts: bool) -> None:
    """Checks that the name of this host has an address, which Gloo's rings use if Horovod 0.28.1 is not patched.

    Without one Gloo crashes; ranks of `several_hosts` can't connect to a loopback one.
    """
    name = socket.gethostname()
    address = "the address of this host in its network" if several_hosts else "127.0.1.1"
    remedy = (
        "Build Horovod with `keras-dist install-horovod`, which patches this; or give the name an address, with a line "
        f"of /etc/hosts: {address}, and {name}."
    )
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError as error:
        problem = "The name of this host has no address. This Horovod's Gloo needs one, and would crash."
        raise ConfigurationError(problem, f"host name {name!r} ({error})", remedy) from error
    if several_hosts and all(address.startswith("127.") for address in found):
        raise ConfigurationError(
            "The name of this host leads to its loopback interface, where this Horovod's Gloo would listen for ranks "
            "of other hosts.",
            f"host name {name!r}, which is {', '.join(sorted(found))}", remedy,
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher has set in the environment of this process."""

    launcher: str  # its name, for messages
    topology: Topology
    rendezvous: tuple[str, int] | None = None  # the launcher's key-value store; `mpirun` has none
    # "host:port" of every rank, in rank order, for TensorFlow's own collectives; empty with a launcher of Horovod
    workers: tuple[str, ...] = ()
    jobs: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)  # addresses, with parameter servers
    task: tuple[str, int] = ("chief", 0)  # job and index of this process in `jobs`
    is_mpi: bool = False  # `mpirun`, which itself gives each rank its cores
    # Rank and number of ranks of its own launcher or task of Slurm; there may be others on the host.
    place: tuple[int, int] | None = None

    @property
    def is_srun(self) -> bool:
        """True for a task of `srun` that no launcher of ours has started."""
        return self.launcher == "srun"


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Returns what the launcher of this process set in the environment, `None` for plain `python`."""
    environ = os.environ if environ is None else environ
    return _horovod_launch(environ) or _tf_config_launch(environ) or _slurm_launch(environ)


def refuse_lone_node() -> None:
    """Raises `ConfigurationError` for plain `python` on one of several nodes: each would train alone, as the chief."""
    for name in (NNODES, "PET_NNODES"):  # of `keras-dist kube`, of a TrainJob
        count = get(name, "")
        if count and count.isdecimal() and int(count) > 1:
            raise ConfigurationError(
                "This is one of several nodes, and nothing joins them: each would train alone.",
                f"{name}={count}, and a process that `keras-dist run` has not started",
                f"Start the script with `keras-dist run train.py` on each node, or set {BACKEND}=serial.",
            )


def _horovod_launch(environ: Mapping[str, str]) -> Launch | None:
    """`keras-dist run` and `horovodrun --gloo` set Horovod's variables; `horovodrun --mpi` calls `mpirun`."""
    if "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ:
        address, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), "HOROVOD_GLOO_RENDEZVOUS_PORT"
        rendezvous = (address, _integer(environ, port)) if address and environ.get(port) else None
        launcher = "keras-dist run" if environ.get(LAUNCHER) else "horovodrun"
        return Launch(launcher, _topology(environ, "HOROVOD_"), rendezvous, place=_place(environ))
    if "OMPI_COMM_WORLD_RANK" in environ:
        return Launch("mpirun", _topology(environ, "OMPI_COMM_WORLD_"), is_mpi=True)
    return None


def _place(environ: Mapping[str, str]) -> tuple[int, int] | None:
    rank, _, ranks = environ.get(PLACE, "").partition("/") if environ.get(LAUNCHER) else ("", "", "")
    return (int(rank), int(ranks)) if rank.isdecimal() and ranks.isdecimal() else None


def _topology(environ: Mapping[str, str], prefix: str) -> Topology:
    return Topology(*(_integer(environ, prefix + name) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"The launcher's environment is incomplete: {name} must be an integer.", f"{name}={environ.get(name)!r}",
            "Start the script with `keras-dist run -np N train.py` or `horovodrun -np N python train.py`, "
            "or unset the HOROVOD_* variables of an earlier launch.",
        ) from None


# --- TF_CONFIG ---

_NAMES = {"master": "chief", "coordinator": "chief"}  # other names of the same


def _tf_config_launch(environ: Mapping[str, str]) -> Launch | None:
    """`TF_CONFIG`: set by Kubernetes operators, Vertex AI, by hand, and by `keras-dist run`.

    Rank 0 is the chief, or worker 0 if there is no chief. An evaluator does not count, since it does not train. With
    parameter servers only the coordinator runs the script, and it is no rank.
    """
    text = environ.get(TF_CONFIG)
    try:
        config = json.loads(text or "{}")
    except ValueError as error:
        raise _bad_tf_config("TF_CONFIG is not JSON.", f"TF_CONFIG={text!r} ({error})") from None
    if not isinstance(config, dict) or not isinstance(config.get("cluster") or {}, dict):
        raise _bad_tf_config("TF_CONFIG must be a JSON object with `cluster` and `task`.", f"TF_CONFIG={text!r}")
    cluster: dict[str, list[str]] = {}
    for name, tasks in (config.get("cluster") or {}).items():
        cluster.setdefault(_NAMES.get(name, name), []).extend(_addresses(tasks))
    if not any(cluster.values()):  # some services describe a job of one process like this
        return None
    task = config.get("task") or {}
    job, index = (str(task.get(name)) for name in ("type", "index"))
    job = _NAMES.get(job, job)
    if job == "evaluator":
        raise _bad_tf_config(
            "TF_CONFIG makes this process an evaluator, but kd.init() joins the ranks that train.",
            "task type 'evaluator'",
            "Evaluate in the training job (`validation_data`, `model.evaluate`: all ranks share the work), or start "
            "this script without TF_CONFIG and load the model that the chief saves.",
        )
    has_servers = bool(cluster.get("ps"))
    jobs = [*cluster] if has_servers else ["chief", "worker"]
    if {*cluster} - {*jobs, "evaluator", "ps"} or len(cluster.get("chief", ())) > 1:
        raise _bad_tf_config(
            "The jobs of TF_CONFIG must be 'worker' and at most one 'chief'.",
            ", ".join(f"{name}: {len(tasks)}" for name, tasks in cluster.items()),
        )
    tasks = [(name, str(number)) for name in jobs for number in range(len(cluster.get(name, ())))]
    if (job, index) not in tasks:
        received = f"task {job!r} {index}, cluster of {', '.join(map(' '.join, tasks))}"
        raise _bad_tf_config("The task of TF_CONFIG is not in its cluster.", received)
    launcher = "keras-dist run" if environ.get(LAUNCHER) else TF_CONFIG
    if has_servers:
        return Launch(launcher, Topology(), jobs=cluster, task=(job, int(index)))
    rank = tasks.index((job, index))
    workers = tuple(cluster[name][int(number)] for name, number in tasks)
    hosts = [worker.rpartition(":")[0] for worker in workers]
    topology = Topology(rank, len(workers), hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]))
    host, _, port = environ.get(STORE, "").rpartition(":")
    rendezvous = (host, int(port)) if port.isdecimal() else None
    return Launch(launcher, topology, rendezvous, workers, place=_place(environ))


def _addresses(tasks: Any) -> list[str]:
    """Returns the addresses of a job, given as a list or as a dict from index to address."""
    if isinstance(tasks, dict):
        tasks = [tasks[key] for key in sorted(tasks, key=int)]
    if not isinstance(tasks, list) or not all(isinstance(t, str) and t.rpartition(":")[2].isdecimal() for t in tasks):
        raise _bad_tf_config("The addresses of a job in TF_CONFIG must be a list of 'host:port'.", repr(tasks))
    return tasks


def _bad_tf_config(problem: str, received: str, remedy: str | None = None) -> ConfigurationError:
    example = '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}'
    return ConfigurationError(problem, received, remedy or f"Set for example TF_CONFIG='{example}', or unset it.")


def processor_features() -> list[str]:
    """Returns the features of this machine's processors, such as `"avx2"`; none if they can't be read."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return value.split()
    return []


# --- Slurm ---

PORTS = range(20000, 30000)  # below those from which Linux assigns ports
_LARGEST_STEP = 0xFFFFFFF0  # <slurm/slurm.h>: larger ones are no steps of `srun`, but the batch script, `salloc`, ...


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """True for a task of `srun`. The shell of `salloc` and the script of `sbatch` are none."""
    step = environ.get("SLURM_STEP_ID", "")
    is_step = step.isdecimal() and int(step) < _LARGEST_STEP
    return is_step and bool(environ.get("SLURM_STEP_NUM_TASKS") and environ.get("SLURM_PROCID"))


def slurm_gpus() -> int | None:
    """Returns how many GPUs the job has on this host, all tasks together. `None` if Slurm does not say it."""
    number = get("SLURM_GPUS_ON_NODE", "")
    return int(number) if number and number.isdecimal() else None


def slurm_binds(environ: Mapping[str, str]) -> bool:
    """True if Slurm has bound each task of this step to cores of its own."""
    return is_slurm_task(environ) and bool(environ.get("SLURM_CPU_BIND_LIST"))


def slurm_cores(environ: Mapping[str, str]) -> int | None:
    """Returns how many cores this task of Slurm asked for, if it may use others too."""
    number = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(number) if number.isdecimal() and is_slurm_task(environ) and not slurm_binds(environ) else None


def slurm_place(environ: Mapping[str, str]) -> tuple[Topology, list[str], list[int]]:
    """Returns the place of this task of `srun` among all, and the hosts of the step with their numbers of tasks.

    The ranks are numbered by hosts, whatever Slurm's distribution is: each task knows how many there are on each host,
    but not which. By default these are Slurm's own numbers. `SLURM_NODEID` may count the hosts in another order than
    the list has: that of the components of a heterogeneous step.
    """
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    own, local_rank = environ.get("SLURMD_NODENAME", ""), _number(environ, "SLURM_LOCALID")
    fits = len(hosts) == len(counts) and sum(counts) == _number(environ, "SLURM_STEP_NUM_TASKS") and own in hosts
    if not fits or not 0 <= local_rank < counts[hosts.index(own)] or _number(environ, "SLURM_JOB_ID") < 0:
        raise _bad_step("Slurm's variables for this step do not fit each other.", environ)
    host = hosts.index(own)
    return Topology(sum(counts[:host]) + local_rank, sum(counts), local_rank, counts[host]), hosts, counts


def _number(environ: Mapping[str, str], name: str) -> int:
    return int(text) if (text := environ.get(name, "")).isdecimal() else -1


def _slurm_launch(environ: Mapping[str, str]) -> Launch | None:
    """`srun python train.py` with several tasks: each is a rank. Those of a launcher of ours have its variables."""
    if environ.get(LAUNCHER) or not is_slurm_task(environ) or environ["SLURM_STEP_NUM_TASKS"] == "1":
        return None
    topology, hosts, counts = slurm_place(environ)
    # Ports of their own for each step, also if several jobs, whose numbers are close, share a node.
    step = 31 * _number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID")
    first = PORTS[step * max(counts) % (len(PORTS) - max(counts))]
    places = zip(hosts if len(hosts) > 1 else [store.LOOPBACK], counts, strict=True)
    workers = tuple(f"{host}:{first + index}" for host, count in places for index in range(count))
    return Launch("srun", topology, workers=workers, place=(0, 1))


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list in Slurm's form.

    >>> expand_hosts("gpu[07-09,12],x1")
    ['gpu07', 'gpu08', 'gpu09', 'gpu12', 'x1']
    """
    part = r"(?:[^][,\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", text):
        raise _bad_step(f"Slurm's list of nodes can't be read: {text!r}.", os.environ)
    return [host for hosts in re.findall(part, text) for host in _expand_ranges(hosts)]


def _expand_ranges(text: str) -> list[str]:
    before, bracket, rest = text.partition("[")
    if not bracket:
        return [text]
    ranges, _, after = rest.partition("]")
    bounds = [(low, high or low) for low, _, high in (numbers.partition("-") for numbers in ranges.split(","))]
    numbers = [f"{n:0{len(low)}}" for low, high in bounds for n in range(int(low), int(high) + 1)]
    return [before + number + end for number in numbers for end in _expand_ranges(after)]


def tasks_per_node(text: str) -> list[int]:
    """Returns how many tasks each node has, from a list in Slurm's form; `[]` if it has another one.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    if not re.fullmatch(r"(\d+(\(x\d+\))?,)+", f"{text},"):
        return []
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def check_slurm_names(workers: Sequence[str]) -> None:
    """Checks that the hosts of ranks, which `srun` has started, have addresses. Otherwise TensorFlow would wait."""
    for host in dict.fromkeys(worker.rpartition(":")[0] for worker in workers):
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            problem = f"The name of a node of this step has no address: {host} ({error})."
            remedy = (
                "Start the ranks with `srun keras-dist run train.py`, whose launchers need the name of the first node "
                "only, or an address: `--rendezvous ADDRESS:PORT`."
            )
            raise _bad_step(problem, os.environ, remedy) from error


def _bad_step(problem: str, environ: Mapping[str, str], remedy: str = "") -> ConfigurationError:
    names = (
        "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURMD_NODENAME",
        "SLURM_JOB_ID", "SLURM_STEP_ID",
    )  # fmt: skip
    by_hand = "`keras-dist run --nnodes N --node-rank I --rendezvous HOST:PORT -np 1 train.py`"
    return ConfigurationError(
        problem, ", ".join(f"{name}={environ.get(name)}" for name in names),
        remedy or f"Start {by_hand} in each task, with SLURM_STEP_ID unset.",
    )  # fmt: skip
