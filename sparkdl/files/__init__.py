"""Files on any file system. No Keras, no Spark.

``storage``: reading, and writing whole or not at all. ``file_system``: what a file system does for
that; local files, pyarrow's and fsspec's. ``model_file``: a saved SparkModel, what sparkdl adds to
a ``.keras`` file, and NumPy arrays as bytes. ``checkpoints``: one per epoch. ``run_state``: what
training goes on from. ``temporary``: folders that go with their process. ``streams``: Arrow's
readers on any of these files. ``listing``: the files that a path means.
"""
