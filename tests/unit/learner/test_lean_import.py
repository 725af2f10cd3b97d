"""What a worker's import of Keras leaves out, and what is found as ever."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest

from sparkdl.learner.framework import lean_import

WORKER = r"""
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
from sparkdl.launch.devices import DeviceRequest, Resources, start_framework
before = len(collections)
start_framework(DeviceRequest("tensorflow", False).place(Resources()))
assert len(collections) == before, "collected garbage while it imported"
assert gc.isenabled() and gc.get_freeze_count() > 100_000
frozen = gc.get_freeze_count()
start_framework(DeviceRequest("tensorflow", False).place(Resources()))
assert gc.get_freeze_count() == frozen
print(sorted({"sklearn", "matplotlib", "IPython"} & set(sys.modules)))
import keras, matplotlib
import numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile("sgd", "mse")
model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
print(round(float(model.evaluate(np.ones((4, 2)), 2 * np.ones((4, 1)), verbose=0)), 3))
"""


def test_other_threads_and_later_imports_find_everything() -> None:
    name = "matplotlib"  # of the packages left out the one that is surely installed
    kept = {k: sys.modules.pop(k) for k in list(sys.modules) if k.split(".")[0] == name}
    try:
        found: list[object] = []
        with lean_import("tensorflow"):
            with pytest.raises(ModuleNotFoundError):
                __import__(name)
            thread = threading.Thread(target=lambda: found.append(__import__(name)))
            thread.start()
            thread.join()
        assert found
        sys.modules.pop(name)
        assert __import__(name)
    finally:
        sys.modules.update(kept)


def test_what_the_backend_needs_is_found() -> None:
    pytest.importorskip("jax")
    kept = sys.modules.pop("jax")
    before = list(sys.meta_path)
    try:
        for backend in ("jax", None):
            with lean_import(backend):
                assert find_spec("jax") is not None
        with lean_import("torch"):
            assert find_spec("jax") is None
        assert sys.meta_path == before
    finally:
        sys.modules["jax"] = kept


@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.slow)])
def test_keras_trains_without_them(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", WORKER.replace("tensorflow", backend)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[0] == "[]"
