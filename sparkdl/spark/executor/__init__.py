"""The parts that run on executors.

``stage``: a task of Spark becomes a rank.
``trainer``: the task of ``fit``.
"""
