"""Filters of new ids come back from their settings, as layers and files have them."""

from __future__ import annotations

import json

import pytest

from sparkdl.errors import UnknownNameError
from sparkdl.tables.admission import CountFilter, EntryFilter, Probability, make_entry_filter


@pytest.mark.parametrize("entry", [CountFilter(7), Probability(0.25)], ids=lambda one: one.name)
def test_a_filter_comes_back_from_its_settings(entry: EntryFilter) -> None:
    """A fault planted in the comparison of names was noticed by no fast test."""
    assert make_entry_filter(json.loads(json.dumps(entry.settings))) == entry
    assert make_entry_filter(entry) is entry
    assert make_entry_filter(None) is None


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownNameError, match="probability"):
        make_entry_filter({"name": "seldom"})
