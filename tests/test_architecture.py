"""The architecture of docs/how_it_works.md: imports point downward, private names of others are kept in one place."""

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
LAYERS = (
    "errors", "permissions", "store", "environment", "logging", "progress",  # what even the launcher needs
    "compat",  # every private name of Keras and TensorFlow
    "comm",  # how ranks talk: the protocol, and what its implementations share
    "data",  # which examples are whose
    "step",  # one step on a share
    "state",  # weights, metrics and random state, between steps and in files
    "callbacks",
    "training",  # what is set over a model's methods
    "backends",  # the engines
    "cluster", "layers", "losses", "api", "__init__",  # what a user meets
)  # fmt: skip
# Packages beside the layers, and all that they may see of them at import.
BESIDE = {
    "launcher": {"errors", "permissions", "environment", "store", "backends"},  # of the backends, the registry
    "horovod_build": {"errors", "permissions", "environment", "launcher", "progress"},
    "testing": {"errors", "environment", "launcher", "backends"},
    "diagnostics": {
        "errors", "permissions", "environment", "progress", "launcher", "compat", "comm", "backends",
        "cluster", "api",
    },
    "cli": {"errors", "environment", "__init__"},
    "__main__": {"cli"},
}
# Backends that the launcher or keras_dist.testing names; all others they learn from the registry.
NAMED_BACKENDS = {
    ("launcher/cli.py", "parameter_server"): "the backend of the options --workers and --ps",
    ("launcher/cluster.py", "horovod"): "the package that its cluster needs",
    ("testing.py", "horovod"): "the default argument",
}
LONGEST_FILE = 600
PRIVATE_NAMES: dict[tuple[str, str], str] = {
    ("backends/parameter_server/cluster.py", "_exit"): "Python's own: a worker ends in kd.init()",
    ("training/interrupts.py", "_exit"): "Python's own: a later SIGTERM, while the main thread waits in a step",
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
    """Yields the modules that a file imports; also inside functions if `lazy`."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                for name in child.names:
                    inner = f"{child.module}.{name.name}"
                    yield inner if is_module(inner) else child.module or ""
            elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from visit(child)

    yield from visit(ast.parse(path.read_text()))


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def own_imports(path: Path, *, lazy: bool) -> set[str]:
    """Returns the modules of keras_dist that a file imports."""
    return {name for name in imports(path, lazy=lazy) if name.split(".")[0] == "keras_dist"}


def top(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_module_has_its_layer() -> None:
    assert {part_of(path) for path in FILES} == {*LAYERS, *BESIDE}


def test_imports_point_downward() -> None:
    for path in FILES:
        part = part_of(path)
        imported = {top(name) for name in own_imports(path, lazy=False)} - {part}
        allowed = BESIDE[part] if part in BESIDE else set(LAYERS[: LAYERS.index(part)])
        if part == "__init__":
            allowed |= {"diagnostics", "launcher"}  # kd.tpu_dry_run, kd.launch
        assert imported <= allowed, relative(path)


def test_compat_and_engines_know_nothing_of_the_rest() -> None:
    """Each engine is a folder of its own. The registry names them, as strings."""
    for path in FILES:
        imported = own_imports(path, lazy=True)
        if part_of(path) == "compat":
            assert {top(name) for name in imported} <= {"compat"}, relative(path)
        if part_of(path) == "backends":
            inside = relative(path).split("/")[1:]
            own = {f"keras_dist.backends.{inside[0]}"} if len(inside) > 1 else set()
            engines = {".".join(name.split(".")[:3]) for name in imported if name.startswith("keras_dist.backends")}
            assert engines <= own, relative(path)


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


def test_launcher_and_testing_learn_the_backends_from_the_registry() -> None:
    from keras_dist.backends import BACKENDS

    named = {
        (relative(path), node.value)
        for path in FILES if part_of(path) in ("launcher", "testing")
        for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant) and node.value in BACKENDS
    }  # fmt: skip
    assert named == set(NAMED_BACKENDS)


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


def test_private_modules_of_others_are_imported_by_the_compat_modules_only() -> None:
    for path in FILES:
        private = [name for name in imports(path, lazy=True) if name.startswith(("keras.src", "tensorflow.python"))]
        assert private == [] or part_of(path) == "compat", relative(path)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_keras_dist"))


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Returns the classes of the package by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def own_names(cls: ast.ClassDef) -> set[str]:
    """Returns the private names that a class, or a class of ours that it inherits from, defines itself."""
    names = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    for base in cls.bases:
        for parent in classes().get(ast.unparse(base), ()):
            names |= own_names(parent)
    return names


def foreign_private_names(path: Path) -> Iterator[str]:
    """Yields private names of anything but the file's own objects (`self._x`, of a class that defines it)."""

    def visit(node: ast.AST, own: set[str]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Attribute) and is_private(child.attr):
                if ast.unparse(child.value) not in ("self", "cls", "super()") or child.attr not in own:
                    yield child.attr
            elif isinstance(child, ast.Call) and ast.unparse(child.func) in ("getattr", "setattr", "hasattr", "attach"):
                strings = [a.value for a in child.args[1:2] if isinstance(a, ast.Constant) and is_private(a.value)]
                yield from (name for name in strings if ast.unparse(child.args[0]) != "self" or name not in own)
            elif isinstance(child, ast.ImportFrom) and not (child.module or "").startswith("keras_dist"):
                parts = [*(child.module or "").split("."), *(name.name for name in child.names)]
                yield from (part for part in parts if is_private(part))
            yield from visit(child, own_names(child) if isinstance(child, ast.ClassDef) else own)

    yield from visit(ast.parse(path.read_text()), set())


def test_private_names_of_others_are_in_the_compat_modules_only() -> None:
    of_named_tuples = {"_asdict", "_fields", "_make", "_replace"}  # public, by Python's documentation
    found = {
        (relative(path), name) for path in FILES if part_of(path) != "compat" for name in foreign_private_names(path)
        if name not in of_named_tuples
    }  # fmt: skip
    assert found == set(PRIVATE_NAMES)


def test_a_private_name_of_another_is_found_also_where_we_have_the_same(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from jax._src import lib\n"
        "class Ours(keras.Layer):\n"
        "    def __init__(self, model):\n"
        "        self._model = model\n"
        "        self._losses, model._model, getattr(model, '_model')\n"
    )
    assert sorted(foreign_private_names(file)) == ["_losses", "_model", "_model", "_src"]


def test_files_are_small() -> None:
    assert not [relative(path) for path in FILES if len(path.read_text().splitlines()) > LONGEST_FILE]


@pytest.mark.parametrize(
    "statement",
    [
        *(f"import keras_dist{name}" for name in ("", ".testing", ".launcher.job", ".backends", ".state.commits")),
        "import keras_dist.diagnostics.process",
        "from keras_dist import cli; cli.main(['env'])",
        *(
            f"from keras_dist import cli\ntry: cli.main([*{command!r}.split(), '--help'])\nexcept SystemExit: pass"
            for command in ("", "run", "install-horovod", "commits")
        ),
    ],
)
def test_what_must_not_start_tensorflow(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint(sorted({{'tensorflow', 'keras', 'horovod'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).splitlines()[-1] == "[]"


def test_import_changes_nothing() -> None:
    seen = "(dict(os.environ), list(sys.path), threading.active_count())"
    code = f"import os, sys, threading; before = {seen}; import keras_dist; assert before == {seen}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
