"""One call of ``fit`` on the driver.

- ``arguments``, ``choice``, ``plan``: from the arguments to all that it does.
- ``fitting``, ``training``: one fit, and who is told of it; one stage of it. ``training_run``: the
  driver's end while ranks train. ``shard_servers``: servers that hold the weights together.
- ``trained_model``: the driver's model, with rows outside of it; ``trained_tables``: these rows.
  ``fit_warnings``: its warnings.
"""
