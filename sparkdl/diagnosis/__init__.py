"""``sparkdl.doctor``: what is wrong with a cluster, said before an hour of training is lost.

``examination``: the public function. ``host_facts``: the program that every executor runs, which
needs nothing but Python. ``executors``: runs it there. ``network``: the probe that all slots run at
the same time, and who answers it. ``host_checks``, ``cluster_checks``: what the facts
mean. ``model_memory``: whether a model fits into memory. ``report``: checks as text, as a table.
"""
