"""The pages beside the README: the API reference is that of the code, pictures are shown, benchmarks are those run."""

from __future__ import annotations

import html
import importlib.util
import inspect
import pydoc
import re
import sys
from pathlib import Path
from types import ModuleType

import griffe
import pytest

import keras_dist

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def load(path: Path) -> ModuleType:
    """Imports a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look for it
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


@pytest.fixture(scope="module")
def make_api() -> ModuleType:
    return load(DOCS / "make_api.py")


# The API reference.


def test_the_reference_is_up_to_date(make_api: ModuleType) -> None:
    assert (DOCS / "api.md").read_text() == make_api.page(), "run `make docs`"


def test_the_reference_has_every_public_name() -> None:
    headings = re.findall(r"^### `kd\.([\w.]+)`$", (DOCS / "api.md").read_text(), re.MULTILINE)
    expected = {*keras_dist.__all__} - {"__version__", "callbacks", "layers", "losses", "testing"}
    assert {name for name in headings if "." not in name} == expected
    callbacks = {f"callbacks.{name}" for name in keras_dist.callbacks.__all__}
    assert {name for name in headings if name.startswith("callbacks.")} == callbacks
    assert "layers.ShardedEmbedding" in headings
    assert {"testing.run_workers", "testing.WorkerPool"} <= set(headings)


def test_a_docstring_becomes_markdown(make_api: ModuleType) -> None:
    docstring = """Adds.

    Two numbers.

    Args:
        a: The first
            one.
        *rest: The others.

    Returns:
        The sum
        of them.

    Example:

    >>> add(1)
    1
    """
    assert make_api.markdown(griffe.Docstring(inspect.cleandoc(docstring))) == (
        "Adds.\n\nTwo numbers.\n\nArgs:\n\n- `a`: The first one.\n- `*rest`: The others.\n\n"
        "Returns: The sum of them.\n\n```pycon\n>>> add(1)\n1\n```"
    )


def test_the_text_after_the_arguments_is_not_an_argument(make_api: ModuleType) -> None:
    docstring = griffe.Docstring("Adds.\n\nArgs:\n    a: One.\n    b: Two.\n\nBoth are numbers.")
    assert make_api.markdown(docstring) == "Adds.\n\nArgs:\n\n- `a`: One.\n- `b`: Two.\n\nBoth are numbers."


def test_the_docstrings_name_the_arguments_that_there_are(
    make_api: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    make_api.page()
    assert [record.getMessage() for record in caplog.records] == []


def test_help_starts_with_what_a_user_calls() -> None:
    """`help(keras_dist)` shows the docstring first, long before it comes to names that are resolved lazily."""
    docstring = keras_dist.__doc__ or ""
    documented = re.findall(r"\bkd\.(\w+)", docstring)
    assert set(documented) == {*keras_dist.__all__} - {"__version__"}
    text = pydoc.render_doc(keras_dist, renderer=pydoc.plaintext)
    assert text.index("kd.init(") < text.index("kd.distribute(") < text.index("PACKAGE CONTENTS")


# Pictures.


def pictures() -> dict[Path, str]:
    """Returns the pictures of all pages with what is said for those who don't see them."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        described = [(target, said) for said, target in re.findall(r"!\[([^]]*)\]\(([^)\s]+)\)", text)]
        for target, said in described + re.findall(r'<img src="([^"]+)".* alt="([^"]+)"', text):
            found[(page.parent / target).resolve()] = said
    return found


def test_every_picture_is_there_and_described() -> None:
    assert len(pictures()) >= 3
    for path, text in pictures().items():
        assert path.is_file()
        assert len(text.split()) >= 4, path.name


def test_the_terminal_shows_the_commands_of_the_readme() -> None:
    make_terminal = load(DOCS / "make_terminal.py")
    shown = re.sub(r"<[^>]+>", "", html.unescape(make_terminal.PICTURE.read_text())).replace("\xa0", " ")
    commands = make_terminal.commands((ROOT / "README.md").read_text())
    assert len(commands) == 2
    assert all(f"$ {command}\n" in shown for command in commands)


def test_every_picture_in_the_folder_is_shown() -> None:
    files = {path.resolve() for path in (DOCS / "images").iterdir()}
    assert files == set(pictures())


@pytest.mark.parametrize("path", sorted((DOCS / "images").glob("*.png")), ids=lambda path: path.name)
def test_a_picture_is_small_enough_to_be_loaded_with_the_page(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 250_000
