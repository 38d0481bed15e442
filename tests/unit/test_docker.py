"""The images: the files that they copy exist, they run without root rights, and versions are pinned."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile, each on one line."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines()]


def values(path: Path, instruction: str) -> list[str]:
    return [value for name, value in instructions(path) if name == instruction]


def name_of(path: Path) -> str:
    return path.name


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_last_stage_runs_the_demo_without_root_rights(path: Path) -> None:
    (user,) = values(path, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # a number: Kubernetes can see that it isn't root
    assert instructions(path)[-1] == ("CMD", '["python", "examples/demo.py"]')


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_last_stage_has_no_compiler(path: Path) -> None:
    build, last = path.read_text().split("\nFROM ")[1:]
    assert "g++" in build
    assert "g++" not in last


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_is_copied_exists_and_is_allowed(path: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [words for value in values(path, "COPY") if not value.startswith("--from") for words in [value.split()]]
    sources = [word for words in copied for word in words[:-1] if not word.startswith("--")]
    assert {"keras_dist", "examples", "setup.cfg"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert any(Path(source).match(pattern) for pattern in allowed), source


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_versions_are_pinned(path: Path) -> None:
    bases = [value.partition("=")[2] for value in values(path, "ARG") if "BASE" in value]
    assert bases
    for base in bases:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+[\w.-]*", base), base
    (requirements,) = re.findall(r"-r (\S+)", path.read_text())
    text = re.sub(r"\\\n", " ", (ROOT / requirements).read_text())
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert len(lines) > 40
    for line in lines:
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+ .*--hash=sha256:", line), line


def test_the_cpu_image_has_the_versions_that_we_ask_for() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = [config["options"]["install_requires"], config["options.extras_require"]["cpu"]]
    wanted.append(config["options.extras_require"]["examples"])
    text = (ROOT / "docker" / "requirements-cpu.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    for line in filter(None, "\n".join(wanted).splitlines()):
        requirement = Requirement(re.sub(r"^#.*", "", line) or "pip")
        if requirement.name != "pip":
            assert requirement.specifier.contains(pinned[requirement.name]), line
