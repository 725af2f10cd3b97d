"""From columns of a DataFrame to the inputs and outputs of a model.

``sources``: DataFrame, RDD or arrays become one frame. ``fit_source``: rows to train on and rows
to validate on become one. ``matching``: which column is which input.
``decoders``: functions that make an input of bytes. ``pairs``: elements of an RDD, on executors.
``wire``: the names that columns have on the way.
"""
