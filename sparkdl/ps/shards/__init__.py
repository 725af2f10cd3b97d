"""A center that lies on several servers: each of them, a *shard*, holds a range of it.

``service``
    :class:`~sparkdl.ps.shards.service.ShardService`, the state machine of one shard.
``tables``, ``rows``
    The rows of a model's tables: on a shard, and as a worker sees them: batch by batch, round by
    round, or with the weights; the next batch's rows are pulled ahead.
``row_link``, ``pushes``
    A worker's requests for rows, and their bodies.
``client``
    A worker's client of the coordinator and all shards; the driver's connections to these.

The coordinator alone (:mod:`sparkdl.ps.store`) knows who takes part. Its store is that of a run
with one server, but for the values: these lie on the shards, which follow its decisions
(:mod:`sparkdl.ps.kinds`).
"""
