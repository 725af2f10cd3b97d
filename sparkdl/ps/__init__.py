"""The parameter server: weights that all workers share, behind a coordinator.

``store``: the weights, rounds and replies on the server. ``server``: its process.
``shards``: a center on several servers.
``client``: a worker's pushes and pulls, encoded where they are to be.
``strategy``, ``synchronizer``, ``round_synchronizer``: what the training loop sees of it, and how a
worker and its server exchange.
``kinds``: the frames of a store, and what several servers are told to do.
``choice``: from the user's arguments to a rule, a window and a codec.
"""
