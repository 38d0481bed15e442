"""The pages: snippets run, links lead somewhere, commands exist, tables and pictures are those of the code."""

import argparse
import difflib
import html
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import keras_dist
from keras_dist import environment
from keras_dist.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS, EXAMPLES, README = ROOT / "docs", ROOT / "examples", ROOT / "README.md"
sys.path.insert(0, str(DOCS))

import make_api  # noqa: E402
import make_terminal  # noqa: E402

MANUAL = [README, ROOT / "CONTRIBUTING.md", EXAMPLES / "README.md", *sorted(DOCS.glob("*.md"))]

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
    return re.findall(r"^ *```([^\n`]*)\n(.*?)^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def snippets(marked: str) -> list[tuple[str, str]]:
    return [(path.name, text) for path in MANUAL for info, text in fences(path) if info.startswith(marked)]


def commands() -> list[list[str]]:
    lines = [line for path in MANUAL for info, text in fences(path) if info == "sh" for line in text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_versions_are_those_that_can_be_installed() -> None:
    setup = (ROOT / "setup.cfg").read_text()
    (low, high), (low_tf, high_tf) = (
        re.findall(rf"{name}>=(\d+\.\d+),<(\d+\.\d+)", setup)[0] for name in ("keras", "tensorflow-cpu")
    )
    pythons = re.findall(r"Python :: (3\.\d+)", setup)
    assert high_tf == minor(low_tf, 1)
    keras = f"Keras {low} to {minor(high, -1)}"
    assert f"Python {pythons[0]} to {pythons[-1]}, {keras}, TensorFlow {low_tf}," in prose(README)


def minor(version: str, by: int) -> str:
    major, number = version.split(".")
    return f"{major}.{int(number) + by}"


def test_the_gain_and_the_loss_are_those_of_the_benchmark() -> None:
    """The first sentences on speed quote the table "strong-scaling" of `benchmarks/bench.py`."""
    table = (DOCS / "benchmarks.md").read_text().split("**2 processes over one process on one core**")[1]
    said = " ".join(prose(README).split())
    for case, sentence in (
        (
            "28 × 28 pixels, batches of 256",
            "two processes need {} of the time of one for a step of the digits network with 28 ",
        ),
        ("8 × 8 pixels, batches of 32", "two processes need {} times as long as one"),
    ):
        ratio = re.search(rf"^\| {case} \| ([\d.]+)", table, re.MULTILINE)
        assert sentence.format(f"{float(ratio[1]):.2f}") in said


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
def test_public_names_and_files_that_are_mentioned_exist(path: Path) -> None:
    assert {*re.findall(r"\bkd\.(\w+)", path.read_text())} <= {*keras_dist.__all__}
    for named in re.findall(r"`((?:keras_dist|examples|tests|docs|docker|benchmarks)/[\w./]*)`", prose(path)):
        assert (ROOT / named).exists(), named


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
        module = importlib.import_module(COMMANDS[command][1])
        parser = argparse.ArgumentParser(allow_abbrev=False)
        module.add_arguments(parser)
        args = parser.parse_args(arguments)
        if command == "run":
            assert args.hosts or int(args.num_processes or args.workers) > 1
            if args.serve:
                continue
            assert args.target[0] == "train.py" or (ROOT / args.target[0]).is_file()


def test_the_options_of_commands_in_the_text_exist() -> None:
    text = "".join(map(prose, MANUAL))
    for command, option in re.findall(r"`(?:keras-dist )?(run|install-horovod) (--[\w-]+)", text):
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[command][1]).add_arguments(parser)
        assert option in parser.format_help()


def test_the_system_packages_are_those_that_the_check_asks_for() -> None:
    (install,) = [words for words in commands() if "apt-get" in words]
    packages = [word for word in install[install.index("install") + 1 :] if not word.startswith("-")]
    asked_for = re.findall(r"apt\+=\(([^)]*)\)", (ROOT / ".ci" / "check-system").read_text())
    assert sorted(packages) == sorted(" ".join(asked_for).split())


def first_column(page: str) -> list[str]:
    return re.findall(r"^\| (.+?) \|", (DOCS / page).read_text(), re.MULTILINE)


def test_every_setting_is_listed() -> None:
    named = {value for name, value in vars(environment).items() if name.isupper() and isinstance(value, str)}
    listed = {cell.strip("`") for cell in first_column("settings.md")} - {"Variable"}
    between_our_own_processes = {
        environment.COMMITTED, environment.INITIALIZED_BY, environment.LAUNCHER, environment.PLACE,
        environment.STORE,
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
    linked = re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text())
    assert sorted(linked) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")


def test_the_page_on_backends_names_every_method_that_one_needs() -> None:
    from keras_dist.backends import Backend
    from keras_dist.comm.processes import ProcessBackend

    named = re.findall(r"^ *\| `(\w+)[(`]", (DOCS / "adding_a_backend.md").read_text(), re.MULTILINE)
    # The collectives of `Backend` are those of one process.
    of_several = {name for name in vars(ProcessBackend) if name in vars(Backend)}
    collectives = {name for name in of_several if re.match("all_|broadcast|scatter", name)}
    assert sorted(named) == sorted(Backend.__abstractmethods__ | collectives)


def test_the_reference_is_up_to_date() -> None:
    assert (DOCS / "api.md").read_text() == make_api.page(), "run `make docs`"


def test_the_terminal_shows_the_commands_of_the_readme() -> None:
    shown = re.sub(r"<[^>]+>", "", html.unescape(make_terminal.PICTURE.read_text())).replace("\xa0", " ")
    commands = make_terminal.commands(README.read_text())
    assert len(commands) == 2
    assert all(f"$ {command}\n" in shown for command in commands)


FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    text = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines()]


