"""Feeds as data sets of frameworks."""

from __future__ import annotations

import pyarrow as pa
import pytest

from sparkdl.data.feed import Feed
from sparkdl.errors import DataError
from sparkdl.learner.distributed.feed_adapters import tf_dataset, torch_dataset


def feed(epochs: int = 1) -> Feed:
    table = pa.table({"x": [[1.0, 2.0]] * 5, "n": list(range(5)), "t": list("abcde")})
    return Feed(table.to_batches(2), epochs=epochs)


def test_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")
    batches = list(tf_dataset(feed(2), 2))
    assert [len(batch["n"]) for batch in batches] == [2, 2, 1, 2, 2, 1]
    assert batches[0]["x"].shape == (2, 2)
    assert batches[2]["t"].numpy().tolist() == [b"e"]
    assert tf_dataset(feed(), 2).element_spec["x"] == tf.TensorSpec((None, 2), tf.float64)
    ragged = Feed(pa.table({"x": [[1], [1, 2]]}).to_batches())
    with pytest.raises(DataError, match="'x' has no one shape"):
        tf_dataset(ragged, 2)


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch_dataset(feed(), 2), batch_size=None)
    batches = list(loader)
    assert [batch["n"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert batches[0]["x"].dtype == torch.float64
