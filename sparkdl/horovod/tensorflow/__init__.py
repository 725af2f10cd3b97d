"""Databricks' module path of what it has for TensorFlow; see ``keras``."""
