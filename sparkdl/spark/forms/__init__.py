"""Forms of data, a class for each; and from their columns to the inputs and outputs of a model.

- ``opening``: the form of what a user gives (``form_of``), rows to train and to validate on as one
  frame. ``frames``: DataFrames, streams, tables of this process and paths. ``rdds``, ``arrays``:
  RDDs; arrays, also as two arguments ``x, y``.
- ``sources``: what every form does; rows that are opened. ``matching``, ``fields``, ``sequences``:
  which column is which input. ``wire``: the names that columns have on the way.
- ``files``, ``arrow_files``, ``fed_files``: files that workers read by themselves.
- ``shipped``: tables of the driver's process on their way to Spark. ``shared_rows``: rows that
  several fits share.
"""
