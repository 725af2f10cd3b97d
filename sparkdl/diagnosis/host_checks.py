"""Findings from facts of the driver and the executors: Python, packages, memory, disk, devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparkdl.diagnosis.executors import Executors, Facts
from sparkdl.diagnosis.report import Check, Status

LEAST_SHM_BYTES = 256 << 20
LEAST_DISK_BYTES = 2 << 30
FRAMEWORK_BYTES = 1536 << 20
"""Memory of a Python worker with a framework and a small model."""
_NEEDED = ("numpy", "pyarrow", "pandas", "cloudpickle", "sparkdl", "keras")


def check_hosts(
    driver: Facts, executors: Executors, backend: str, cores: int, driver_host: str
) -> list[Check]:
    """All checks of facts."""
    found = executors.facts
    checks = [check_python(driver, executors)]
    if not found:
        return checks
    return [
        *checks,
        check_packages(driver, found, executors.interpreter),
        check_backend(found, backend),
        check_horovod(driver, found, backend),
        check_addresses(driver, found, driver_host),
        check_shm({"driver": driver, **found}),
        check_disk({"driver": driver, **found}),
        check_memory(driver, found),
        check_cpus(driver, found, cores),
    ]


def check_python(driver: Facts, executors: Executors) -> Check:
    """Whether every executor starts a Python of the driver's minor version."""
    wanted = _minor(str(driver["python"]))
    expected = f"Python {wanted} on every executor, as on the driver"
    hint = (
        "set PYSPARK_PYTHON (or spark.pyspark.python) to an interpreter that every executor has, "
        "or ship one with --archives; before the session starts"
    )
    if not executors.answered:
        return Check(
            "python", "error", f"no executor answered: {executors.problem}",
            "an answer of every executor",
            "are the executors up and the slots free? Look at Spark's page and the executors' "
            "logs; on a busy cluster timeout_s= gives more time",
        )  # fmt: skip
    bad = [
        f"{e.name}: {(e.output.strip().splitlines() or [''])[-1][:300]} ({executors.interpreter})"
        if e.facts is None
        else f"{e.name}: Python {e.facts['python']} ({e.facts['executable']})"
        for e in executors.answered
        if e.facts is None or _minor(str(e.facts["python"])) != wanted
    ]
    if bad:
        return Check("python", "error", _few(bad), expected, hint)
    missing = executors.known - len(executors.answered)
    if missing > 0:
        return Check(
            "python", "warning", f"{missing} of {executors.known} executors did not answer",
            "an answer of each", "another job may have all slots; look at Spark's page",
        )  # fmt: skip
    return Check(
        "python", "ok",
        f"{driver['python']} on the driver and on {_count(executors.known, 'executor')}",
    )  # fmt: skip


def check_packages(driver: Facts, executors: Mapping[str, Facts], interpreter: str) -> Check:
    """Whether every executor has the packages that a task imports, in fitting versions."""
    foreign = _foreign_package(driver, executors)
    if foreign is not None and foreign.status == "error":
        return foreign
    errors, warnings = [], []
    for name, facts in executors.items():
        for package in _NEEDED:
            here, there = driver["packages"].get(package), facts["packages"].get(package)
            if there is None:
                why = facts["problems"].get(package, "not installed")
                errors.append(f"{name}: no {package} ({why})")
            elif here is None or here == there:
                continue
            elif package == "sparkdl" or _major(here) != _major(there):
                errors.append(f"{name}: {package} {there}, the driver has {here}")
            else:
                warnings.append(f"{name}: {package} {there}, the driver has {here}")
    status: Status = "error" if errors else "warning" if warnings else "ok"
    if foreign is not None and status != "error":
        return foreign
    if status != "ok":
        return Check(
            "packages", status, _few(errors + warnings), "the driver's packages on every executor",
            f"install them where {interpreter!r} is, or ship one environment with --archives",
        )  # fmt: skip
    versions = ", ".join(f"{p} {driver['packages'][p]}" for p in _NEEDED if driver["packages"][p])
    return Check("packages", "ok", versions)


