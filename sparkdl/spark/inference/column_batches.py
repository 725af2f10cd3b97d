"""Spark's column batches, which have no place for user types such as ML vectors.

From Spark 4.2 on a function on Arrow arrays that stands right above a vectorized scan (Parquet,
ORC) gets the scan's column batches. Spark then copies every column of the scan, also those that the
function does not read, and fails where one has a user type: ``UNSUPPORTED_DATATYPE UDT``
(``RowToColumnConverter``). What is here makes Spark hand rows to the function, as it does above a
cached table, a filter or a shuffle.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import functions as F
from pyspark.sql import types as T

SETTING = "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled"
"""Spark's setting for it, true by default."""


def as_rows(frame: Any) -> Any:
    """The frame, of which a function on Arrow arrays gets rows where it has user types.

    Spark cannot know that the filter lets every row pass, so it stays in the plan, between the scan
    and the function. Its cost is a comparison of an integer per row.
    """
    if not any(has_user_type(field.dataType) for field in frame.schema):
        return frame
    return frame.filter(F.spark_partition_id() >= 0)


def has_user_type(kind: T.DataType) -> bool:
    """Whether a column of this type holds values of a user type."""
    if isinstance(kind, T.ArrayType):
        return has_user_type(kind.elementType)
    if isinstance(kind, T.MapType):
        return has_user_type(kind.keyType) or has_user_type(kind.valueType)
    if isinstance(kind, T.StructType):
        return any(has_user_type(field.dataType) for field in kind)
    return isinstance(kind, T.UserDefinedType)


def give_rows(session: Any) -> None:
    """Makes Spark hand rows to all functions on Arrow arrays of a session.

    A function of SQL does not know the table that it is called on. A value that the user has set is
    left as it is.
    """
    if session.conf.isModifiable(SETTING) and session.conf.get(SETTING, None) is None:
        session.conf.set(SETTING, "false")
