"""The manual: its snippets run, its links lead somewhere, its commands exist, its tables say what the code does."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import keras_dist
from keras_dist import environment
from keras_dist.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MANUAL = [README, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What the runnable snippets find, besides one another.
SURROUNDINGS = """
import os, time
from pathlib import Path
import keras, numpy as np, tensorflow as tf
import keras_dist as kd
kd.init("serial")

def build_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])

examples = tf.data.Dataset.from_tensor_slices((np.ones((8, 4), "float32"), np.arange(8) % 3))
train = validation = examples.batch(4)
"""


def fences(path: Path) -> list[tuple[str, str]]:
    """Returns the info string and the text of each fenced block."""
    return re.findall(r"^ *```([^\n`]*)\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """Returns a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def snippets(marked: str) -> list[tuple[str, str]]:
    return [(path.name, text) for path in MANUAL for info, text in fences(path) if info.startswith(marked)]


def commands() -> list[list[str]]:
    """Returns the words of every line in a shell block."""
    lines = [line for path in MANUAL for info, text in fences(path) if info == "sh" for line in text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# The front page.


def test_it_is_one_page() -> None:
    assert len(README.read_text().splitlines()) <= 250


def test_the_versions_are_those_that_can_be_installed() -> None:
    setup = (ROOT / "setup.cfg").read_text()
    (low, high), (low_tf, high_tf) = (
        re.findall(rf"{name}>=(\d+\.\d+),<(\d+\.\d+)", setup)[0] for name in ("keras", "tensorflow-cpu")
    )
    pythons = re.findall(r"Python :: (3\.\d+)", setup)
    assert high_tf == minor(low_tf, 1)
    assert f"Python {pythons[0]} to {pythons[-1]}, Keras {low} to {minor(high, -1)}, TensorFlow {low_tf}," in prose(
        README
    )


def minor(version: str, by: int) -> str:
    major, number = version.split(".")
    return f"{major}.{int(number) + by}"


def test_the_gain_and_the_loss_are_those_of_the_benchmark() -> None:
    """The first sentences on speed quote the table "strong-scaling" of `benchmarks/bench.py`."""
    table = (ROOT / "docs" / "benchmarks.md").read_text().split("**2 processes over one process on one core**")[1]
    said = " ".join(prose(README).split())
    for case, sentence in (
        (
            "28 × 28 pixels, batches of 256",
            "two processes need {} of the time of one for a step of the digits network with 28 ",
        ),
        ("8 × 8 pixels, batches of 32", "two processes need {} times as long as one"),
    ):
        ratio = re.search(rf"^\| {case} \| ([\d.]+)", table, re.MULTILINE)
        assert ratio is not None
        assert sentence.format(f"{float(ratio[1]):.2f}") in said


# Snippets.


@pytest.mark.parametrize(("page", "snippet"), snippets("python"))
def test_a_snippet_compiles(page: str, snippet: str) -> None:
    compile(snippet, page, "exec")


@pytest.mark.ci
def test_the_marked_snippets_run(tmp_path: Path) -> None:
    marked = snippets("python run")
    assert len(marked) >= 4
    script = [SURROUNDINGS, *(f"exec(compile({text!r}, {page!r}, 'exec'))" for page, text in marked)]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*script, "print('all ran')"])],
        cwd=tmp_path,
        env={name: value for name, value in environment.current().items() if not name.startswith("HOROVOD_")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all ran\n")


@pytest.mark.parametrize("path", MANUAL, ids=name_of)
def test_every_public_name_that_is_mentioned_exists(path: Path) -> None:
    mentioned = set(re.findall(r"\bkd\.(\w+)", path.read_text()))
    assert mentioned <= {*keras_dist.__all__}


# Links.


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", MANUAL, ids=name_of)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", prose(path)):
        link = "".join(link)
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


