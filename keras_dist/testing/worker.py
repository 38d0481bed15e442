"""A rank of `keras_dist.testing`: joins the cluster, then runs the functions that arrive through a pipe."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing import connection
from typing import Any

from keras_dist.backends import find, load
from keras_dist.launcher.function import cloudpickle_module, dumps_failure


def serve(descriptor: int, backend: str, options: Mapping[str, Any], threads: int) -> None:
    """Runs the functions that arrive through a connection until it is closed: the program of a rank.

    `descriptor` is the inherited end of the pipe; as many operations may run at once as there are `threads`: one for
    each replica in this process.
    """
    parent = connection.Connection(descriptor)
    _answer(parent, functools.partial(_join, backend, options, threads))
    home = os.getcwd()
    with contextlib.suppress(EOFError):  # the pool is closed
        while True:
            request = parent.recv()
            os.chdir(home)
            _answer(parent, functools.partial(_run, request))


def _answer(parent: connection.Connection, work: Callable[[], Any]) -> None:
    try:
        answer = True, bytes(cloudpickle_module().dumps(work()))
    except BaseException as error:
        answer = False, dumps_failure(error, __file__)
    parent.send(answer)


def _join(backend: str, options: Mapping[str, Any], threads: int) -> None:
    import keras  # noqa: F401 - here, so that importing it does not use up the time limit of a function
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    import keras_dist

    emulation = find(backend).emulation
    if emulation:
        keras_dist.init(load(emulation)(**options))
    else:
        keras_dist.init(backend, **options)
    # `clear_session` collects garbage after each function; TensorFlow's objects stay, so they need no search.
    gc.collect()
    gc.freeze()


def _run(request: bytes) -> Any:
    """Resets what an earlier function may have changed, seeds the random states, and calls the function."""
    import keras
    import tensorflow as tf

    import keras_dist

    if not request:  # whether the ranks still reach each other
        return keras_dist.barrier()
    keras.config.set_floatx("float32")
    keras.backend.clear_session()  # also resets the dtype policy
    tf.config.run_functions_eagerly(False)
    keras.utils.set_random_seed(0)
    sys.path[:], call = pickle.loads(request)
    fn, args = pickle.loads(call)
    return fn(*args)
