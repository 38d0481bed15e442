"""The examples: the distributed script is the plain one and two lines, and their data are what they say."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def changed_lines(before: Path, after: Path) -> list[str]:
    difference = difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines())
    return [line for line in difference if not line.startswith("  ")]


def test_the_distributed_example_differs_in_the_import_and_two_lines() -> None:
    assert changed_lines(EXAMPLES / "digits.py", EXAMPLES / "digits_distributed.py") == [
        "+ import keras_dist as kd",
        "+     kd.init()",
        "+     model = kd.distribute(model)",
    ]


@pytest.mark.parametrize("name", ["digits.py", "digits_dataset.py"])
def test_the_plain_example_does_not_know_keras_dist(name: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported
    assert not [module for module in imported if (module or "").startswith("keras_dist")]
