"""``docker/trim_packages.sh``: what it takes from an image, and what it leaves."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GONE = (
    "tensorflow/include/a.h", "clang/cindex.py", "numpy/tests/test_a.py",
    "pyspark/jars/connect-repl/ammonite.jar", "pyarrow/libarrow_flight.so.2600",
    "pyarrow/libarrow_python_flight.so", "pyarrow/_flight.cpython-311.so",
)  # fmt: skip
LEFT = (
    "pyspark/jars/spark-core.jar", "pyarrow/libarrow.so.2600", "pyarrow/libarrow_substrait.so.2600",
    "pyarrow/flight.py", "tensorflow/__init__.py",
)  # fmt: skip


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="all libraries stay")
def test_what_goes_and_what_stays(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for name in (*GONE, *LEFT):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_bytes(b"x")
    jar = packages / "pyspark" / "jars" / "rocksdbjni-9.8.4.jar"
    libraries = [f"librocksdbjni-{system}" for system in
                 ("linux64.so", "linux64-musl.so", "linux-aarch64.so", "win64.dll")]  # fmt: skip
    with zipfile.ZipFile(jar, "w") as file:
        for name in ("org/rocksdb/RocksDB.class", *libraries):
            file.writestr(name, name)
    python = tmp_path / "python"  # its packages are those above
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {packages}; else exec {sys.executable} "$@"; fi\n'
    )
    python.chmod(0o755)
    subprocess.run(
        ["sh", str(ROOT / "docker" / "trim_packages.sh")],
        env={**os.environ, "PYTHON": str(python)}, check=True, capture_output=True,
    )  # fmt: skip
    assert [name for name in GONE if (packages / name).exists()] == []
    assert [name for name in LEFT if not (packages / name).exists()] == []
    own = libraries[0 if platform.machine() == "x86_64" else 2]
    with zipfile.ZipFile(jar) as file:
        assert file.namelist() == ["org/rocksdb/RocksDB.class", own]
        assert file.read(own) == own.encode()
    assert [path.name for path in jar.parent.iterdir() if path.name.endswith(".part")] == []
