"""What each Python process of a test run does first: Keras and TensorFlow find no JAX,
scikit-learn, Matplotlib and IPython.

The virtual environment of the tests has them all, and both packages import all they find, which
takes as long as Keras and TensorFlow themselves. Most users have none of the four, or no JAX. What
a test or the library imports is found as ever, and so is JAX with its backend. This module is found
because its folder is in ``PYTHONPATH`` (``conftest.py``).
"""

from __future__ import annotations

import os
import sys

_HIDDEN = {"IPython", "jax", "matplotlib", "sklearn"}
_IMPORTERS = ("keras", "tensorflow")


class _Hides:
    """A finder that refuses some packages to Keras and TensorFlow, and finds nothing itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname not in _HIDDEN or fullname == os.environ.get("KERAS_BACKEND"):
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in _IMPORTERS:
            raise ModuleNotFoundError(f"{fullname} is hidden from Keras", name=fullname)


sys.meta_path.insert(0, _Hides())  # type: ignore[arg-type]
