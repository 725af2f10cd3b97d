"""Linear models of sparse vectors of any dimension, in ``pyspark.ml`` pipelines.

::

    from pyspark.ml import Pipeline
    from sparkdl.sparse import FTRLClassifier

    model = Pipeline(stages=[hasher, FTRLClassifier(lambda1=1.0)]).fit(df)
    model.write().overwrite().save('models/clicks')

``FTRLClassifier``: a logistic regression trained by FTRL-Proximal, with NumPy alone, whose weights
are spread over the ranks. ``FTRLClassificationModel``: what its ``fit`` returns.
"""

from sparkdl.linear.stages import FTRLClassificationModel, FTRLClassifier

__all__ = ["FTRLClassificationModel", "FTRLClassifier"]
