"""Where the output of each rank goes: to the terminal, with or without a prefix, into a log, or nowhere."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from keras_dist.errors import ConfigurationError

CHIEF, ALL = "chief", "all"
MODES = (CHIEF, ALL)
_CHUNK_BYTES = 65536
_LINE_BYTES = 65536
_TAIL_BYTES = 65536
_STDOUT, _STDERR = 1, 2
# TF_CPP_MIN_LOG_LEVEL can't hide the first ones: they come before TensorFlow reads it.
_NOTES = (
    b"I0000 ", b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"To enable the following instructions: ",
)  # fmt: skip

Write = Callable[[bytes], None]


class Console:
    """The launcher's stdout and stderr, for several threads: data of one call stay together."""

    # Whether rank 0 may write to the launcher's stdout itself. Keras draws its progress bar only on a terminal.
    is_shared_with_ranks = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends_line = True
        self.others: list[Callable[[str], None]] = []  # which show the launcher's messages too, on other nodes

    def write(self, descriptor: int, data: bytes) -> None:
        """Writes all data. The job continues if the reader has gone (`| head`)."""
        with self._lock, contextlib.suppress(OSError):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            self._ends_line = data.endswith(b"\n")

    def print(self, message: str) -> None:
        """Writes a message of the launcher to stderr, on lines of its own."""
        # Rank 0 writes to the terminal itself, and its progress bar may have ended within a line.
        inside_line = not self._ends_line or os.isatty(_STDOUT)
        self.write(_STDERR, f"{chr(10) if inside_line else ''}{message}\n".encode(errors="replace"))
        for show in self.others:
            show(message)


class CellConsole(Console):
    """What Python calls stdout and stderr: in a notebook, the output of the cell."""

    is_shared_with_ranks = False

    def __init__(self) -> None:
        super().__init__()
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {descriptor: decoder(errors="replace") for descriptor in (_STDOUT, _STDERR)}

    def write(self, descriptor: int, data: bytes) -> None:
        stream = sys.stdout if descriptor == _STDOUT else sys.stderr
        with self._lock:
            stream.write(self._decoders[descriptor].decode(data))
            stream.flush()
            self._ends_line = data.endswith(b"\n")


class Lines:
    """Writes whole lines only, each with a prefix."""

    def __init__(self, prefix: str, write: Write) -> None:
        self._prefix = prefix.encode()
        self._write = write
        self._rest = b""

    def __call__(self, chunk: bytes) -> None:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def close(self) -> None:
        if self._rest:
            self(b"\n")


class WithoutNotes:
    """Leaves out the lines in which TensorFlow describes the machine when it starts. All else passes at once."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._held = b""  # the start of a line that may be a note
        self._starts_line = True

    def __call__(self, chunk: bytes) -> None:
        shown, rest = [], self._held + chunk
        self._held = b""
        while rest:
            line, end, following = rest.partition(b"\n")
            is_note = self._starts_line and line.startswith(_NOTES)
            if not end and (is_note or (self._starts_line and any(note.startswith(line) for note in _NOTES))):
                self._held = rest
                break
            if not is_note:
                shown.append(line + end)
                self._starts_line = bool(end)
            rest = following
        if shown:
            self._write(b"".join(shown))

    def close(self) -> None:
        """Writes the start of a line that has turned out to be no note."""
        if self._held and not self._held.startswith(_NOTES):
            self._write(self._held)


class Tail:
    """Keeps the end of an output."""

    def __init__(self) -> None:
        self._kept = b""

    def __call__(self, chunk: bytes) -> None:
        self._kept = (self._kept + chunk)[-_TAIL_BYTES:]

    def text(self) -> str:
        return self._kept.decode(errors="replace")

    def lines(self, count: int) -> list[str]:
        """Returns the last lines; of a progress bar only its last state."""
        lines = self.text().rstrip().replace("\r\n", "\n").split("\n")
        return [line.rsplit("\r", 1)[-1] for line in lines[-count:]]


class RankOutput:
    """What happens to the output of one rank.

    The mode `"chief"` shows rank 0 only, unchanged; `"all"` shows all ranks, each line with its rank. `shows_notes` is
    for TensorFlow's notes at its start. `restart` says how often all ranks were started before: each has own logs.
    """

    def __init__(
        self, rank: int, mode: str, log_dir: Path | None, console: Console, shows_notes: bool = False, restart: int = 0
    ) -> None:
        self._shows_notes = shows_notes
        self.is_shown = mode == ALL or rank == 0
        self.tail = Tail()
        self.log = log_dir / f"rank-{rank}{f'.restart-{restart}' if restart else ''}.log" if log_dir else None
        self.log_error = ""  # why the log is not complete
        self.place = ""  # where the rank runs, for messages, if there are several nodes
        self.fate = ""  # what became of the rank, if it is known better than by its exit code
        self._log_file = _create(self.log) if self.log else None
        self._log_lock = threading.Lock()
        self._console = console
        self._prefix = f"[{rank}] " if mode == ALL else ""
        self._readers: list[threading.Thread] = []
        shares = console.is_shared_with_ranks and mode == CHIEF and rank == 0 and not log_dir
        self.stdout = None if shares else subprocess.PIPE
        self.stderr = subprocess.PIPE if self.is_shown else subprocess.STDOUT

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        for pipe, descriptor in ((process.stdout, _STDOUT), (process.stderr, _STDERR)):
            if pipe is not None:
                reader = threading.Thread(target=self._read, args=(pipe, descriptor), daemon=True)
                reader.start()
                self._readers.append(reader)

    def drain(self, seconds: float) -> None:
        """Waits until everything is read; has a limit, since an escaped process may keep the pipe open."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self._log_file is not None:
            with self._log_lock:
                self._log_file.close()

    def _read(self, pipe: IO[bytes], descriptor: int) -> None:
        closing: list[Lines | WithoutNotes] = [] if self._log_file is None else [Lines("", self._write_log)]
        # The stdout of a hidden rank includes its stderr, in the right order.
        has_stderr = descriptor == _STDERR or not self.is_shown
        sinks: list[Write] = [*([self.tail] if has_stderr else []), *closing]
        if self.is_shown:
            show: Write = functools.partial(self._console.write, descriptor)
            if self._prefix:
                show = lines = Lines(self._prefix, show)
                closing.append(lines)
            if descriptor == _STDERR and not self._shows_notes:
                show = notes = WithoutNotes(show)
                closing.insert(0, notes)  # what it still holds goes to the lines
            sinks.append(show)
        with pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK_BYTES):
                for sink in sinks:
                    sink(chunk)
        for last in closing:
            last.close()

    def _write_log(self, data: bytes) -> None:
        with self._log_lock:
            if self._log_file is None or self._log_file.closed or self.log_error:
                return
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._log_file.write(rest) :]
            except OSError as error:
                self.log_error = error.strerror or str(error)
        if self.log_error:
            self._console.print(f"keras-dist: {self.log} ends here, but the job continues: {self.log_error}.")


def _create(path: Path) -> io.FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return io.FileIO(path, "w")
    except OSError as error:
        raise ConfigurationError(
            "The logs of the ranks can't be written.", f"--log-dir {path.parent}: {error.strerror}",
            "Name a folder that you may write to; it is created if it does not exist.",
        ) from error
