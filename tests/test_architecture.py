"""The architecture of DESIGN: imports point downward, one module reads the environment, private names are kept."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "keras_dist"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import what is below it, and modules of its own layer, as long as there is no cycle.
LAYERS = [
    {"errors", "topology", "store"},
    {"environment"},
    {"logging"},
    {"backends"},
    set(),  # everything that is not named here: data, step, agreement, losses, optimizer, replica, state, …
    {"callbacks"},
    {"model", "loop", "local_loop", "coordinator", "tpu_executions", "tpu_model"},
    {"api"},
    {"__init__"},
]
MIDDLE = LAYERS.index(set())
# Packages beside the layers, and all that they may see of them at import.
BESIDE = {
    "launch": {"errors", "topology", "environment", "store", "launch"},
    "horovod_build": {"errors", "topology", "environment", "horovod_build", "launch"},
    "testing": {"errors", "topology", "environment", "launch", "testing_worker"},
    "testing_worker": {"errors"},
    "diagnostics": {"errors", "topology", "environment", "backends", "api", "cluster", "diagnostics"},
    "cli": {"errors", "environment", "__init__"},
    "__main__": {"cli"},
}
COMPAT = {
    "backends/keras_backups.py", "backends/keras_compat.py", "backends/keras_placement.py",
    "backends/keras_replicas.py", "backends/keras_strategy.py", "backends/tf_compat.py", "diagnostics/tpu_compiler.py",
}  # fmt: skip
LONGEST_FILE = 350
# Known exceptions, each with its reason. Take one out as soon as it is not needed.
LONG_FILES: dict[str, str] = {}
PRIVATE_NAMES: dict[tuple[str, str], str] = {
    ("backends/ps_cluster.py", "_exit"): "Python's own: a worker ends in kd.init(), past the rest of the script",
}


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """Returns the module or subpackage directly under keras_dist that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool) -> Iterator[str]:
    """Yields the modules that a file imports; also inside functions if `lazy`; not those for type checkers."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                for name in child.names:
                    inner = f"{child.module}.{name.name}"
                    yield inner if is_module(inner) else child.module or ""
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text()))


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def own_imports(path: Path, *, lazy: bool) -> set[str]:
    """Returns the modules of keras_dist that a file imports."""
    return {name for name in imports(path, lazy=lazy) if name.split(".")[0] == "keras_dist"}


def layer(part: str) -> int:
    return next((index for index, parts in enumerate(LAYERS) if part in parts), MIDDLE)


def top(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_point_downward(path: Path) -> None:
    part = part_of(path)
    imported = {top(name) for name in own_imports(path, lazy=False)} - {part}
    if part in BESIDE:
        assert imported <= BESIDE[part] | {part}
    else:
        assert {other for other in imported if other in BESIDE} == set()
        assert {other for other in imported if layer(other) > layer(part)} == set()


def test_there_is_no_cycle_of_imports() -> None:
    graph = {module_name(path): own_imports(path, lazy=False) for path in FILES}
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"cycle: {' -> '.join((*above, name))}"
        if name not in done:
            for imported in graph.get(name, ()):
                walk(imported, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_only_one_module_touches_the_environment() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                used = {f"os.{name.name}" for name in node.names}
            else:
                used = {ast.unparse(node)} if isinstance(node, ast.Attribute) else set()
            if used & {"os.environ", "os.getenv", "os.putenv", "os.unsetenv"}:
                found.append(relative(path))
    assert set(found) == {"environment.py"}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_private_modules_of_others_are_imported_by_the_compat_modules_only(path: Path) -> None:
    if relative(path) in COMPAT:
        return
    private = [name for name in imports(path, lazy=True) if name.startswith(("keras.src", "tensorflow.python"))]
    assert private == []


@functools.cache
def own_private_names() -> set[str]:
    """Returns every private name that the package defines itself: functions, attributes, parameters."""
    names = {"_asdict", "_fields", "_make", "_replace"}  # of named tuples
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def private_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "attach"):
            name = next((arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)), "")
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and not name.startswith("_keras_dist"):
            yield name


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_private_names_of_others_are_in_the_compat_modules_only(path: Path) -> None:
    if relative(path) in COMPAT:
        return
    foreign = {name for name in private_names(path) if name not in own_private_names()}
    assert foreign == {name for file, name in PRIVATE_NAMES if file == relative(path)}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    if relative(path) in LONG_FILES:
        assert lines > LONGEST_FILE, f"{path.name} is no exception any more: take it out of LONG_FILES"
    else:
        assert lines <= LONGEST_FILE


@pytest.mark.parametrize(
    "statement",
    [
        "import keras_dist",
        "import keras_dist.testing",
        "import keras_dist.launch.local",
        "import keras_dist.backends",
        "from keras_dist import cli; cli.main(['env'])",
    ],
)
def test_what_must_not_start_tensorflow(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint(sorted({{'tensorflow', 'keras', 'horovod'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_import_changes_nothing() -> None:
    code = "import os, sys, threading; before = dict(os.environ), list(sys.path), threading.active_count(); " \
        "import keras_dist; assert before == (dict(os.environ), list(sys.path), threading.active_count())"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
