"""A secret for launchers under Slurm, whose nodes prove by MUNGE which user a process belongs to.

Node 0 draws a secret for each connection and encodes it so that only this user can decode it. Whoever decodes it also
learns which user has encoded it. See `man munge`.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess

from keras_dist import environment
from keras_dist.errors import ConfigurationError

_SECONDS = 20.0
_LONGEST = 4096


def send_secret(connection: socket.socket) -> str:
    """Draws a secret, sends it to a process of the same user at the other end, and returns it."""
    secret = secrets.token_hex()
    user = str(os.geteuid())
    connection.sendall(_run(["munge", f"--restrict-uid={user}", f"--string={secret}"], b"").strip() + b"\n")
    return secret


def receive_secret(connection: socket.socket) -> str:
    """Returns the secret that the other end has sent.

    Raises:
        ConfigurationError: If a process of another user has sent it.
    """
    connection.settimeout(_SECONDS)
    credential = b""
    while not credential.endswith(b"\n") and len(credential) < _LONGEST:
        part = connection.recv(1)
        if not part:
            raise ConnectionError("its launcher has ended")
        credential += part
    header, _, secret = _run(["unmunge", "--keys=UID", "--numeric"], credential).decode().partition("\n\n")
    sender = header.rpartition(":")[2].strip()
    if sender not in ("0", str(os.geteuid())):
        raise ConfigurationError(
            "A process of another user listens at the rendezvous.",
            f"user {sender}",
            "Name another port: `--rendezvous HOST:PORT`.",
        )
    return secret.strip()


def _run(command: list[str], given: bytes) -> bytes:
    try:
        return subprocess.run(command, input=given, capture_output=True, check=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", b"") or str(error).encode()
        raise ConfigurationError(
            "MUNGE, by which Slurm's nodes know each other, does not work here.",
            why.decode(errors="replace").strip(),
            f"Set the same {environment.SECRET} for all tasks instead: in the batch script, export "
            f"{environment.SECRET}=$(python3 -c 'import secrets; print(secrets.token_hex(16))').",
        ) from error
