"""The progress line of the commands."""

from __future__ import annotations

import io

from keras_dist.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_is_a_line_at_the_start_and_every_20_seconds() -> None:
    now, stream = [0.0], io.StringIO()
    with ProgressLine(stream, lambda: now[0]) as line:
        line.start("compiling", 130)
        for now[0] in (5.0, 21.0, 30.0, 45.0):
            line.update("57 %" if now[0] > 30 else "")
    assert stream.getvalue().splitlines() == [
        "compiling, about 2 min", "compiling: 21 s of about 2 min", "compiling: 57 %, 45 s of about 2 min"
    ]  # fmt: skip


def test_on_a_terminal_one_line_is_rewritten() -> None:
    stream = Terminal()
    with ProgressLine(stream, lambda: 0.0) as line:
        line.start("Building")
        line.update("3 %")
    clear = "\r\x1b[K"
    assert stream.getvalue() == f"{clear}Building: 0 s{clear}Building: 3 %, 0 s{clear}"
