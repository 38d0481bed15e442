"""What tests of several modules share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the library logs, from a note up."""
    words: list[str] = []
    log, handler = logging.getLogger("keras_dist"), logging.Handler(logging.INFO)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    yield words
    log.removeHandler(handler)
