"""The sinks of the events of a fit: files, TensorBoard, MLflow, a timeline, a page.

::

    from sparkdl.tracking import JsonLines, TensorBoard

    spark_model.fit(df, epochs=5, sinks=[TensorBoard('logs'), JsonLines('runs'), print])

``register(make)``: every fit of this process tells a sink of its own that ``make()`` returns.

``sinks``: what ``fit(sinks=...)`` takes, and what happens to a sink that raises. ``event_files``,
``mlflow_sink``, ``notebook``: the sinks. ``profile``: where a step's time went. ``page``: the live
page. No Spark; no framework of its own.
"""

from sparkdl.tracking.event_files import JsonLines, TensorBoard, Timeline
from sparkdl.tracking.notebook import NotebookCurves
from sparkdl.tracking.sinks import add_standing as register
from sparkdl.tracking.sinks import remove_standing as unregister

__all__ = ["JsonLines", "NotebookCurves", "TensorBoard", "Timeline", "register", "unregister"]
