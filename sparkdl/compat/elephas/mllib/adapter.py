"""NumPy arrays as vectors and matrices of MLlib, and back."""

from sparkdl.mllib import from_matrix, from_vector, to_matrix, to_vector

__all__ = ["from_matrix", "from_vector", "to_matrix", "to_vector"]
