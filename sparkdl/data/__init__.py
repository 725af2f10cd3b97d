"""Arrow record batches -> shuffled NumPy batches. Needs NumPy and pyarrow alone."""

from sparkdl.data.arrays import rows_from_numpy, to_arrow_table
from sparkdl.data.batches import Batches, EpochPlan
from sparkdl.data.columns import Batch, ColumnSpec, DataSpec
from sparkdl.data.decode import decode
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
    "read_partition",
    "rows_from_numpy",
    "to_arrow_table",
]
