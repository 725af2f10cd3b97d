"""The one registry: names, aliases, dicts, classes, finished objects, and what is refused."""

from __future__ import annotations

import doctest
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from sparkdl import codecs, rules
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.optimizers import flat
from sparkdl.rules import optimizer
from sparkdl.settings.registry import Registry


class Shape:
    name: ClassVar[str] = ""


@dataclass(frozen=True)
class RoundShape(Shape):
    radius: float = 1.0
    name: ClassVar[str] = "round_shape"


@dataclass(frozen=True)
class Square(Shape):
    name: ClassVar[str] = "square"


def _adapt(given: object) -> Shape | None:
    return RoundShape(float(given)) if isinstance(given, int) else None


SHAPES: Registry[Shape] = Registry(
    "shape", Shape, (RoundShape, Square), aliases={"disc": "round_shape"}, hint="; see the book"
)
ADAPTING: Registry[Shape] = Registry(
    "shape", Shape, (RoundShape,), adapt=_adapt, accepted="a number"
)


@pytest.mark.parametrize("module", [codecs, rules, optimizer, flat])
def test_examples_in_docstrings(module: Any) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


@pytest.mark.parametrize("name", ["round_shape", "Round-Shape", " ROUNDSHAPE ", "disc"])
def test_a_name_has_many_spellings(name: str) -> None:
    assert SHAPES.make(name, {}) == RoundShape()
    assert name in SHAPES


def test_names_are_sorted_and_without_aliases() -> None:
    assert SHAPES.names() == ["round_shape", "square"]
    assert "triangle" not in SHAPES
    assert 7 not in SHAPES


def test_every_form_gives_the_same() -> None:
    want = RoundShape(2.0)
    assert SHAPES.make("disc", {"radius": 2.0}) == want
    assert SHAPES.make({"name": "disc", "radius": 2.0}, {}) == want
    assert SHAPES.make({"name": "disc", "radius": 1.0}, {"radius": 2.0}) == want
    assert SHAPES.make(RoundShape, {"radius": 2.0}) == want
    assert SHAPES.make(want, {}) is want


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'square'"):
        SHAPES.make("squaer", {})


@pytest.mark.parametrize("given", [7, object(), {"nme": "square"}, dict, None])
def test_what_is_no_shape_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="see the book") as caught:
        SHAPES.make(given, {})
    assert "a Shape" in caught.value.expected
    assert caught.value.received
    assert "square" in caught.value.hint


def test_an_option_is_checked_before_the_constructor_runs() -> None:
    for given in ("round_shape", RoundShape):
        with pytest.raises(ConfigError, match="diameter") as caught:
            SHAPES.make(given, {"diameter": 2})
        assert caught.value.expected == "options radius"
        assert caught.value.received == "diameter=2"
    with pytest.raises(ConfigError, match="no options"):
        SHAPES.make("square", {"radius": 2.0})


def test_options_beside_a_finished_object_are_refused() -> None:
    with pytest.raises(ConfigError, match="further options only with a name or a class"):
        SHAPES.make(Square(), {"radius": 2.0})


def test_other_objects_are_adapted() -> None:
    assert ADAPTING.make(3, {}) == RoundShape(3.0)
    with pytest.raises(ConfigError, match="or a number"):
        ADAPTING.make(3.5, {})


class Four(int):
    """A class whose objects are no shapes, but numbers, which can be adapted."""

    def __new__(cls) -> Four:
        return super().__new__(cls, 4)


def test_a_class_is_made_and_then_adapted() -> None:
    assert ADAPTING.make(Four, {}) == RoundShape(4.0)


def test_a_class_of_ones_own_gets_a_name() -> None:
    """Also anew, as a notebook's cell that is run twice makes it; no other class takes its name."""
    kinds: Registry[Shape] = Registry("shape", Shape, (RoundShape,))

    def cell(corners: int) -> type[Shape]:
        @kinds.register
        class Star(Shape):
            name: ClassVar[str] = "star"
            count: ClassVar[int] = corners

        return Star

    assert cell(5) is type(kinds.make("Star", {}))
    assert kinds.names() == ["round_shape", "star"]
    assert cell(6) is type(kinds.make("star", {}))
    other = type("Other", (Shape,), {"name": "star"})
    for wrong in (other, type("Nameless", (), {}), Square()):
        with pytest.raises(ConfigError, match="cannot register this shape"):
            kinds.register(wrong)  # type: ignore[arg-type]
    assert rules.register == rules.RULES.register
    assert codecs.register == codecs.CODECS.register
