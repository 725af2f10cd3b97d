"""Tables of rows by id, as an embedding has: NumPy only, no Keras, no Spark.

``store``: the rows of one table that one rank keeps. ``index``: from ids to slots and owners.
``rules``: what a row starts from, and its step. ``admission``: which ids get a row, and which rows
leave. ``hashing``: hashes of ids and texts.
``files``: parts of a table in files, and rows looked up there. ``checkpoints``: the tables of a
run, step by step, and those that are copied with a saved model. ``service``: the seam between a
layer and its rows. ``classes``: rows as the centers of a large softmax. ``functions``: numbers
about all rows, and changes of them.
"""
