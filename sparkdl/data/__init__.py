"""Arrow record batches -> shuffled NumPy batches. Needs NumPy and pyarrow alone.

- ``columns``: which DataFrame columns become which inputs, labels and weights of a model;
  ``Ragged`` holds rows of different lengths.
- ``decode``, with ``plain_arrow`` and ``conform``: a record batch -> NumPy arrays, and
  which rows no model can take.
- ``partition``, ``storage``, ``rows``: a partition read once, in memory or spilled to disk, and
  what a fit asks of its rows.
- ``batches``: rows -> batches in a new random order each epoch, stacked for the learner.
- ``shards``: files dealt to their readers.
- ``feed``: the rows of ``run(fn, data=...)``. ``tfrecord``: files of TFRecord.
- ``arrays``: NumPy arrays of the driver -> rows, or an Arrow table for Spark.
"""

from sparkdl.data.arrays import rows_from_numpy, to_arrow_table
from sparkdl.data.batches import Batches, EpochPlan
from sparkdl.data.columns import Batch, ColumnSpec, DataSpec
from sparkdl.data.decode import decode, decode_valid, rows_with_nulls
from sparkdl.data.partition import Partition, read_partition
from sparkdl.data.rows import Rows

__all__ = [
    "Batch",
    "Batches",
    "ColumnSpec",
    "DataSpec",
    "EpochPlan",
    "Partition",
    "Rows",
    "decode",
    "decode_valid",
    "read_partition",
    "rows_from_numpy",
    "rows_with_nulls",
    "to_arrow_table",
]
