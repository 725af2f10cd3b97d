"""Optimizers on flat float32 buffers: for rules on a server and for sliced optimizer state.

``optimizer``: what one is. ``flat``: the optimizers. ``blocks``: blocks that fit a cache,
on several threads. ``compiled``: loops that numba compiles. ``keras_config``: from Keras' settings.
"""
