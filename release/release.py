"""Builds a release into ``dist/`` and tries it as a user would: ``make release``.

Wheel and source archive from what is committed; their metadata (``twine check``) and contents;
each extra from the wheel in an environment of its own; README's first block; the list of all parts
(SBOM, CycloneDX); the images, where a container engine runs. Nothing is published. Every step
says what it found, and the first that fails ends the run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["build>=1.2", "twine>=6", "cyclonedx-bom>=7", "setuptools>=77"]
INSTALLED = ("tensorflow",)
"""Extras that are installed; the others are resolved only, as frameworks have gigabytes."""
BUILT = {"horovod": "built against the installed framework by docker/build_horovod.sh"}
"""Extras that pip alone cannot install, and why."""
FOR_DEVELOPERS = ("dev", "docs")


class ReleaseError(Exception):
    """A step failed; the message says what to do."""


def version() -> str:
    """The only place that has it is ``sparkdl.__version__``."""
    found = re.findall(r'(?m)^__version__ = "(.+)"$', (ROOT / "sparkdl/__init__.py").read_text())
    return str(found[0])


def committed(folder: str = "") -> set[str]:
    """The committed files of the repository, or of a folder."""
    listed = _run(["git", "ls-files", folder or "."], cwd=ROOT, capture=True)
    return set(listed.splitlines())


def wheel_faults(names: Iterable[str], package: set[str]) -> list[str]:
    """What a wheel has too much, and what it lacks.

    Args:
        names: Of its files.
        package: The files that it must have, beside its metadata.
    """
    present = {name for name in names if ".dist-info/" not in name}
    return [f"lacks {name}" for name in sorted(package - present)] + [
        f"has {name}, which is not committed" for name in sorted(present - package)
    ]


def archive_faults(names: Iterable[str], repository: set[str]) -> list[str]:
    """The same of a source archive, whose names begin with its folder."""
    present = {name.partition("/")[2] for name in names}
    made = re.compile(r"PKG-INFO|setup\.cfg|\w+\.egg-info/.*|")
    needed = {name for name in repository if not name.startswith(".")}
    return [f"lacks {name}" for name in sorted(needed - present)] + [
        f"has {name}, which is not committed"
        for name in sorted(present - needed)
        if not made.fullmatch(name)
    ]


def first_block() -> str:
    """README's first Python block."""
    return re.findall(r"(?ms)^```python\n(.*?)^```", (ROOT / "README.md").read_text())[0]


def build(tools: Path, dist: Path) -> tuple[Path, Path]:
    """Wheel and source archive; the wheel is made from the archive, so that it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tree.mkdir()
        packed = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", str(tree)], input=packed, check=True)
        _run([tools / "python", "-m", "build", "--outdir", dist, tree], quiet=True)
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    _run([tools / "twine", "check", "--strict", wheel, archive], quiet=True)
    for path in (wheel, archive):
        if f"-{version()}" not in path.name:
            raise ReleaseError(f"{path.name} is not of version {version()}")
    _say(f"{wheel.name} and {archive.name}: built, metadata checked")
    return wheel, archive


def check_contents(wheel: Path, archive: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    faults = wheel_faults(names, committed("sparkdl") | {"pyspark_tfrecord.py", "sparkdl_keras.py"})
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        faults.append("lacks its licence")
    with tarfile.open(archive) as packed:
        members = [member.name for member in packed.getmembers() if member.isfile()]
    faults += archive_faults(members, committed())
    if faults:
        raise ReleaseError("contents:\n  " + "\n  ".join(faults))
    _say(f"contents: {len(names)} files in the wheel, {len(members)} in the archive, as committed")


def try_extras(wheel: Path, folder: Path) -> Path:
    """Installs or resolves each extra; returns the environment with TensorFlow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = folder / "environment"
    python = _environment(environment)
    extras = [e for e in project["optional-dependencies"] if e not in FOR_DEVELOPERS]
    for extra in sorted(extras, key=lambda name: name not in INSTALLED):
        if extra in BUILT:
            _say(f"[{extra}]: {BUILT[extra]}")
            continue
        install = [python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]"]
        if extra in INSTALLED:
            _run(install)
            _run([python, "-m", "pip", "check"], quiet=True)
            try_readme(python, folder)
        else:
            _run([*install, "--dry-run"], quiet=True)
        _say(f"[{extra}]: {'installed, README runs' if extra in INSTALLED else 'resolved'}")
    return python