def _foreign_package(driver: Facts, executors: Mapping[str, Facts]) -> Check | None:
    """Names another package called sparkdl, which hides this one, or may elsewhere."""
    hidden = [
        f"{name}: {facts['foreign']['imported']} is imported instead of this one"
        for name, facts in executors.items()
        if facts["foreign"]["imported"]
    ]
    behind = [
        f"{name}: {', '.join(facts['foreign']['behind'])} stands behind this one"
        for name, facts in {"driver": driver, **executors}.items()
        if facts["foreign"]["behind"]
    ]
    if not hidden and not behind:
        return None
    return Check(
        "packages", "error" if hidden else "warning",
        "another package is called sparkdl: " + _few(hidden + behind),
        "the package of sparkdl-keras alone",
        "pip uninstall sparkdl spark-deep-learning there; where a runtime brings it, ship this one "
        "with --archives or --py-files, which are found first",
    )  # fmt: skip


def check_backend(executors: Mapping[str, Facts], backend: str) -> Check:
    """Whether every executor has the framework of the driver's Keras backend."""
    bad = [name for name, facts in executors.items() if facts["packages"].get(backend) is None]
    if bad:
        return Check(
            "backend", "error", f"no {backend} on {_few(bad)}",
            f"{backend}, for the Keras backend {backend!r}",
            f"pip install 'sparkdl-keras[{backend}]' there, or set KERAS_BACKEND on the driver",
        )  # fmt: skip
    versions = sorted({str(facts["packages"][backend]) for facts in executors.values()})
    if len(versions) > 1:
        return Check(
            "backend", "warning", f"{backend} {' and '.join(versions)}", "one version everywhere",
            "ship one environment with --archives",
        )  # fmt: skip
    return Check("backend", "ok", f"{backend}: {backend} {versions[0]}")


def check_horovod(driver: Facts, executors: Mapping[str, Facts], backend: str) -> Check:
    """Whether Horovod is everywhere or nowhere, and built for the framework."""
    here = driver["packages"].get("horovod")
    bad = [n for n, facts in executors.items() if facts["packages"].get("horovod") != here]
    if bad:
        return Check(
            "horovod", "warning", f"{here or 'none'} on the driver, another or none on {_few(bad)}",
            "the same Horovod everywhere, or none",
            "communicator='builtin' needs no Horovod",
        )  # fmt: skip
    if here is None:
        return Check("horovod", "ok", "not installed: communicator='builtin' is used")
    unbuilt = [n for n, facts in executors.items() if backend not in facts["horovod"]]
    if unbuilt and backend != "jax":
        return Check(
            "horovod", "warning", f"{here}, not built for {backend} on {_few(unbuilt)}",
            f"a build with HOROVOD_WITH_{backend.upper()}=1",
            "build it again (README: make horovod); communicator='builtin' needs no Horovod",
        )  # fmt: skip
    return Check("horovod", "ok", f"{here}, built for {' and '.join(driver['horovod']) or 'none'}")


def check_addresses(driver: Facts, executors: Mapping[str, Facts], driver_host: str) -> Check:
    """Whether the executors' machines find the driver under its name."""
    lost, loopback = [], []
    for name, facts in executors.items():
        resolved = facts["resolved"]
        if resolved == []:
            lost.append(name)
        elif facts["network"] != driver["network"] and resolved:
            near = all(address.startswith("127.") or address == "::1" for address in resolved)
            loopback += [name] * near
    if lost:
        return Check(
            "addresses", "error", f"{driver_host!r} does not resolve on {_few(lost)}",
            "a name or address of the driver that executors resolve",
            "set spark.driver.host to an address of the driver's machine",
        )  # fmt: skip
    if loopback:
        return Check(
            "addresses", "error",
            f"the driver's {driver_host!r} is a loopback address for {_few(loopback)}",
            "an address of the driver that other machines reach",
            "set spark.driver.host to it (SPARK_LOCAL_IP on the driver), or correct /etc/hosts, or "
            "network=Network(server_bind='0.0.0.0', server_address=<that address>)",
        )  # fmt: skip
    return Check("addresses", "ok", f"executors resolve the driver's {driver_host!r}")


def check_shm(processes: Mapping[str, Facts]) -> Check:
    """Whether shared memory has room for weights."""
    bad = []
    for name, facts in processes.items():
        space = facts["shm"]
        if space is None or space["free"] < LEAST_SHM_BYTES:
            bad.append(f"{name}: {size_text(space['free']) if space else 'none'}")
    if bad:
        return Check(
            "/dev/shm", "warning", "free " + _few(bad),
            f"at least {size_text(LEAST_SHM_BYTES)} free",
            "a container: --shm-size=2g, or a volume of medium Memory at /dev/shm; else "
            "parameter_server_mode='socket'",
        )  # fmt: skip
    free = min(facts["shm"]["free"] for facts in processes.values())
    return Check("/dev/shm", "ok", f"{size_text(free)} free or more")


