"""The ground of all of ``spark/``: sessions, the executors' Python, versions of Spark, frames.

- ``running``: whether a session runs, is local or Spark Connect, what it says, and the
  Python that executors start
- ``versions``: what differs between versions of Spark
- ``spark_errors``: what Spark's own texts say of a failure
- ``frames``: what is a DataFrame, an RDD or a column of vectors
"""