def values(path: Path, instruction: str) -> list[str]:
    return [value for name, value in instructions(path) if name == instruction]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_what_is_copied_exists_and_is_allowed(path: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [words for value in values(path, "COPY") if not value.startswith("--from") for words in [value.split()]]
    sources = [word for words in copied for word in words[:-1] if not word.startswith("--")]
    assert {"keras_dist", "examples", "setup.cfg"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists()
        assert any(Path(source).match(pattern) for pattern in allowed), source


def test_the_distributed_scripts_differ_in_the_import_and_two_lines() -> None:
    examples = [(EXAMPLES / name).read_text() for name in ("digits.py", "digits_distributed.py")]
    for plain, distributed in (examples, make_terminal.scripts(README.read_text())):
        lines = difflib.ndiff(plain.splitlines(), distributed.splitlines())
        changed = [line.split("  #")[0].split() for line in lines if not line.startswith("  ")]
        assert [" ".join(words) for words in changed] == [
            "+ import keras_dist as kd", "+ kd.init()", "+ model = kd.distribute(model)",
        ]  # fmt: skip
    assert not re.search("^-", README.read_text().split("```diff\n")[1].split("```")[0], re.MULTILINE)


BASH = shutil.which("bash") or "/bin/bash"


def check_system(path: Path) -> subprocess.CompletedProcess[str]:
    command = [BASH, str(ROOT / ".ci" / "check-system")]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def test_all_that_is_missing_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    done = check_system(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "  Python 3.11 or later, with venv (set PYTHON to name one)\n  a C++ compiler\n  make\n" in done.stderr
    assert "sudo apt-get install -y python3 python3-venv g++ make\n" in done.stderr
    assert "sudo dnf install -y python3 gcc-c++ make\n" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on PATH")
def test_make_alone_teaches_its_targets() -> None:
    help_text = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"^  ([a-z-]+) +[A-Z]", help_text, re.MULTILINE)
    targets = re.findall(r"^\.PHONY: (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == targets
    assert {"help", "setup", "demo", "test", "lint", "clean"} <= set(listed)
