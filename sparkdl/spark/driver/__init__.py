"""The parts that run on the driver.

``arguments``, ``choice``, ``plan``: from the arguments of ``fit`` to all that it does.
``fitting``, ``training``: one fit; one stage of it. ``trained_model``: the driver's model.
``training_run``, ``server_run``, ``allreduce_run``: the driver's end while ranks train.
``launcher``: ranks as the tasks of a Spark stage. ``session``: the user's Spark session.
``capacity``: how many tasks run at the same time. ``jobs``: one Spark job, tagged and cancelled.
``slots``: who may take all slots at once. ``metrics``: metric variables for the ranks' sums.
"""
