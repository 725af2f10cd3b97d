"""What a release must have, without building one; and that the version stands in one place."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import sparkdl

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "release" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_stands_in_one_place(release: ModuleType) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert release.version() == sparkdl.__version__
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sparkdl.__version__"}


def test_faults_of_a_wheel_are_named(release: ModuleType) -> None:
    package = {"sparkdl/__init__.py", "sparkdl/py.typed"}
    metadata = ["sparkdl_keras-1.dist-info/METADATA"]
    assert release.wheel_faults([*package, *metadata], package) == []
    assert release.wheel_faults(["sparkdl/__init__.py", "tests/x.py", *metadata], package) == [
        "lacks sparkdl/py.typed",
        "has tests/x.py, which is not committed",
    ]


def test_faults_of_a_source_archive_are_named(release: ModuleType) -> None:
    repository = {"README.md", "docker/Dockerfile", ".ci/run"}
    made = ["s-1/PKG-INFO", "s-1/setup.cfg", "s-1/sparkdl_keras.egg-info/SOURCES.txt"]
    assert (
        release.archive_faults(["s-1/README.md", "s-1/docker/Dockerfile", *made], repository) == []
    )
    assert release.archive_faults(["s-1/README.md", "s-1/key.pem", *made], repository) == [
        "lacks docker/Dockerfile",
        "has key.pem, which is not committed",
    ]


def test_each_extra_is_installed_or_resolved_or_has_a_reason(release: ModuleType) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = set(settings["project"]["optional-dependencies"])
    assert {*release.INSTALLED, *release.BUILT, *release.FOR_DEVELOPERS} <= extras


def test_readmes_first_block_needs_what_every_installation_has(release: ModuleType) -> None:
    block = release.first_block()
    assert "SparkModel(" in block
    assert 'save("model.keras")' in block
    imported = {line.split()[1].split(".")[0] for line in block.splitlines()
                if line.startswith(("import ", "from "))}  # fmt: skip
    assert imported == {"sparkdl", "keras", "pyspark"}


@pytest.mark.parametrize("engine", [None, "echo 'cannot connect to the daemon' >&2; exit 3"])
def test_a_release_without_images_says_why_and_what_to_do(
    release: ModuleType,
    engine: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if engine is not None:
        docker = tmp_path / "docker"
        docker.write_text(f"#!/bin/sh\n{engine}\n")
        docker.chmod(0o755)
    release.build_images(tmp_path / "no.tar.gz", tmp_path)
    said = capsys.readouterr().out
    assert "images: NOT built" in said
    assert "make release" in said
    expected = "neither docker nor podman" if engine is None else "ended with 3: cannot connect"
    assert expected in said