@pytest.mark.parametrize("path", MANUAL, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    for named in re.findall(r"`((?:keras_dist|examples|tests|docs|docker|benchmarks)/[\w./]*)`", prose(path)):
        assert (ROOT / named).exists(), named


# Commands.


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    in_blocks = [words[1] for words in commands() if words[0] == "make"]
    in_prose = [target for path in MANUAL for target in re.findall(r"`make ([a-z-]+)", prose(path))]
    assert {"demo", "test"} <= set(in_blocks)
    assert {*in_blocks, *in_prose} <= targets


def test_every_keras_dist_command_is_one_that_the_command_line_takes() -> None:
    found = [words[1:] for words in commands() if words[0].endswith("keras-dist")]
    assert {words[0] for words in found} >= {"run", "install-horovod"}
    for command, *arguments in found:
        module = importlib.import_module(COMMANDS[command].module)
        parser = argparse.ArgumentParser(allow_abbrev=False)
        module.add_arguments(parser)
        args = parser.parse_args(arguments)
        if command == "run":
            assert args.hosts or int(args.num_processes or args.workers) > 1
            if args.serve:
                continue
            assert args.target[0] == "train.py" or (ROOT / args.target[0]).is_file()


def test_the_examples_of_the_commands_take_their_options() -> None:
    options = re.findall(r'add_argument\("(--[\w-]+)"', (ROOT / "examples" / "digits.py").read_text())
    for words in commands():
        if any(word.startswith("examples/digits") for word in words):
            assert {word for word in words if word.startswith("--")} <= set(options)
            assert [word for word in words if word.endswith(".py") and not (ROOT / word).exists()] == []


def test_the_options_of_commands_in_the_text_exist() -> None:
    text = "".join(map(prose, MANUAL))
    for command, option in re.findall(r"`(?:keras-dist )?(run|install-horovod) (--[\w-]+)", text):
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[command].module).add_arguments(parser)
        assert option in parser.format_help()


def test_the_system_packages_are_those_that_the_check_asks_for() -> None:
    (install,) = [words for words in commands() if "apt-get" in words]
    packages = [word for word in install[install.index("install") + 1 :] if not word.startswith("-")]
    asked_for = re.findall(r"apt\+=\(([^)]*)\)", (ROOT / ".ci" / "check-system").read_text())
    assert sorted(packages) == sorted(" ".join(asked_for).split())


# Tables.


def first_column(page: str) -> list[str]:
    return re.findall(r"^\| (.+?) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)


def test_every_setting_is_listed() -> None:
    named = {value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)}
    listed = {cell.strip("`") for cell in first_column("settings.md")} - {"Variable"}
    between_our_own_processes = {
        environment.COMMITTED, environment.INITIALIZED_BY, environment.LAUNCHER, environment.STORE,
    }  # fmt: skip
    assert listed == named - between_our_own_processes


def test_every_message_of_the_troubleshooting_is_one_that_the_code_gives() -> None:
    source = "".join(path.read_text() for path in (ROOT / "keras_dist").rglob("*.py")).replace("`", "")
    messages = [cell for cell in first_column("troubleshooting.md") if cell.startswith("`")]
    assert len(messages) >= 8
    for message in messages:
        # What the code fills in: a number, a name.
        fixed = re.split(r"\d+|SIG\w+|serial|\.\.\.", message.split("` from")[0].strip("`"))
        assert all(part.strip() in source for part in fixed), message


def test_the_index_has_every_page_of_the_folder() -> None:
    linked = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert sorted(linked) == sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md")


def test_the_map_has_every_folder_of_the_package() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    mapped = re.findall(r"^\| `(?:keras_dist/)?([\w/]+)/` \|", page, re.MULTILINE)
    folders = {path.parent.relative_to(ROOT / "keras_dist") for path in (ROOT / "keras_dist").rglob("*/*.py")}
    assert sorted(mapped) == sorted(str(folder) for folder in folders)


def test_the_page_on_backends_names_every_method_that_one_needs() -> None:
    from keras_dist.backends import Backend

    page = (ROOT / "docs" / "adding_a_backend.md").read_text()
    named = re.findall(r"^ *\| `(\w+)[(`]", page, re.MULTILINE)
    assert sorted(named) == sorted(Backend.__abstractmethods__)
