"""All-reduce: ranks that talk to each other, without a server.

``communicator``: what a communicator is, and what all of them share.
``builtin``, ``horovod``: the communicators. ``current``: a run's.
``arithmetic``: reductions and their checks.
``rules``: how the ranks' gradients or weights become one.
``table_exchange``: rows spread over the ranks.
``strategy``, ``synchronizer``, ``gradient_synchronizer``, ``rule_synchronizer``: what
the training loop sees.
``choice``: from the user's arguments to a rule and a window.
"""
