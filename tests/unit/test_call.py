"""A wrapper reads and changes the arguments of a call, however the script passed them."""

from __future__ import annotations

from typing import Any

import pytest

from keras_dist.training.call import Call


def fit(x: Any, y: Any = None, verbose: str = "auto", *, callbacks: Any = None) -> tuple[Any, ...]:
    return x, y, verbose, callbacks


def overridden(*args: Any, **kwargs: Any) -> Any:
    return fit(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 2, 0), {}), ((1, 2), {"verbose": 0}), ((), {"x": 1, "y": 2, "verbose": 0})]
)
def test_an_argument_is_read_and_replaced_however_it_was_passed(args: Any, kwargs: Any) -> None:
    call = Call("fit", fit, args, kwargs)
    assert (call.get("x"), call.get("verbose"), call.get("callbacks")) == (1, 0, None)
    call.set("verbose", 2)
    call.change("callbacks", lambda given: [given, "ours"])
    assert call() == (1, 2, 2, [None, "ours"])


def test_a_default_is_read_and_known_to_be_none_of_the_scripts() -> None:
    call = Call("fit", fit, (1,), {})
    assert call.get("verbose") == "auto"
    assert call.is_given("x")
    assert not call.is_given("verbose")


def test_what_a_method_that_takes_anything_was_given_is_read_by_name() -> None:
    call = Call("fit", overridden, (1,), {"verbose": 0})
    assert call.get("verbose") == 0
    assert call.get("callbacks") is None
    assert call.takes("callbacks")
    call.set("callbacks", [])
    assert call() == (1, None, 0, [])


def test_what_a_method_passes_on_has_the_places_that_it_has_in_keras() -> None:
    def noted(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x, args, kwargs

    def all_of(*args: Any, **kwargs: Any) -> Any:
        return args[0], args[1:], kwargs

    for method in (noted, all_of):
        call = Call("fit", method, (1, 2, 16, 3, 0, None), {})
        assert (call.get("y"), call.get("batch_size"), call.get("epochs"), call.get("verbose")) == (2, 16, 3, 0)
        assert call.is_given("callbacks")
        assert not call.is_given("validation_split")
        call.change("callbacks", lambda given: ["ours"])
        call.set("shuffle", False)
        assert call() == (1, (2, 16, 3, 0, ["ours"]), {"shuffle": False})
    call = Call("save", overridden, ("a.keras",), {})
    assert call.get("filepath") == "a.keras"


def test_an_argument_that_the_method_has_not_is_left_to_python() -> None:
    call = Call("fit", fit, (1,), {"epoch": 3})
    assert call.get("epoch") == 3
    assert not call.takes("epoch")
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        call()
