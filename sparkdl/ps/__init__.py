"""The parameter server: weights that all workers share, behind a coordinator.

``store``: the weights, rounds and replies on the server. ``rules``: how a commit changes them.
``codecs``, ``coder``: what travels instead of float32. ``server``: its process.
``client``: a worker's pushes and pulls. ``shards``: several servers as one.
``strategy``, ``synchronizer``, ``round_synchronizer``: what the training loop sees of it.
``unwrapping``: errors out of a framework's call. ``pulling``: the driver's reads.
``choice``: from the user's arguments to a rule, a window and a codec.
"""
