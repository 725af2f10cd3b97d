"""TFRecord files as DataFrames: a data source in Python, and functions where that is too narrow."""