def try_readme(python: Path, folder: Path) -> None:
    """README's first block, in an empty folder, with nothing but what the wheel brought."""
    at = folder / "readme"
    at.mkdir()
    (at / "first.py").write_text(first_block())
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYSPARK"))}
    variables |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    _run([python, "first.py"], cwd=at, env=variables, quiet=True)
    if not (at / "model.keras").exists():
        raise ReleaseError("README's first block saved no model")
    shown = _run([python.parent / "sparkdl", "--version"], cwd=at, env=variables, capture=True)
    if shown.strip() != f"sparkdl {version()}":
        raise ReleaseError(f"sparkdl --version prints {shown!r}")


def list_parts(tools: Path, python: Path, dist: Path) -> None:
    """What the environment consists of, with versions and licences, as CycloneDX."""
    path = dist / f"sparkdl_keras-{version()}.cdx.json"
    _run([tools / "cyclonedx-py", "environment", python, "--pyproject", ROOT / "pyproject.toml",
          "--output-reproducible", "-o", path], quiet=True)  # fmt: skip
    bom = json.loads(path.read_text())
    bom["metadata"]["component"]["version"] = version()  # pyproject.toml does not have it
    path.write_text(json.dumps(bom, indent=1) + "\n")
    _say(f"{path.name}: {len(bom['components'])} parts of an installation with TensorFlow")


def build_images(archive: Path, folder: Path) -> None:
    """The images from the source archive, as a user has it."""
    engine = shutil.which("docker") or shutil.which("podman")
    if engine is None:
        _say("images: NOT built, as neither docker nor podman is installed here. All else is done;")
        _say("        make release on a machine with one of them builds the images, too")
        return
    asked = subprocess.run([engine, "info"], capture_output=True, text=True)
    if asked.returncode:
        said = (asked.stderr or asked.stdout).strip().splitlines() or ["nothing"]
        _say(f"images: NOT built, as '{engine} info' ended with {asked.returncode}: {said[-1]}")
        _say("        start its service, or let this user call it, and run make release again")
        return
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (tree,) = folder.glob("sparkdl_keras-*")
    for variant, tag in (("cpu", version()), ("cuda", f"{version()}-cuda")):
        _run([engine, "build", "-f", tree / "docker/Dockerfile", "-t", f"sparkdl:{tag}",
              "--build-arg", f"VARIANT={variant}", tree])  # fmt: skip
        _say(f"image sparkdl:{tag}: built")


def _environment(path: Path) -> Path:
    venv.create(path, with_pip=True)
    return path / "bin" / "python"


def _run(
    command: Sequence[str | Path], *, quiet: bool = False, capture: bool = False,
    cwd: Path | None = None, env: dict[str, str] | None = None,
) -> str:  # fmt: skip
    """Runs a command; what it printed is shown if it fails (always, unless ``quiet``)."""
    hidden = quiet or capture
    ran = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, text=True,
        stdout=subprocess.PIPE if hidden else None, stderr=subprocess.PIPE if hidden else None,
    )  # fmt: skip
    if ran.returncode:
        shown = f"\n{ran.stdout}\n{ran.stderr}" if hidden else ""
        raise ReleaseError(f"{' '.join(map(str, command))} ended with {ran.returncode}{shown}")
    return ran.stdout or ""


def _say(text: str) -> None:
    print(f"[{time.monotonic() - _started:4.0f} s] {text}", flush=True)


_started = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--without-extras", action="store_true", help="build and check only")
    asked = parser.parse_args()
    try:
        if _run(["git", "status", "--porcelain"], cwd=ROOT, capture=True).strip():
            _say("what is not committed is left out")
        shutil.rmtree(asked.dist, ignore_errors=True)
        asked.dist.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="sparkdl-release-") as name:
            folder = Path(name)
            tools = _environment(folder / "tools").parent
            _run([tools / "python", "-m", "pip", "install", "--quiet", *TOOLS])
            wheel, archive = build(tools, asked.dist)
            check_contents(wheel, archive)
            if not asked.without_extras:
                list_parts(tools, try_extras(wheel, folder), asked.dist)
                build_images(archive, folder)
    except (ReleaseError, subprocess.CalledProcessError) as failed:
        print(f"the release failed: {failed}", file=sys.stderr)
        return 1
    _say(f"{asked.dist}: {', '.join(sorted(path.name for path in asked.dist.iterdir()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
