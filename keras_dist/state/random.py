"""The random states of a process: agreed on by all ranks, with the seeds that a script has set; taken and set again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.comm.backend import Backend
from keras_dist.compat import keras_random

_CALL = "kd.init() (random states)"


def agree(backend: Backend, seed: int | None) -> str:
    """Gives the random generators of Python, NumPy, TensorFlow and Keras the same state on all ranks.

    Those that already have the same state, since the script seeds them, are kept. The others get the chief's seed.

    Args:
        backend: The backend.
        seed: The user's seed for all of them, or `None`.

    Returns:
        What was done, for the log.
    """
    keras_random.draw_alike(None)
    if seed is not None:
        keras.utils.set_random_seed(seed)
        return f"seeded with {seed}"
    if backend.topology.size == 1:
        return "unchanged"
    local: dict[str, Any] = {
        "python": _hash(random.getstate()),
        "numpy": _hash(np.random.get_state()),
        "tensorflow": keras_random.tensorflow_seed(),
        "keras": keras_random.global_seed(),
    }
    gathered = backend.all_gather_object(_CALL, (local, random.SystemRandom().getrandbits(31)))
    states, chiefs_seed = [state for state, _ in gathered], gathered[0][1]
    different = [name for name in local if any(state[name] != states[0][name] for state in states)]
    backend.drawn_seed = chiefs_seed
    _seed(different, chiefs_seed)
    if "tensorflow" not in different and local["tensorflow"] is None:  # then it seeds itself from the clock
        keras_random.draw_alike(chiefs_seed)
        different.append("tensorflow")
    kept = [name for name in local if name not in different]
    return f"kept: {', '.join(kept) or 'none'}; given the chief's seed: {', '.join(different) or 'none'}"


def _seed(names: list[str], seed: int) -> None:
    if "python" in names:
        random.seed(seed)
    if "numpy" in names:
        np.random.seed(seed)
    if "tensorflow" in names:
        tf.random.set_seed(seed)
    if "keras" in names:
        keras_random.set_global_seed(seed)


def states() -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy and Keras."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "keras": keras_random.global_seed()}


def set_states(of_generators: Mapping[str, Any]) -> None:
    """Sets the states that `states` has returned."""
    random.setstate(of_generators["python"])
    np.random.set_state(of_generators["numpy"])
    if isinstance(of_generators["keras"], list):
        keras_random.set_global_state(of_generators["keras"])


def _hash(state: Any) -> str:
    return hashlib.sha256(repr([_plain(part) for part in state]).encode()).hexdigest()


def _plain(part: Any) -> Any:
    return part.tolist() if isinstance(part, np.ndarray) else part
