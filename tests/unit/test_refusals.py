"""An error of ours reads in few lines."""

from __future__ import annotations

import traceback

import keras
import pytest

from keras_dist.errors import NotSupportedError, check_choice
from keras_dist.training import refusals


@pytest.mark.parametrize("is_filtered", [True, False])
def test_an_error_shows_the_lines_of_the_script_only(is_filtered: bool) -> None:
    """As Keras's own do, which can show all."""

    def step(_: int) -> None:
        try:
            check_choice("option", "data", "x", ["y"])
        except ValueError as error:
            raise NotSupportedError("Refused.") from error

    (keras.config.enable_traceback_filtering if is_filtered else keras.config.disable_traceback_filtering)()
    try:
        with pytest.raises(NotSupportedError) as raised:
            keras.tree.map_structure(step, [1])
        error = refusals.in_few_lines(raised.value)
        text = "".join(traceback.format_exception(error))
    finally:
        keras.config.enable_traceback_filtering()
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert (set(files) == {__file__}) == is_filtered, files
    assert ("keras/src" in text) == (not is_filtered)
    assert ("direct cause" in text) == (not is_filtered)
    assert text.endswith("NotSupportedError: Refused.\n")
