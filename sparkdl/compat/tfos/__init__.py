"""TensorFlowOnSpark by its own names: change ``tensorflowonspark`` to ``sparkdl.compat.tfos``.

``TFCluster``: ``run`` in both input modes, ``train``, ``inference``, ``shutdown``,
``tensorboard_url``, servers on the driver. ``TFNode``: ``DataFeed``, ``TFNodeContext``,
``hdfs_path``. ``TFManager``: what ``ctx.mgr`` is. ``TFParallel.run``. ``dfutil``: DataFrames and
TFRecord files. ``compat``: ``export_saved_model``, ``disable_auto_shard``. ``gpu_info``:
``get_gpus``, ``is_gpu_available``. ``pipeline``: ``TFEstimator``, ``TFModel``.

What differs. With ``InputMode.SPARK`` the function runs while ``train`` does, in the tasks that
have the rows: there are no queues, so there is no job that could wait for a function that has
failed; its exception is raised by ``train``, with the traceback. ``train`` is called once. Every
rank is fed equally many rows in ``train`` (a few of the last ones may be left out). ``inference``
is lazy, and calls the function once for each partition, as a cluster of one node. The rows are not
given to parameter servers and evaluators, so these go with ``InputMode.TENSORFLOW``; beside a chief
and a parameter server, workers end with the chief. TensorBoard ends with the chief's function.
``ctx.mgr`` belongs to the node's process, and nobody connects to it. ``shutdown`` waits for the
function and stops neither the SparkContext nor the process. DStreams are not there; their errors
name what to use.
"""
