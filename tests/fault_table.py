"""The faults, the ways to start a job, and what is promised of each pair: the rows of docs/faults.md."""

import dataclasses
import re

JOBS = {
    "run-horovod": "`keras-dist run -np 2`, horovod",
    "run-multi-worker": "`keras-dist run -np 2 --backend multi_worker`",
    "run-parameter-server": "`keras-dist run --workers 2 --ps 1`, parameter_server",
    "horovodrun": "`horovodrun -np 2`, horovod",
    "tf-config": "`TF_CONFIG` and two processes, multi_worker: no launcher",
    "one-process": "`python train.py`, mirrored; central_storage and tpu are alike",
}
FAULTS = {
    "kill": "`kill -9`",
    "term": "SIGTERM",
    "hup": "SIGHUP",
    "pause": "SIGSTOP, resumes after 5 s",
    "stop": "SIGSTOP for ever",
    "exit": "`os._exit(0)`",
    "leave": "`sys.exit(0)` in a callback",
    "raise": "an exception in a callback",
    "data": "an exception in the data set",
    "step": "an error in the step",
    "memory": "out of memory (a cgroup's limit)",
    "full": "a full disk at a checkpoint",
    "read-only": "a read-only disk at a checkpoint",
    "deleted": "the checkpoint's folder is deleted",
    "launcher": "`kill -9` of the launcher",
}
IMPOSSIBLE = {
    ("tf-config", "launcher"): "there is none",
    ("one-process", "launcher"): "there is none",
    ("one-process", "stop"): "no other process is left that could notice",
}
ON_DISK = ("full", "read-only", "deleted")  # happen to the chief, the only one who saves
# What `make test` runs, and what CI adds: a job of each launcher.
USUAL = (("run-horovod", "kill"),)
CI = (
    ("run-horovod", "stop"), ("run-multi-worker", "stop"), ("run-parameter-server", "kill"),
    ("horovodrun", "exit"), ("tf-config", "data"), ("one-process", "read-only"),
)  # fmt: skip

ANSWER_SECONDS = 4  # the time limit for answers that the tests set
_STOPPED_SECONDS = ANSWER_SECONDS + 15.0  # the others end, the one that is stopped is killed
_GOES_ON_SECONDS = 60.0  # the rest of the training, on a busy machine
# From the fault to the end of the last process. Without our launcher the ranks have to find out by themselves, and
# horovodrun gives each of them 5 s to end.
_ENDED_SECONDS = {"tf-config": 10.0, "horovodrun": 15.0}
_CONTRACT_SECONDS = 5.0

_SIGNALS = {"kill": ("SIGKILL", 137), "term": ("SIGTERM", 143), "hup": ("SIGHUP", 129), "memory": ("SIGKILL", 137)}
ERRORS = {
    "raise": "ValueError: this callback is on fire",
    "data": "ValueError: this data set is on fire",
    "step": "this step is on fire",
    "full": "OSError: [Errno 28] No space left on device",
    "read-only": "OSError: [Errno 30] Read-only file system",
}


@dataclasses.dataclass(frozen=True)
class Promise:
    """What is promised of a job."""

    says: str | None  # a regular expression for the cause; `None` if nobody is left who could name it
    code: int  # as a shell shows it
    seconds: float = _CONTRACT_SECONDS  # from the fault to the end of the last process
    goes_on: bool = False  # the training continues to its end
    lines: int = 40  # so many last lines may have the cause
    shows: str = ""  # a regular expression for what the whole output shows too


def promise(job: str, fault: str) -> Promise | None:
    """Returns what is promised, `None` if the fault is not possible there."""
    if (job, fault) in IMPOSSIBLE:
        return None
    if fault in ("pause", "deleted"):  # Keras makes the folder again
        return Promise("trained to the end", 0, _GOES_ON_SECONDS, goes_on=True)
    if fault == "launcher":
        return Promise(None, 137, _ENDED_SECONDS.get(job, _CONTRACT_SECONDS))
    of_job = {
        "run-parameter-server": _parameter_servers,
        "one-process": _one_process,
        "horovodrun": _horovodrun,
        "tf-config": _tf_config,
    }
    return of_job.get(job, _our_launcher)(fault)


def _our_launcher(fault: str) -> Promise:
    """The very last line names the rank."""
    if fault in _SIGNALS:
        name, code = _SIGNALS[fault]
        why = r" \(if not by you, then by the kernel, out of memory: see `dmesg`\)" if fault == "memory" else ""
        return Promise(f"rank 1 was killed by {name}{why}", code, lines=1)
    if fault == "stop":
        shows = rf"rank 1 shows no life|has not answered for {ANSWER_SECONDS} s"
        return Promise(r"rank 1 was stopped \(SIGSTOP, or a debugger\)", 147, _STOPPED_SECONDS, lines=1, shows=shows)
    if fault in ("exit", "leave"):
        shows = r"rank 1 (shows no life|has ended without an error|at \S+ (has ended|does not answer any more))"
        return Promise(r"rank 1 exited \(code 0\) while others still needed it", 1, lines=1, shows=shows)
    rank = 0 if fault in ON_DISK else 1
    return Promise(f"rank {rank} exited with code 1", 1, lines=1, shows=re.escape(ERRORS[fault]))


def _parameter_servers(fault: str) -> Promise:
    """A lost worker does not end the training. Only the coordinator runs the script."""
    if fault in _SIGNALS:
        says = f"rank 2 was killed by {_SIGNALS[fault][0]}.* Rank 0, the coordinator, continues"
        return Promise(says, 0, _GOES_ON_SECONDS, goes_on=True)
    if fault == "stop":
        says = rf"worker 1 at \S+ is lost \(no answer for {ANSWER_SECONDS} s\); 1 of 2 continue"
        return Promise(says, 0, _GOES_ON_SECONDS, goes_on=True)
    if fault in ("exit", "leave"):
        return Promise(None, 0, _STOPPED_SECONDS)
    return Promise("rank 0 exited with code 1", 1, _STOPPED_SECONDS, lines=1, shows=re.escape(ERRORS[fault]))


def _horovodrun(fault: str) -> Promise:
    seconds = _ENDED_SECONDS["horovodrun"]
    if fault in _SIGNALS:
        return Promise("Process name: 1", 1, seconds)
    if fault == "stop":
        return Promise("rank 1 shows no life", 1, seconds + _STOPPED_SECONDS)
    if fault in ("exit", "leave"):
        return Promise("rank 1 (shows no life|has ended without an error)", 1, seconds)
    return Promise(re.escape(ERRORS[fault]), 1, seconds)


def _tf_config(fault: str) -> Promise:
    seconds = _ENDED_SECONDS["tf-config"]
    if fault in (*_SIGNALS, "exit"):
        return Promise(r"rank 1 at \S+ does not answer any more", 1, seconds)
    if fault == "stop":
        return Promise(rf"rank 1 at \S+ has not answered for {ANSWER_SECONDS} s", 1, seconds + ANSWER_SECONDS)
    if fault == "leave":
        return Promise(r"rank 1 at \S+ has ended", 1, seconds)
    return Promise(re.escape(ERRORS[fault]), 1, seconds)


def _one_process(fault: str) -> Promise:
    """The shell shows the signal; an exception ends Python."""
    if fault in _SIGNALS:
        return Promise(None, _SIGNALS[fault][1])
    if fault in ("exit", "leave"):
        return Promise(None, 0)
    return Promise(re.escape(ERRORS[fault]), 1)
