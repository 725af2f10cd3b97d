"""The events of a fit on the driver. No Keras, no Spark.

``events``: what the workers have reported, the events, and what a sink is. ``monitor``: makes
events of reports. ``bar``: the progress bar, a sink.
"""
