"""A warning shows the user's line, not one of the library's."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator

import pytest

from sparkdl.process.user_warnings import warn_user

LIBRARY = """
from sparkdl.process.user_warnings import warn_user

def deep():
    warn_user("too deep", UserWarning)

def fit():
    deep()
"""


def test_the_line_is_the_users() -> None:
    module = types.ModuleType("sparkdl.some.room")
    exec(LIBRARY, module.__dict__)

    @contextlib.contextmanager
    def heard() -> Iterator[None]:
        yield

    fit = heard()(module.fit)
    here = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="too deep") as caught:
        fit()
    assert (caught[0].filename, caught[0].lineno) == (__file__, here)


def test_a_caller_outside_of_the_library_sees_its_own_line() -> None:
    with pytest.warns(RuntimeWarning, match="mine") as caught:
        warn_user("mine")
    assert caught[0].filename == __file__
