"""Runs a promised case in one plain process and on a cluster, and compares the numbers.

A case is a function `case(distribute)` that builds data and model, trains, and returns numbers. `distribute` does
nothing in the plain process, with whose result all others are compared:

    @contract("data-padded-texts", sizes=(3,))
    def test_padded_texts(distribute): ...

    contract("data-numpy", sizes=(3,))(lambda distribute: fitted(compiled(distribute), *numbers()))

A case of one expression is a lambda, and its test has the name of its row.

Keys that begin with `own_` belong to one rank; `verify` checks them.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_dist.testing import WorkerError
from tests.contract.clusters import NOT_TESTED, NOT_VERIFIED, ranks_of, refusal

FLOAT64, FLOAT32, FLOAT32_ADAM = 1e-9, 1e-6, 1e-5

# For cases whose batches or strings a TPU does not take.
NOT_TPU = ("serial", "central_storage", "horovod", "mirrored", "multi_worker", "parameter_server")

Numbers = dict[str, Any]
Case = Callable[[Callable[[Any], Any]], Numbers]
Verify = Callable[[list[Numbers], Numbers, int], None]

_IS_VERIFIED = bool(os.environ.get("KERAS_DIST_VERIFY"))
_TIMEOUT = 300.0 if _IS_VERIFIED else 120.0  # seconds: the first steps are traced three times


def contract(
    row: str,
    *,
    tolerance: float = FLOAT64,
    sizes: Sequence[int] = (),
    also: Sequence[str] = (),
    covered_by: Sequence[str] = (),
    reference: Callable[[int], Numbers] | None = None,
    reference_of_processes: Callable[[int, int], Numbers] | None = None,
    of_ranks: bool = False,
    verify: Verify | None = None,
    of: Sequence[str] | None = None,
    since: str = "3",
    float32: bool = False,
) -> Callable[[Case], Callable[..., None]]:
    """Makes a case a test on every registered backend.

    Args:
        row: Its id in docs/promised_cases.md.
        tolerance: Relative and absolute tolerance of the comparison with the plain process.
        sizes: Numbers of ranks to test besides the usual ones.
        also: Clusters on which `make test` tests the case besides `"horovod-2"`, such as `"mirrored-2"`: those where it
            goes through code of its own. `make test-full` tests it on all.
        covered_by: For a case that `make test` leaves out: the rows there that fail too if its code breaks.
        reference: Computes in one process the expected result of `n` ranks, if it differs from the plain one.
        reference_of_processes: The same, if it depends on how many processes the `n` replicas have: the second number.
        of_ranks: Whether `n` is the number of ranks, even if there are more replicas than ranks.
        verify: Further assertions. Takes the results of all ranks, and the number of ranks or replicas.
        of: The backends that have the tested option; `None` for all.
        since: The oldest Keras that supports the case in one process, such as `"3.14"`.
        float32: Whether the case keeps Keras's precision. In double precision rounding cannot hide a wrong weight.
    """

    def decorate(case: Case) -> Callable[..., None]:
        if is_lambda := case.__name__ == "<lambda>":
            case.__name__ = case.__qualname__ = f"test_{row.replace('-', '_')}"

        @pytest.mark.row(row, sizes=sizes, also=also, covered_by=covered_by)
        def test(cluster: tuple[str, int], pools: Any, tmp_path: Path, golden: Any) -> None:
            backend, size = cluster
            if of is not None and backend not in of:
                pytest.skip(f"an option of {' and '.join(of)}")
            if _version(importlib.metadata.version("keras")) < _version(since):
                pytest.skip(f"Keras {since} or later")
            name, own_folder = (case.__module__, case.__name__), folder(tmp_path, "distributed")
            if (reason := NOT_TESTED.get(f"{backend}-{size}", {}).get(row)) is not None:
                pytest.skip(reason)
            if _IS_VERIFIED and (reason := NOT_VERIFIED.get(row)) is not None:
                pytest.skip(f"not verified: {reason}")
            if (words := refusal(row, backend, size)) is not None:
                with pytest.raises(WorkerError, match=re.escape(words)):
                    pools.get(backend, size).run(run_in_worker, *name, own_folder, timeout=_TIMEOUT)
                pytest.skip(f"refused: {words}")
            ranks = ranks_of(backend, size)
            chosen = (ranks if of_ranks else size,) if reference else (size, ranks) if reference_of_processes else ()

            def computed() -> Numbers:
                return pools.get("serial", 1).run(reference_in_worker, *name, folder(tmp_path, "plain"), *chosen)[0]

            expected = golden((*name, *chosen), computed)
            results = pools.get(backend, size).run(run_in_worker, *name, own_folder, timeout=_TIMEOUT)
            for rank, result in enumerate(results):
                assert_identical(shared(result), shared(results[0]), f"rank {rank} and rank 0")
            assert_close(shared(results[0]), shared(expected), tolerance)
            if verify is not None:
                verify(results, expected, size)

        test.__name__, test.__qualname__, test.__module__ = case.__name__, case.__name__, case.__module__
        test.__doc__ = case.__doc__
        test.case, test.float32 = case, float32  # type: ignore[attr-defined]
        test.reference = reference or reference_of_processes  # type: ignore[attr-defined]
        if is_lambda:
            vars(sys.modules[case.__module__])[case.__name__] = test
        return test

    return decorate


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")[:2]]


def folder(parent: Path, name: str) -> str:
    path = parent / name
    path.mkdir()
    return str(path)


def run_in_worker(module: str, name: str, folder: str) -> Numbers:
    """Runs a case on a rank, in a folder that all ranks share."""
    import keras_dist as kd

    test = prepared(module, name, folder)
    with own_loops():
        return {key: plain(value) for key, value in test.case(kd.distribute).items()}


@contextlib.contextmanager
def own_loops() -> Iterator[None]:
    """What a case asks of loops holds for the whole process: it is forgotten at the end."""
    from keras_dist.cluster import current_backend

    try:
        yield
    finally:
        vars(current_backend()).pop("loop", None)


def prepared(module: str, name: str, folder: str) -> Any:
    """Returns the test, and sets the process's folder and precision."""
    import keras

    test = getattr(importlib.import_module(module), name)
    os.chdir(folder)
    if not test.float32:
        keras.config.set_floatx("float64")
    return test


