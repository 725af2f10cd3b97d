"""What a run with encryption says of connections that it cannot encrypt."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError
from sparkdl.settings.network import say_what_is_in_the_clear


def test_a_frameworks_connections_are_refused_where_encryption_was_asked_for() -> None:
    with pytest.raises(ConfigError, match="connections that torch makes") as caught:
        say_what_is_in_the_clear("torch", True)
    assert "encrypt='auto' or False" in caught.value.hint


def test_a_frameworks_connections_are_warned_of_where_spark_encrypts() -> None:
    with pytest.warns(RuntimeWarning, match="what jax sends between the ranks") as warned:
        say_what_is_in_the_clear("jax", "auto")
    assert warned[0].filename == __file__
