"""A process that is killed while it writes tables leaves tables that are whole, or none."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sparkdl.errors import ResourceError
from sparkdl.tables.files import MANIFEST, TableFiles, load_rows
from sparkdl.tables.store import RowStore

WRITER = """
import sys
import numpy as np
from sparkdl.tables.files import write_manifest, write_part
from sparkdl.tables.store import RowStore

store = RowStore(8, "sgd", "zeros")
ids = np.arange(40_000)
for step in range(1, 1000):
    store.push(ids, np.full((len(ids), 8), -1, np.float32), 1.0)
    folder = f"{sys.argv[1]}/{step:04d}"
    write_part(store, folder, 0, 1)
    write_manifest(folder, 1)
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_a_killed_writer_are_whole_or_none(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    folders = sorted(tmp_path.iterdir())
    whole = [folder for folder in folders if (folder / MANIFEST).exists()]
    assert len(whole) >= 3
    assert folders[:-1] == whole[: len(folders) - 1], "all but the last"
    for folder in whole:
        store = RowStore(8, "sgd", "zeros")
        load_rows(store, str(folder), 0, 1)
        assert (store.pull(np.arange(40_000)) == int(folder.name)).all()
    if folders != whole:
        with pytest.raises(ResourceError):
            TableFiles(str(folders[-1]))
