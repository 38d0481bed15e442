"""A machine that has nothing: a bare Debian, where the wheel is installed and the CPU image is built. As root.

It reaches packages as this machine does: with its certificates, its settings of pip and its name servers.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.launches import ROOT

TOOLS = ("debootstrap", "buildah")
SETTINGS = (
    "/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates",
)  # fmt: skip
BUILDAH = ("buildah", "--storage-driver", "vfs")
DEMO = "python examples/demo.py"
SELFTEST = "keras-dist selftest -np 2"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a machine"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"apt-get install -y {' '.join(TOOLS)}"),
]


def run(*command: str | Path) -> str:
    """Runs a command, and returns what it says."""
    # Not the variables of this environment, but for those that say where packages are.
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **kept}
    done = subprocess.run(list(map(str, command)), env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of a bare Debian 12, with this repository in /keras_dist."""
    root = tmp_path_factory.mktemp("debian") / "root"
    run("debootstrap", "--variant=minbase", "bookworm", root)
    for place in map(Path, SETTINGS):
        copy = root / place.relative_to("/")
        if place.is_dir():
            shutil.copytree(place, copy, dirs_exist_ok=True)
        elif place.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place, copy)
    run("git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", root / "keras_dist")
    yield root
    shutil.rmtree(root.parent)  # gigabytes


# In a mount namespace of its own, so that nothing stays mounted.
CHROOT = 'for folder in proc sys dev; do mount --rbind "/$folder" "$0/$folder"; done; exec chroot "$0" sh -euc "$1"'


def test_the_wheel_trains_on_a_bare_debian(debian: Path) -> None:
    """By the commands of the README, but for the wheel, which `pip install .` makes and throws away."""
    readme = (ROOT / "README.md").read_text()
    (packages,) = re.findall(r"^sudo (apt-get install -y python3 [^#\n]*)", readme, re.MULTILINE)
    steps = [
        "cd /keras_dist",
        f"apt-get update; {packages}",
        "python3 -m venv /opt/venv; . /opt/venv/bin/activate",
        "pip wheel --no-deps --wheel-dir /dist .; rm -r keras_dist",
        'pip install "$(echo /dist/*.whl)[cpu,examples]"; keras-dist install-horovod',
        f"{DEMO}; {SELFTEST}",
    ]
    check(run("unshare", "--mount", "sh", "-euc", CHROOT, debian, "\n".join(steps)))


def test_the_image_is_built_and_trains(debian: Path) -> None:
    storage = debian.parent / "storage"
    buildah = (*BUILDAH, "--root", str(storage), "--runroot", f"{storage}-run")
    chroot = ("--isolation", "chroot", "--network", "host")

    def container(image: str, *command: str) -> str:
        name = run(*buildah, "from", image).split()[-1]
        return run(*buildah, "run", *chroot, name, "--", *command) if command else name

    base = container("scratch")
    run(*buildah, "add", base, debian, "/")
    run(*buildah, "commit", base, "localhost/base")
    file = ROOT / "docker" / "cpu.Dockerfile"
    run(*buildah, "bud", *chroot, "--build-arg", "BASE=localhost/base", "-f", file, "-t", "localhost/keras-dist", ROOT)
    check(container("localhost/keras-dist", "sh", "-c", f"{DEMO} && {SELFTEST}"))


def check(output: str) -> None:
    """Asserts what the demo and the self-test say. The demo fails unless the model has learned."""
    assert "digits_distributed.py trained on 2 processes over Horovod." in output
    passed = {line.split()[1].rstrip(":") for line in output.splitlines() if line.startswith("ok ")}
    assert passed == {"ranks", "sums", "network", "speed", "training", "end"}, output[-4000:]
