"""The events of a fit on the driver. No Keras, no Spark.

``run_progress``: what the workers have reported. ``monitor``: makes events of it.
``events``: the events, and what a sink is. ``bar``: the progress bar, a sink.
"""
