"""Which Keras backend runs in this process, and the start of its framework.

Each function imports what it needs when it is called, as a framework keeps the devices that it
saw when it was imported.
"""

from __future__ import annotations

import contextlib
import sys

from sparkdl.errors import ResourceError


def running_backend() -> str | None:
    """The Keras backend of this process; None if Keras is not imported yet."""
    if "keras" not in sys.modules:
        return None
    import keras

    return str(keras.backend.backend())


def start_backend(backend: str | None, cores: int) -> None:
    """Imports Keras on a backend, whose framework is held to some CPU cores.

    The environment (``KERAS_BACKEND``, ``CUDA_VISIBLE_DEVICES``) must be set before.

    Args:
        backend: ``'tensorflow'``, ``'jax'`` or ``'torch'``; None: any.
        cores: CPU cores of this process (JAX takes all).

    Raises:
        ResourceError: Keras runs on another backend.
    """
    if backend == "tensorflow":
        bound_tensorflow(cores)
    elif backend == "torch":
        import torch

        torch.set_num_threads(cores)
        torch.cuda.is_available()  # looks at the devices now
    elif backend == "jax":
        import jax

        jax.devices()  # looks at the devices now
    import keras

    if backend is not None and keras.backend.backend() != backend:
        raise ResourceError(
            "Keras runs on another backend than the model was made with",
            expected=backend,
            received=keras.backend.backend(),
        )


def bound_tensorflow(cores: int) -> None:
    """Holds TensorFlow to some CPU cores, and makes it take GPU memory only as it needs it.

    Then several processes can share a GPU. No effect once TensorFlow has started.
    """
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(cores)
        tf.config.threading.set_inter_op_parallelism_threads(max(1, min(2, cores)))
    for device in tf.config.list_physical_devices("GPU"):
        with contextlib.suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(device, True)


def seed_everything(seed: int) -> None:
    """Sets the seeds of Python, NumPy and the backend, as ``keras.utils.set_random_seed`` does."""
    import keras

    keras.utils.set_random_seed(seed)
