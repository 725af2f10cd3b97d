"""The cluster at the driver's word: ranks as the tasks of a stage.

- ``launcher``: the stage, and its rows piece by piece.
- ``capacity``: how many tasks run at once, and who may take all slots; one Spark job.
- ``resources``: what tasks ask of executors, and where they listen.
- ``function_stage``: a function on every rank.
- ``feeding``, ``stream_feeding``: their rows.
"""
