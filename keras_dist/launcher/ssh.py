"""Starts the launchers of other machines over ssh: `keras-dist run -H a:4,b:4 train.py`.

This launcher leads and has no rank of its own; the others connect to it. Each of them also ends with its connection of
ssh, since it may not have come so far.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, cast

from keras_dist import environment
from keras_dist.errors import ConfigurationError, PeerLostError
from keras_dist.launcher.nodes import LOOPBACK

Host = tuple[str, int]
LOCAL = ("localhost", LOOPBACK)
_BATCH = ("-o", "BatchMode=yes")  # it asks for no password
_END_SECONDS = 2.0
# What a user sets for the ranks. All else is as on a new login there.
_SENT = ("KERAS_DIST_", "HOROVOD_", "TF_", "NCCL_", "OMP_", "CUDA_", "PYTHON", "PATH", "LD_LIBRARY_PATH", "KERAS_")


def parse_hosts(text: str) -> list[Host]:
    """Returns hosts and their numbers of ranks.

    Raises:
        ConfigurationError: If the text has another form.

    Example:

    >>> parse_hosts("a:4,user@b:2")
    [('a', 4), ('user@b', 2)]
    """
    hosts = []
    for part in text.split(","):
        host, _, count = part.strip().rpartition(":")
        # A host that begins with a dash would be an option of ssh.
        if not host or host.startswith("-") or not count.isdecimal() or int(count) < 1:
            raise ConfigurationError("-H must be hosts with a number of ranks each.", f"-H {text}", "Use `-H a:4,b:4`.")
        hosts.append((host, int(count)))
    return hosts


def own_address(hosts: Sequence[Host]) -> str:
    """Returns the IPv4 address of the interface by which this machine reaches the hosts.

    Raises:
        ConfigurationError: If the name of a host has no address.
    """
    for name in [host.rpartition("@")[2] for host, _ in hosts if host not in LOCAL]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:  # sends nothing
            try:
                asking.connect((name, 9))
            except OSError as error:
                raise ConfigurationError(
                    "The name of a host has no address, so it is not known by which interface it can reach this one.",
                    f"{name}: {error.strerror or error}",
                    "Name the interface: `--interface eth0`.",
                ) from error
            return str(asking.getsockname()[0])
    return LOOPBACK


@contextlib.contextmanager
def started(
    hosts: Sequence[Host],
    command: Callable[[int, int], Sequence[str]],
    secret: str,
    environ: Mapping[str, str],
    ssh: str,
) -> Iterator[Callable[[], None]]:
    """Starts a command on each host, and waits for their ends at the end of the context.

    Args:
        hosts: Where to start.
        command: Returns the command of a host, given its index from 1 on and its number of ranks.
        secret: Goes to the commands by their standard input: the command line is seen by all users.
        environ: Of which the user's settings are sent.
        ssh: The ssh command, with its options.

    Returns:
        A function that raises `PeerLostError` if a command has ended too early.
    """
    running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def check() -> None:
        for host, process in running:
            if (code := process.poll()) is not None:
                raise PeerLostError(
                    f"The launcher on {host} has ended before all have joined.",
                    f"exit code {code}" + (" (255 is that of ssh itself)" if code == 255 else ""),
                    f"Look at the messages above. `{ssh} {host}` must work without a password, and have the same "
                    "Python and folder as here.",
                )

    try:
        for index, (host, count) in enumerate(hosts, 1):
            script = _script(command(index, count), environ)
            remote = ["sh", "-c", script]
            if host not in LOCAL:
                remote = [*shlex.split(ssh), *_BATCH, host, f"exec {shlex.join(remote)}"]
            # Ctrl-C is for this launcher, which tells the others.
            process = subprocess.Popen(remote, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            running.append((host, process))
            with contextlib.suppress(OSError):  # it has ended: `check` says so
                _input(process).write(f"{secret}\n".encode())
        yield check
    finally:
        for end in (lambda process: None, lambda process: _input(process).close(), subprocess.Popen.kill):
            deadline = time.monotonic() + _END_SECONDS
            for process in [process for _, process in running if process.poll() is None]:
                end(process)
            for _, process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for _, process in running:
            _input(process).close()


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    return cast(IO[bytes], process.stdin)


def _script(command: Sequence[str], environ: Mapping[str, str]) -> str:
    sent = {name: value for name, value in environ.items() if name.startswith(_SENT)}
    settings = [f"{name}={value}" for name, value in sent.items()]
    read = f"IFS= read -r {environment.SECRET} && export {environment.SECRET}"
    # As soon as the input ends, with the connection, the launcher is asked to stop.
    watch = "(cat; kill -TERM $$) <&3 >/dev/null 2>&1 & exec 3<&- </dev/null"
    run = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *command])}"
    return f"exec 3<&0; {read} && {{ {watch}; {run}; }}"
