"""Checks that a fit makes of a compiled model before it trains.

- ``compiling``: what a model is compiled with, or a rule wants. ``compile_parts``: the user's own
  losses, metrics and optimizers, and whether metrics of several workers may be summed.
"""
