"""What each task of a training stage asks of its executor: Spark's stage-level scheduling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.spark.session.running import is_connect
from sparkdl.spark.session.spark_errors import java_message

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile


def resource_profile(resources: Mapping[str, float] | None, spark: Any) -> ResourceProfile | None:
    """Spark's profile of these resources; None for the application's own.

    Only tasks ask for more, so the executors stay: it works on YARN, Kubernetes, standalone and
    ``local-cluster`` without dynamic allocation (SPARK-43912, Spark 3.5), and through Connect to
    them.

    Args:
        resources: Of one task: ``'cpus'``, ``'gpu'`` or another resource -> amount.
        spark: The session.

    Raises:
        ConfigError: The cluster manager cannot schedule by stage.
    """
    if resources is None:
        return None
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests()
    if "cpus" not in resources:  # Spark cannot count the slots of a barrier stage without
        requests.cpus(int(spark.conf.get("spark.task.cpus", "1")))
    for name, amount in resources.items():
        if name == "cpus":
            requests.cpus(amount)
        else:
            requests.resource(name, amount)
    profile: ResourceProfile = ResourceProfileBuilder().require(requests).build
    try:
        if is_connect(spark):
            _ = profile.id  # registers it with the server: in this thread, whose session is active
        else:
            spark.sparkContext._jsc.sc().resourceProfileManager().addResourceProfile(
                profile._java_resource_profile
            )
    except Exception as error:
        raise ConfigError(
            "resources cannot be asked for by the training stage alone on this cluster",
            expected="YARN, Kubernetes, standalone or local-cluster, and amounts that an executor "
            "has",
            received=f"resources={dict(resources)!r}, master {spark.conf.get('spark.master', '')!r}"
            f": {java_message(error)[:300]}",
            hint="spark.task.cpus and spark.task.resource.gpu.amount are for all stages",
        ) from error
    return profile
