"""How ranks are started: one task, once per rank, as threads, processes or tasks of Spark.

``task``: what a task and a launcher are. ``rank``: one rank, from its payload to its results.
``threads``, ``processes``: two launchers (Spark's is in ``spark/runs/launcher.py``).
``child``: a rank in a process of its own, with other devices. ``devices``: which those are.
``gathering``: the ranks exchange texts. ``results``, ``failures``: what comes back.
``function``: the task of ``sparkdl.run``. ``capture``, ``line_sender``: what ranks print.
``interrupts``: Ctrl-C on the driver.
"""
