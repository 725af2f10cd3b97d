"""Tables of rows spread over the ranks of an all-reduce.

``exchange``: which rank owns a row, how rows and gradients travel, and the steps of a model with
tables.
"""
