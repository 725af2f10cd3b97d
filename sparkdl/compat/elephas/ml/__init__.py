"""NumPy arrays as DataFrames, and back."""

from sparkdl.compat.elephas.ml.adapter import df_to_simple_rdd, from_data_frame, to_data_frame

__all__ = ["df_to_simple_rdd", "from_data_frame", "to_data_frame"]
