"""Optimizers on flat float32 vectors, for parameter servers and sliced all-reduce alike."""
