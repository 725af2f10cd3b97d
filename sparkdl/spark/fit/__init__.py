"""One call of ``fit`` on the driver.

- ``arguments``, ``choice``, ``plan``: from the arguments to all that it does.
- ``fitting``, ``training``: one fit; one stage of it. ``training_run``, ``server_run``,
  ``allreduce_run``: the driver's end while ranks train. ``shard_servers``: servers that hold the
  weights together.
- ``trained_model``: the driver's model. ``tables``, ``trained_tables``: the rows outside of
  it. ``fit_sinks``: who is told. ``fit_warnings``: its warnings.
"""
