"""The real framework starts without a word: in a user's script, in a worker, in a notebook."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

nbformat = pytest.importorskip("nbformat")

MODEL = """
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("adam", "mse", jit_compile=False)
_ = model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0)
"""
SCRIPT = "import sparkdl\nimport keras\nimport numpy as np\n" + MODEL
WORKER = """
from sparkdl.launch.devices import DeviceRequest, Resources, start_framework
start_framework(DeviceRequest("tensorflow").place(Resources()))
import keras
import numpy as np
"""


def environment() -> dict[str, str]:
    """A user's: without the switch of TensorFlow that the tests set."""
    return {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}


@pytest.mark.parametrize("code", [SCRIPT, WORKER + MODEL], ids=["script", "worker"])
def test_nothing_is_written(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")


def test_a_notebook_shows_no_lines_and_hears_the_standard_error_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nbclient import NotebookClient

    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not listen to descriptor 2
    after = "import os, sys\nprint('python', file=sys.stderr)\n_ = os.write(2, b'descriptor\\n')"
    cells = [nbformat.v4.new_code_cell(source) for source in (SCRIPT, after)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    first, second = (cell.outputs for cell in notebook.cells)
    assert first == []
    heard = "".join(output.text for output in second)
    assert sorted(heard.split()) == ["descriptor", "python"]
