"""The TPU compiler with a memory: what was compiled before is not compiled again. Runs in the check's process."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_dist.compat import tpu_emulation
from keras_dist.compat.tpu_emulation import OutOfMemoryError, Traced
from keras_dist.diagnostics.targets import Target

# Measured on 2 cores, from a small dense model to ResNet50. Half or twice as long is common.
_SECONDS_PER_OPERATION = 0.03

StartTask = Callable[[str, float | None], None]


class Cache:
    """Results, by what decides about them.

    Args:
        folder: Where they are kept; `None` to keep none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.misses = 0

    def get(self, content: Any) -> dict[str, Any] | None:
        """Returns the result for this content, which JSON can hold."""
        if self._folder is not None:
            with contextlib.suppress(OSError, ValueError):
                result: dict[str, Any] = json.loads((self._folder / _name(content)).read_text())
                return result
        self.misses += 1
        return None

    def put(self, content: Any, result: dict[str, Any]) -> None:
        """Keeps a result."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{_name(content)}.part"
        part.write_text(json.dumps(result))
        part.replace(self._folder / _name(content))


def _name(content: Any) -> str:
    return f"{hashlib.sha256(json.dumps(content).encode()).hexdigest()}.json"


@dataclasses.dataclass(frozen=True)
class Step:
    """What is compiled.

    Args:
        code: Its code.
        content: What decides about the result.
        operations: Number of its operations.
    """

    code: bytes
    content: list[Any]
    operations: int


class Compiler:
    """Compiles steps for a TPU.

    Args:
        target: The TPU.
        start_task: Called at the start of each task with its name, and about how many seconds it takes.
        cache: Results of earlier runs.
    """

    def __init__(self, target: Target, start_task: StartTask, cache: Cache) -> None:
        self._target = target
        self._start_task = start_task
        self._cache = cache
        self._last_seconds: float | None = None

    def step(self, traced: Traced) -> Step:
        """Returns a traced step as the compiler takes it."""
        code, target = tpu_emulation.lower(traced), self._target
        content = [tpu_emulation.fingerprint(code), target.topology, target.replicas, tpu_emulation.versions()]
        return Step(code, content, sum(1 for _ in tpu_emulation.ops_of(traced.graph)))

    def result(self, step: Step, what: str) -> dict[str, Any]:
        """Returns what the compiler says of a step, from the cache if it is there.

        Args:
            step: The step.
            what: Its name, to show progress.
        """
        if (known := self._cache.get(step.content)) is not None:
            return known
        self._start_task(what, self._last_seconds or step.operations * _SECONDS_PER_OPERATION)
        start = time.monotonic()
        result = self._compiled(step.code)
        if result["fits"]:  # the compiler refuses others at once
            self._last_seconds = time.monotonic() - start
        self._cache.put(step.content, result)
        return result

    def _compiled(self, code: bytes) -> dict[str, Any]:
        try:
            compiled = tpu_emulation.compile_for(self._target.topology, self._target.replicas, code)
        except OutOfMemoryError as error:
            return {"fits": False, "memory": error.needed, "available": error.available}
        return {"fits": True, "memory": compiled.memory, "compiled": dataclasses.asdict(compiled)}
