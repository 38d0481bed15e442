"""A wrapper reads and changes the arguments of a call, however the script passed them."""

from __future__ import annotations

from typing import Any

import pytest

from keras_dist.training.call import Call


def fit(x: Any, y: Any = None, verbose: str = "auto", *, callbacks: Any = None) -> tuple[Any, ...]:
    return x, y, verbose, callbacks


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 2, 0), {}), ((1, 2), {"verbose": 0}), ((), {"x": 1, "y": 2, "verbose": 0})]
)
def test_an_argument_is_read_and_replaced_however_it_was_passed(args: Any, kwargs: Any) -> None:
    call = Call("fit", fit, args, kwargs)
    assert (call.get("x"), call.get("verbose"), call.get("callbacks")) == (1, 0, None)
    call.set("verbose", 2)
    call.change("callbacks", lambda given: [given, "ours"])
    assert call() == (1, 2, 2, [None, "ours"])
