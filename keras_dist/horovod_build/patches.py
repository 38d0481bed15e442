"""Our patches of Horovod 0.28.1: what is replaced, where, and why."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from keras_dist.horovod_build import HorovodBuildError


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replacement in one file of the source.

    Args:
        path: The file, relative to the root of the source.
        before: The text to replace, which must occur exactly once.
        after: The text that takes its place.
        why: What goes wrong without it.
    """

    path: str
    before: str
    after: str
    why: str


MARK = "patched_by_keras_dist"  # of the package `horovod`

PATCHES: tuple[Patch, ...] = (
    Patch(
        path="horovod/tensorflow/xla_mpi_ops.cc",
        before="#if TENSORFLOW_VERSION >= 2006000000\n",
        after="#if TENSORFLOW_VERSION >= 2006000000 && HAVE_GPU\n",
        why="It includes XLA headers that TensorFlow 2.19 and later moved or no longer ship; "
        "all that needs them is for GPUs.",
    ),
    Patch(
        path="horovod/common/gloo/gloo_controller.cc",
        before="  global_ranks_.reserve(size_);\n",
        after="  global_ranks_.resize(size_);\n",
        why="The list of ranks stays empty, so with Gloo the stall inspector finds no missing rank: "
        "a job that waits for a lost rank hangs forever.",
    ),
    Patch(
        path="horovod/common/gloo/gloo_context.cc",
        before="  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n",
        after="  gloo_iface_ = global_context.gloo_iface_;\n  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n",
        why="The rings of a process set, also of the global one, forget HOROVOD_GLOO_IFACE and take the address of the "
        "host's name. Where /etc/hosts maps it to 127.0.1.1, as on Debian, several hosts can't connect.",
    ),
    Patch(
        path="horovod/__init__.py",
        before="__version__ = '0.28.1'\n",
        after=f"__version__ = '0.28.1'\n{MARK} = True\n",
        why="Tells that the rings heed HOROVOD_GLOO_IFACE, so that the name of the host needs no address.",
    ),
    Patch(
        path="setup.py",
        before="else 'RelWithDebInfo'\n",
        after="else 'Release'\n",
        why="The symbols, which the linker leaves out, take a fifth of the time.",
    ),
    Patch(
        path="setup.py",
        before="cmake_build_args = ['--config', config]\n",
        after="cmake_build_args = ['--config', config, '--target', 'tensorflow']\n",
        why="It compiles Gloo twice, once for other frameworks.",
    ),
)


def apply_patches(root: Path, patches: tuple[Patch, ...] = PATCHES) -> None:
    """Patches an unpacked source in place.

    Args:
        root: Directory of the unpacked source.
        patches: What to patch.

    Raises:
        HorovodBuildError: If a text to replace does not occur exactly once. No file is changed then.
    """
    patched: dict[str, str] = {}
    for patch in patches:
        patched[patch.path] = _patched(root, patch, patched.get(patch.path))
    for path, text in patched.items():
        (root / path).write_text(text, encoding="utf-8")


def _patched(root: Path, patch: Patch, text: str | None) -> str:
    file = root / patch.path
    if text is None:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
    count = text.count(patch.before)
    if count != 1:
        raise HorovodBuildError(
            f"A patch does not fit this Horovod source: {patch.path} must contain the line "
            f"{patch.before.strip()!r} exactly once.",
            f"{count} times" if file.is_file() else "no such file",
            "This is a bug of keras_dist, or not the source of Horovod 0.28.1. Please report it.",
        )
    return text.replace(patch.before, patch.after)


def patches_version(patches: tuple[Patch, ...] = PATCHES) -> str:
    """Returns a short text that changes with the patches, so that older wheels are built again."""
    changes = [(patch.path, patch.before, patch.after) for patch in patches]
    return hashlib.sha256(repr(changes).encode()).hexdigest()[:8]
