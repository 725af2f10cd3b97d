"""How ranks are started: one task, once per rank, as threads, processes or tasks of Spark.

``task``: what a task and a launcher are, how ranks exchange texts, and what comes back.
``function``: the task of ``sparkdl.run``. ``threads``, ``child``: two launchers (Spark's is in
``spark/runs/launcher.py``), and a rank in a process of its own, with other devices. ``devices``:
which those are. ``feeding``, ``stream_feed``: the rows of ``run(fn, data=...)``. ``interrupts``:
Ctrl-C on the driver.
"""
