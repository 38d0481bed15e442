"""Where the output of each rank goes: to the terminal, with or without a prefix, into a log, or nowhere."""

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

from keras_dist import environment
from keras_dist.errors import ConfigurationError

CHIEF, ALL = "chief", "all"
MODES = (CHIEF, ALL)
_CHUNK_BYTES = _LINE_BYTES = _TAIL_BYTES = 65536
_DRAIN_SECONDS = 0.3
_STDOUT, _STDERR = 1, 2
# TF_CPP_MIN_LOG_LEVEL can't hide the first ones: they come before TensorFlow reads it.
NOTES = (
    b"I0000 ", b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"To enable the following instructions: ",
)  # fmt: skip


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[write(rest) :]


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
            _write_all(functools.partial(os.write, descriptor), data)
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
    """Leaves out notes, and writes the other lines with a prefix: as a whole, or at once what can't be a note."""

    def __init__(
        self, write: Callable[[bytes], None], *, prefix: str = "", whole: bool = True, notes: tuple[bytes, ...] = ()
    ) -> None:
        self._write, self._prefix, self._whole, self._notes = write, prefix.encode(), whole, notes
        self._held = b""  # the start of a line, not written yet
        self._within = False  # whether the start of this line was written

    def __call__(self, chunk: bytes) -> None:
        *lines, self._held = (self._held + chunk).split(b"\n")
        if self._whole and len(self._held) > _LINE_BYTES:
            lines.append(self._held)
            self._held = b""
        shown = b""
        for line in lines:
            if self._within or not line.startswith(self._notes):
                shown += self._prefix + line + b"\n"
            self._within = False
        may_be_note = any(note.startswith(self._held[: len(note)]) for note in self._notes)
        if self._held and not self._whole and (self._within or not may_be_note):
            shown += self._held
            self._within, self._held = True, b""
        if shown:
            self._write(shown)

    def close(self) -> None:
        if self._held and not self._held.startswith(self._notes):
            self._write(self._prefix + self._held + (b"\n" if self._whole else b""))


class RankOutput:
    """What happens to the output of one rank.

    The mode `"chief"` shows rank 0 only, unchanged; `"all"` shows all ranks, each line with its rank. `restart` says
    how often all ranks were started before: each start has its own logs. `place` is where the rank runs, if there are
    several.
    """

    def __init__(
        self, rank: int, mode: str, log_dir: Path | None, console: Console, restart: int = 0, place: str = ""
    ) -> None:
        self.is_shown = mode == ALL or rank == 0
        self.tail = b""  # the end of what was written to stderr; of a hidden rank, of all
        self.log = log_dir / f"rank-{rank}{f'.restart-{restart}' if restart else ''}.log" if log_dir else None
        self.log_error = ""  # why the log is not complete
        self.place = f" on {place}" if place else ""
        self.fate = ""  # what became of the rank, where more is known than its exit code
        self._log_file = None if self.log is None else _create(self.log)
        self._log_lock = threading.Lock()
        self._console = console
        self._prefix = f"[{rank}] " if mode == ALL else ""
        self._readers: list[threading.Thread] = []
        shares = console.is_shared_with_ranks and mode == CHIEF and rank == 0 and not log_dir
        self.stdout = None if shares else subprocess.PIPE
        self.stderr = subprocess.PIPE if self.is_shown else subprocess.STDOUT

    def text(self) -> str:
        return self.tail.decode(errors="replace")

    def last_lines(self, count: int) -> list[str]:
        """Returns the last lines; of a progress bar only its last state."""
        lines = self.text().rstrip().replace("\r\n", "\n").split("\n")
        return [line.rsplit("\r", 1)[-1] for line in lines[-count:]]

    def attach(self, process: subprocess.Popen[bytes]) -> None:
        for pipe, descriptor in ((process.stdout, _STDOUT), (process.stderr, _STDERR)):
            if pipe is not None:
                reader = threading.Thread(target=self._read, args=(pipe, descriptor), daemon=True)
                reader.start()
                self._readers.append(reader)

    def drain(self) -> None:
        """Waits until everything is read; has a limit, since an escaped process may keep the pipe open."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        if self._log_file is not None:
            with self._log_lock:
                self._log_file.close()

    def _read(self, pipe: IO[bytes], descriptor: int) -> None:
        sinks = [] if self._log_file is None else [Lines(self._write_log)]
        if self.is_shown:
            write = functools.partial(self._console.write, descriptor)
            hides_notes = descriptor == _STDERR and environment.get(environment.TENSORFLOW_LOG_LEVEL) is None
            notes = NOTES if hides_notes else ()
            sinks.append(Lines(write, prefix=self._prefix, whole=bool(self._prefix), notes=notes))
        with pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK_BYTES):
                if descriptor == _STDERR or not self.is_shown:  # the stdout of a hidden rank includes its stderr
                    self.tail = (self.tail + chunk)[-_TAIL_BYTES:]
                for sink in sinks:
                    sink(chunk)
        for sink in sinks:
            sink.close()

    def _write_log(self, data: bytes) -> None:
        with self._log_lock:
            if self._log_file is None or self._log_file.closed or self.log_error:
                return
            try:
                _write_all(self._log_file.write, data)
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
