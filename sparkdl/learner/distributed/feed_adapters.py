"""Feeds as the data sets of TensorFlow and PyTorch."""

from __future__ import annotations

from typing import Any

from sparkdl.data.feed import RowFeed
from sparkdl.errors import DataError


def tf_dataset(feed: RowFeed, batch_size: int) -> Any:
    """A ``tf.data.Dataset`` of batches: dicts of tensors by column name.

    The shapes are those of the first batch, with any number of rows. Use it once: it takes the
    feed's rows.
    """
    import tensorflow as tf

    first = feed.next_batch(batch_size)
    for name, array in first.items():
        if array.dtype == object and not isinstance(array[0], (str, bytes)):
            raise DataError(
                f"column {name!r} has no one shape that tf.data could take",
                expected="numbers, texts, or arrays of one length",
                received="arrays of several lengths, or nulls",
                hint="feed.batches(n) gives them as arrays of objects",
            )

    def batches() -> Any:
        if first:
            yield first
            yield from feed.batches(batch_size)

    signature = {
        name: tf.TensorSpec(
            (None, *array.shape[1:]), tf.string if array.dtype == object else array.dtype
        )
        for name, array in first.items()
    }
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def torch_dataset(feed: RowFeed, batch_size: int) -> Any:
    """A ``torch.utils.data.IterableDataset`` of batches: dicts of tensors by column name.

    Give it to a ``DataLoader`` with ``batch_size=None`` and no workers. Texts stay arrays.
    """
    import torch

    class FeedDataset(torch.utils.data.IterableDataset):  # type: ignore[misc]
        """The batches of the feed."""

        def __iter__(self) -> Any:
            for batch in feed.batches(batch_size):
                yield {
                    name: array if array.dtype == object else torch.tensor(array)
                    for name, array in batch.items()
                }

    return FeedDataset()
