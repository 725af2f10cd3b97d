"""GPU pinning, with addresses that a discovery script invents, on a real local-cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from scripted import run_script

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


@pytest.mark.parametrize("part", ["fit", pytest.param("inference", marks=pytest.mark.slow)])
def test_each_task_sees_its_own_gpus_also_in_reused_workers(part: str) -> None:
    assert "GPU-TEST-OK" in run_script("gpu_fit.py", part)


@pytest.mark.parametrize(("gpus", "expected"), [(("GPU-a", "MIG-b"), "GPU-a,MIG-b"), ((), "-1")])
def test_the_framework_is_imported_with_its_devices_and_the_environment_restored(
    gpus: tuple[str, ...], expected: str
) -> None:
    code = f"""
        import os, sys
        seen = []
        class Spy:
            def find_spec(self, name, path=None, target=None):
                if name == 'tensorflow':
                    seen.append(os.environ.get('CUDA_VISIBLE_DEVICES'))
        sys.meta_path.insert(0, Spy())
        os.environ.pop('CUDA_VISIBLE_DEVICES', None)
        before = dict(os.environ)
        from sparkdl.launch.devices import Placement, needs_child, start_framework
        here = Placement('tensorflow', {gpus!r}, 1)
        assert not needs_child(here)
        start_framework(here)
        assert seen == [{expected!r}], seen
        assert os.environ.get('CUDA_VISIBLE_DEVICES') is None
        assert not needs_child(here)
        assert needs_child(Placement('tensorflow', ('GPU-other',), 1))
        assert needs_child(Placement('jax', {gpus!r}, 1))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
