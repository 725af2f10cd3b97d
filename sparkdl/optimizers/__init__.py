"""Optimizers on flat float32 buffers: for rules on a server and for sliced optimizer state.

``flat``: the optimizers, also from Keras' settings. ``blocks``: blocks that fit a cache, on several
threads, and loops that numba compiles.
"""