def reference_in_worker(module: str, name: str, folder: str, *sizes: int) -> Numbers:
    """Computes the expected result of a case in a plain process, by its reference for these sizes or by the case."""
    test = prepared(module, name, folder)
    numbers = test.reference(*sizes) if sizes else test.case(same)
    return {key: plain(value) for key, value in numbers.items()}


def same(target: Any) -> Any:
    """The `distribute` of the plain process."""
    return target


def asking(distribute: Any, **options: Any) -> Any:
    """Returns `distribute` with options."""
    return distribute if distribute is same else functools.partial(distribute, **options)


def plain(value: Any) -> Any:
    """Converts tensors to arrays: results are sent to a process without TensorFlow."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def shared(numbers: Numbers) -> dict[str, Any]:
    """Returns the results that all ranks must share, as one flat dict."""
    return flat({key: value for key, value in numbers.items() if not key.startswith("own_")})


def flat(value: Any, name: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {name: value}
    return {key: leaf for part, item in items for key, leaf in flat(item, f"{name}/{part}").items()}


def assert_identical(actual: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for key, value in actual.items():
        if isinstance(value, str) or value is None:
            assert value == expected[key], f"{what} differ in {key}"
        else:
            np.testing.assert_array_equal(value, expected[key], err_msg=f"{what} differ in {key}")


def assert_close(actual: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for key, value in actual.items():
        if isinstance(value, str) or value is None:
            assert value == expected[key], f"not what the plain process has: {key}"
            continue
        assert np.asarray(value).dtype == np.asarray(expected[key]).dtype, key
        np.testing.assert_allclose(
            value, expected[key], rtol=tolerance, atol=tolerance, err_msg=f"not what the plain process has: {key}"
        )