def check_disk(processes: Mapping[str, Facts]) -> Check:
    """Whether what is too large for memory can go to disk: partitions, and the driver's arrays."""
    errors, warnings = [], []
    for name, facts in processes.items():
        disk = facts["disk"]
        if disk["problem"]:
            errors.append(f"{name}: {disk['folder']}: {disk['problem']}")
        elif disk["free"] < LEAST_DISK_BYTES:
            warnings.append(f"{name}: {size_text(disk['free'])} free in {disk['folder']}")
    if errors or warnings:
        return Check(
            "disk", "error" if errors else "warning", _few(errors + warnings),
            f"{size_text(LEAST_DISK_BYTES)} free in the folder for temporary files",
            "free some, or name another folder: spark.executorEnv.TMPDIR (on the driver TMPDIR)",
        )  # fmt: skip
    free = min(facts["disk"]["free"] for facts in processes.values())
    folders = sorted({str(facts["disk"]["folder"]) for facts in processes.values()})
    return Check("disk", "ok", f"{size_text(free)} free or more in {', '.join(folders)}")


def check_memory(driver: Facts, executors: Mapping[str, Facts]) -> Check:
    """Whether the machines have memory for a Python worker of each executor, and for the driver."""
    bad = []
    own = room_of(driver)
    if own is not None and own < FRAMEWORK_BYTES:
        bad.append(f"{size_text(own)} for the driver")
    for host, count, facts in hosts_of(executors):
        room = room_of(facts)
        if room is not None and room < count * FRAMEWORK_BYTES:
            bad.append(f"{host}: {size_text(room)} for {_count(count, 'executor')}")
    if bad:
        return Check(
            "memory", "warning", _few(bad),
            f"{size_text(FRAMEWORK_BYTES)} for the driver's Python and for each Python worker, "
            "beside the memory of Java",
            "larger containers (spark.executor.memoryOverhead, spark.driver.memoryOverhead), or "
            "fewer executors on a machine",
        )  # fmt: skip
    processes = [driver, *executors.values()]
    frees = [f["memory"]["free"] for f in processes if f["memory"]["free"] is not None]
    found = f"{size_text(min(frees))} free or more" if frees else "not known here"
    return Check("memory", "ok", found)


def room_of(facts: Facts) -> int | None:
    """Bytes that a process may have: of its container, or what its machine has left."""
    limits = [facts["memory"][name] for name in ("limit", "free")]
    return min((size for size in limits if size is not None), default=None)


def check_cpus(driver: Facts, executors: Mapping[str, Facts], cores: int) -> Check:
    """Whether the machines have the cores that Spark counts on, and the driver one."""
    bad = [f"{driver['cpus']:g} for the driver"] if driver["cpus"] < 1 else []
    bad += [
        f"{host}: {facts['cpus']:g} for {_count(count, 'executor')} of {_count(cores, 'core')}"
        for host, count, facts in hosts_of(executors)
        if facts["cpus"] < count * cores
    ]
    if bad:
        return Check(
            "cpus", "warning", _few(bad), "the cores that Spark was told of, one for the driver",
            "fewer spark.executor.cores, or a larger CPU quota: threads wait for each other",
        )  # fmt: skip
    least = min(float(facts["cpus"]) for facts in (driver, *executors.values()))
    return Check("cpus", "ok", f"{least:g} or more on each machine")


def hosts_of(executors: Mapping[str, Facts]) -> Iterable[tuple[str, int, Facts]]:
    """Each machine (or container): its name, how many executors it has, and facts of one."""
    groups: dict[str, list[Facts]] = {}
    for facts in executors.values():
        groups.setdefault(str(facts["network"]), []).append(facts)
    for group in groups.values():
        yield str(group[0]["host"]), len(group), group[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(version: str) -> str:
    return version.split(".", 1)[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _few(items: list[str], most: int = 4) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def size_text(count: int) -> str:
    """Bytes for people.

    >>> size_text(3 << 29), size_text(5)
    ('1.5 GiB', '5 bytes')
    """
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    unit = next(((name, size) for name, size in units if count >= size), None)
    return f"{count / unit[1]:.1f} {unit[0]}" if unit else f"{count} bytes"
