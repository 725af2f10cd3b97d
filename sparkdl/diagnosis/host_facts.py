"""The facts of one process about its Python, its packages and its machine.

Executors run this file as a program (``python -c SOURCE OPTIONS``) with whatever Python they have:
it needs the standard library only, of Python 3.7 or newer, and nothing of sparkdl.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMPORTED = ("numpy", "pyarrow", "pandas", "cloudpickle", "sparkdl")
"""Packages that are imported, which is the only proof; each is quick."""
LOOKED_UP = ("keras", "tensorflow", "jax", "torch", "horovod")
"""Packages that take seconds to import: whether they are there, and which version."""
_WRITTEN_BYTES = 1 << 20


def collect(options: dict[str, Any]) -> dict[str, Any]:
    """The facts as plain values that JSON can hold.

    Args:
        options: ``'resolve'``: a host name to resolve here; ``'folders'``: more folders that hold
            Python modules; ``'marker'``: a file to look for.
    """
    sys.path[:0] = [os.path.abspath(folder) for folder in options.get("folders", ())]
    packages: dict[str, str | None] = {}
    problems: dict[str, str] = {}
    for name in IMPORTED:
        try:
            packages[name] = str(getattr(importlib.import_module(name), "__version__", "unknown"))
        except BaseException as error:  # a broken package may raise anything
            packages[name], problems[name] = None, f"{type(error).__name__}: {error}"
    packages.update({name: _version(name) for name in LOOKED_UP})
    return {
        "host": socket.gethostname(),
        "network": _network(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "packages": packages,
        "problems": problems,
        "foreign": _foreign(),
        "horovod": _horovod_builds(),
        "shm": _space("/dev/shm"),
        "disk": _disk(tempfile.gettempdir()),
        "memory": _memory(),
        "cpus": _cpus(),
        "gpus": _gpus(),
        "resolved": _resolved(options.get("resolve")),
        "found": os.path.exists(options["marker"]) if options.get("marker") else None,
    }


def _foreign() -> dict[str, Any]:
    """Packages called sparkdl that are not this one; other libraries had the name before.

    ``'imported'`` is the folder of the one that is imported here, None if this is ours;
    ``'behind'`` are folders of others that ours hides.
    """
    places = [os.path.join(folder or os.getcwd(), "sparkdl") for folder in sys.path]
    packages = [place for place in places if os.path.isfile(os.path.join(place, "__init__.py"))]
    foreign = [place for place in packages if not _is_ours(place)]
    try:
        spec = importlib.util.find_spec("sparkdl")
        first = os.path.dirname(spec.origin) if spec is not None and spec.origin else ""
    except BaseException:
        first = ""
    imported = first if first in foreign else None
    others = sorted({place for place in foreign if place != imported})
    return {"imported": imported, "behind": [] if imported else others}


def _is_ours(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "spark", "spark_model.py"))


def _version(name: str) -> str | None:
    try:
        if importlib.util.find_spec(name) is None:
            return None
    except BaseException:
        return None
    try:
        from importlib import metadata

        for distribution in (name, name + "-cpu", name + "-gpu"):
            try:
                return metadata.version(distribution)
            except metadata.PackageNotFoundError:
                continue
    except BaseException:
        pass
    return "unknown"


def _horovod_builds() -> list[str]:
    """The frameworks that Horovod was built for: each has a compiled library."""
    try:
        spec = importlib.util.find_spec("horovod")
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
    except BaseException:
        return []
    return sorted(
        framework
        for framework in ("tensorflow", "torch")
        if any(glob.glob(os.path.join(folder, framework, "mpi_lib*.so")) for folder in folders)
    )


def _network() -> str:
    """:func:`sparkdl.wire.hosts.host_id`, which cannot be imported here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _space(folder: str) -> dict[str, int] | None:
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):
        return None
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def _disk(folder: str) -> dict[str, Any]:
    """The folder for partitions that are too large for memory; a file is really written there."""
    problem = None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * _WRITTEN_BYTES)
            file.flush()
    except OSError as error:
        problem = str(error)
    return {"folder": folder, "problem": problem, "free": (_space(folder) or {}).get("free", 0)}


def _first_number(*paths: str) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return None


def _cgroup_folders() -> list[str]:
    """The folder with the limits of this process' control group: its own, or the root's."""
    inner: list[str] = []
    with contextlib.suppress(OSError, IndexError), open("/proc/self/cgroup") as file:
        inner = [line.strip().split(":", 2)[2] for line in file if line.startswith("0::")]
    return ["/sys/fs/cgroup" + path for path in inner if path != "/"] + ["/sys/fs/cgroup"]


def _memory() -> dict[str, int | None]:
    """Bytes: the limit of the container if there is one, and what the machine has left."""
    folders = _cgroup_folders()
    limit = _first_number(*[folder + "/memory.max" for folder in folders],
                          "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # fmt: skip
    available = None
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    return {"limit": limit if limit is not None and limit < 1 << 60 else None, "free": available}


def _cpus() -> float:
    """Cores that this process may use: of its affinity, and of its container's quota."""
    try:
        count = float(len(os.sched_getaffinity(0)))
    except AttributeError:
        count = float(os.cpu_count() or 1)
    for folder in _cgroup_folders():
        try:
            quota, period = Path(folder, "cpu.max").read_text().split()[:2]
            if quota != "max":
                count = min(count, int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return count


def _gpus() -> int | None:
    """The machine's GPUs by NVIDIA's own tool, or None where there is no driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith(b"GPU ") for line in listed.stdout.splitlines())


def _resolved(name: str | None) -> list[str] | None:
    if not name:
        return None
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name.strip("[]"), None)})
    except OSError:
        return []


if __name__ == "__main__":
    print("#facts " + json.dumps(collect(json.loads(sys.argv[1]))), flush=True)
