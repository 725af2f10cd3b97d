"""TensorFlowOnSpark by its own names: change ``tensorflowonspark`` to ``sparkdl.compat.tfos``.

``TFCluster``: ``run`` in both input modes, ``train``, ``inference``, ``shutdown``. ``TFNode``:
``DataFeed``, ``TFNodeContext``, ``hdfs_path``. ``TFParallel.run``. ``dfutil``: DataFrames and
TFRecord files. ``compat``: ``export_saved_model``, ``disable_auto_shard``. ``gpu_info``:
``get_gpus``, ``is_gpu_available``. ``pipeline``: ``TFEstimator``, ``TFModel``.

What differs. With ``InputMode.SPARK`` the function runs while ``train`` or ``inference`` does, in
the tasks that have the rows: there are no queues, so there is no job that could wait for a function
that has failed; its exception is raised by ``train``, with the traceback. ``train`` is called once,
``inference`` any number of times. Every rank is fed equally many rows in ``train`` (a few of the
last ones may be left out). The rows are not given to parameter servers and evaluators, so these go
with ``InputMode.TENSORFLOW``; beside a chief and a parameter server, workers end with the chief.
``shutdown`` waits for the function and stops neither the SparkContext nor the process. DStreams
(their errors name what to use), TensorBoard, ``driver_ps_nodes`` and the queue manager are not
there.
"""
