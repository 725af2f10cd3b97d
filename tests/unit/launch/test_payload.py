"""Shipping by value: what the user's own modules define arrives where they cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sparkdl.process import payload

pytestmark = pytest.mark.processes

HELPER = """
    import functools
    import {inner} as inner

    SCALE = 3

    class Point:
        def __init__(self, x):
            self.x = x
        def scaled(self):
            return inner.times(self.x, SCALE)

    def scaled(x):
        return Point(x).scaled()

    double = functools.partial(inner.times, 2)
"""


helper_module: Any = None


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module beside the script, which imports another one."""
    (tmp_path / "by_value_inner.py").write_text("def times(a, b):\n    return a * b\n")
    (tmp_path / "by_value_helper.py").write_text(
        textwrap.dedent(HELPER.format(inner="by_value_inner"))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import by_value_helper

    yield by_value_helper
    for name in ("by_value_helper", "by_value_inner"):
        sys.modules.pop(name)


def elsewhere(thing: Any, code: str) -> str:
    """What ``code`` prints of ``thing`` in a process that lacks the user's modules."""
    program = f"""
        import sys
        from sparkdl.process import payload
        thing = payload.load(sys.stdin.buffer.read())
        {code}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        input=payload.dump(thing), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_what_is_deep_inside_an_object_goes_by_value(helper: Any) -> None:
    nested = {"list": [(helper.Point(2),)], "type": helper.Point, "partial": helper.double}
    code = "print(thing['list'][0][0].scaled(), thing['type'](1).scaled(), thing['partial'](4))"
    assert elsewhere(nested, code) == "6 3 8"
    assert elsewhere(helper.scaled, "print(thing(5))") == "15"


def of_the_helper() -> Any:
    return helper_module.scaled(4)


def test_a_module_object_goes_by_value(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "helper_module", helper)
    assert elsewhere(of_the_helper, "print(thing())") == "12"


def test_a_module_that_cannot_be_pickled_goes_by_name(helper: Any) -> None:
    helper.lock = threading.Lock()
    assert payload.load(payload.dump({"module": helper}))["module"] is helper
    assert elsewhere(helper.Point(2), "print(thing.scaled())") == "6"


def test_installed_modules_go_by_name_and_the_registry_is_left_as_it_was(helper: Any) -> None:
    registered = cloudpickle.list_registry_pickle_by_value()
    for thing in (pytest.fixture, payload.dump, textwrap.dedent, cloudpickle):
        content = payload.dump(thing)
        assert len(content) < 200
        assert payload.load(content) is thing
    payload.dump(helper.Point(1))
    assert cloudpickle.list_registry_pickle_by_value() == registered


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_of_another_environment_go_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """Where a path was set to a shared folder of packages, as clusters do."""
    packages = tmp_path / "lib" / folder
    packages.mkdir(parents=True)
    name = f"packaged_{folder[:4]}"
    (packages / f"{name}.py").write_text("class Point:\n    pass\n")
    monkeypatch.syspath_prepend(str(packages))
    module = __import__(name)
    sent = payload.dump((module, module.Point))
    del sys.modules[name]
    assert payload.load(sent)[1] is sys.modules.pop(name).Point


def test_packages_that_were_installed_into_a_folder_go_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install --target libraries``: what the folder lists, and no script beside it."""
    (tmp_path / "into_folder_package").mkdir()
    for name in ("into_folder_package/__init__", "into_folder_package/deep", "of_the_user"):
        (tmp_path / f"{name}.py").write_text("def one():\n    return 1\n")
    (tmp_path / "into_folder-1.0.dist-info").mkdir()
    (tmp_path / "into_folder-1.0.dist-info" / "RECORD").write_text(
        "into_folder_package/__init__.py,,\ninto_folder_package/deep.py,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import into_folder_package.deep
    import of_the_user

    try:
        for function in (into_folder_package.one, into_folder_package.deep.one):
            assert len(payload.dump(function)) < 100
        assert len(payload.dump(of_the_user.one)) > 200
    finally:
        for name in ("into_folder_package", "into_folder_package.deep", "of_the_user"):
            sys.modules.pop(name)


def test_a_class_comes_back_as_itself(helper: Any) -> None:
    assert type(payload.load(payload.dump(helper.Point(1)))) is helper.Point


def test_what_cannot_be_pickled_is_refused(helper: Any) -> None:
    with pytest.raises(TypeError, match="lock"):
        payload.dump([helper.Point(threading.Lock())])
    assert payload.dump(helper.Point(1))
