"""How each Keras backend forgets what a function computes, and computes it again.

Each module has ``recompute(function, values)``. The function takes tensors and returns two lists:
results, and values that no gradient flows through. ``recompute`` returns both; gradients flow from
the results to the values.
"""
