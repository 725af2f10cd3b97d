"""sparkdl: Keras 3 models trained on the data where it already is, in Spark."""
