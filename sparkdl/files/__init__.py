"""Files on any file system. No Keras, no Spark.

``storage``: reading, and writing whole or not at all. ``archive_parts``: what sparkdl adds to a
``.keras`` file. ``model_file``: a saved SparkModel. ``checkpoints``: one per epoch.
"""
