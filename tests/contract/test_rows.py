"""Every promised case has a test on every registered backend, and every contract test names a promise."""

import importlib
from pathlib import Path

import pytest

from keras_dist.backends import BACKENDS
from tests.contract.clusters import DEFAULT_SIZES, clusters, clusters_of
from tests.contract.rows import GROUPS, ROWS, TOGETHER

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_ROWS = "test_rows", "test_random"
MODULES = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py") if path.stem not in WITHOUT_ROWS)


def marks() -> list[pytest.Mark]:
    """Returns the marks of all tests of promised cases."""
    found = []
    for name in MODULES:
        for attribute in vars(importlib.import_module(f"tests.contract.{name}")).values():
            if getattr(attribute, "__name__", "").startswith("test_") and hasattr(attribute, "case"):
                found += [mark for mark in attribute.pytestmark if mark.name == "row"]
    return found


def test_every_row_has_one_test() -> None:
    tested = [mark.args[0] for mark in marks()]
    assert sorted(tested) == sorted(set(tested)), "a row with two tests"
    assert set(tested) == set(ROWS)


def test_every_contract_test_names_its_row() -> None:
    for name in MODULES:
        module = importlib.import_module(f"tests.contract.{name}")
        tests = {key: value for key, value in vars(module).items() if key.startswith("test_")}
        assert tests
        for key, test in tests.items():
            assert hasattr(test, "case"), f"{name}.{key} has no row"
            assert test.__name__ == key


def test_ids_are_unique_over_the_groups() -> None:
    assert len(ROWS) == sum(len(group) for group in (*GROUPS.values(), TOGETHER))


def test_every_registered_backend_is_tried() -> None:
    assert set(DEFAULT_SIZES) == set(BACKENDS)
    assert {backend for backend, _ in clusters()} == set(BACKENDS)


def test_further_sizes_are_those_that_a_backend_is_tried_with() -> None:
    main = [("horovod", 2), ("horovod", 3), ("horovod", 4)]
    others = [("mirrored", 2), ("mirrored", 3), ("mirrored", 4)]
    others += [("multi_worker", 2), ("multi_worker", 3), ("multi_worker", 4)]
    others += [("parameter_server", 2), ("parameter_server", 3), ("tpu", 1), ("tpu", 3), ("tpu", 8)]
    assert clusters((3, 4)) == [("serial", 1), ("central_storage", 2), *main, *others]


def test_a_dozen_rows_are_tried_on_three_and_four_ranks() -> None:
    sizes = [set(mark.kwargs["sizes"]) for mark in marks()]
    assert sum(3 in chosen for chosen in sizes) >= 12
    assert sum(4 in chosen for chosen in sizes) >= 8


def test_make_test_tries_every_row_or_names_those_that_cover_it() -> None:
    tried = {mark.args[0] for mark in marks() if clusters_of(mark)}
    for mark in marks():
        for name in mark.kwargs["covered_by"]:
            assert (name in tried and name != mark.args[0]) or (ROOT / name).is_file(), (mark.args[0], name)


def test_make_test_tries_every_cluster() -> None:
    known, tried = {f"{backend}-{size}" for backend, size in clusters((3, 4))}, [*map(clusters_of, marks())]
    assert set().union(*tried) <= known
    for cluster in (f"{backend}-{size}" for backend, sizes in DEFAULT_SIZES.items() for size in sizes):
        assert sum(cluster in its for its in tried) >= 3, cluster


def test_what_is_imported_is_not_collected_twice(request: pytest.FixtureRequest) -> None:
    items = [item.nodeid for item in request.session.items]
    assert len(items) == len(set(items))
