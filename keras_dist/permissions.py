"""Files that processes of this user share: written whole, locked, and refused if other users can write to them."""

import contextlib
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from keras_dist.errors import ConfigurationError


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is complete as soon as it is there, whenever this process is killed."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def make_private_folder(path: Path) -> None:
    """Makes a folder, with those above it, which only this user can write to. Folders that exist stay as they are."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def locked(path: Path, problem: str, remedy: str, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds the lock file of a private folder, which is made. Calls `waiting` if another process holds it.

    Problem and remedy are for the error if the folder can't be written.
    """
    try:
        make_private_folder(path.parent)
        # The file stays: if it were removed, two processes could lock two files of the same name.
        file = open(path, "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigurationError(problem, f"{path.parent}: {error.strerror}", remedy) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        # Closing the file unlocks it, even if this process is killed.
        yield


def refuse_if_others_can_write(path: Path, purpose: str, remedy: str) -> None:
    """Refuses a file or folder that another user could have written, or put in the place of this one.

    As `sshd` does it (`StrictModes`), the folders above count too: who can write to one of them can rename what is
    in it. Not so in a sticky folder, such as `/tmp`. What doesn't exist is not refused; the folders above it are looked
    at. `purpose` is what is done with it, such as `"installed from"`, `remedy` what helps beside other permissions.
    """
    for place in (path, *path.resolve().parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        if fault := _fault(status, is_above=place != path):
            raise ConfigurationError(
                f"Other users can change what is {purpose} here, and so run their code as this user.",
                f"{place}: {fault}",
                f"chown and chmod it so that only you can write to it, after a look at what it holds; or {remedy}",
            )


def _fault(status: os.stat_result, is_above: bool) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user_name(status.st_uid)}, not to {_user_name(os.geteuid())}"
    if is_above and status.st_mode & stat.S_ISVTX:
        return None
    mode = f"has the mode {stat.S_IMODE(status.st_mode):04o}"
    if status.st_mode & stat.S_IWOTH:
        return f"{mode}: all users can write to it"
    if status.st_mode & stat.S_IWGRP and not _has_only_this_user(status.st_gid):
        return f"{mode}: its group can write to it"
    return None


def _has_only_this_user(group_id: int) -> bool:
    """Whether a group is the private one that many systems make for each user, whose files it may write."""
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
        return group_id == user.pw_gid and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}
    return False


def _user_name(user_id: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user_id).pw_name
    return f"user {user_id}"
