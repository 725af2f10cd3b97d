"""GPUs by TensorFlowOnSpark's names, with a driver's tool that says what the test wants."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkdl.compat.tfos import gpu_info
from sparkdl.errors import ResourceError

_TOOL = """#!/bin/sh
if [ "$1" = -L ]; then
  for i in 0 1 2 3; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i$i$i)"; done
else
  echo GPU-111
fi
"""


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(_TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_free_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_info.is_gpu_available()
    assert gpu_info.get_gpus(2) == "0,2", "a process computes on GPU 1"
    assert gpu_info.get_gpus(1, worker_index=1, format=gpu_info.AS_LIST) == ["2"]
    assert gpu_info.get_gpus(1, worker_index=2) == "3"
    with pytest.raises(ResourceError, match="3 free of 4"):
        gpu_info.get_gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-111,3")
    assert gpu_info.get_gpus() == "3"


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not gpu_info.is_gpu_available()
    with pytest.raises(ResourceError, match="1 free GPUs"):
        gpu_info.get_gpus()
