"""Frames of TFRecord files, which TensorBoard's event files have too."""
