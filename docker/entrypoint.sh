#!/bin/bash
# What starts in a container of this image. Spark on Kubernetes calls it with "driver ..." or with
# "executor" and tells the rest in variables; anything else is a command to run.
set -euo pipefail

case "${1:-}" in
  driver | executor) home=${SPARK_HOME:-$(python -c 'import pyspark; print(pyspark.__path__[0])')} ;;
esac

case "${1:-}" in
  driver)
    shift
    exec "$home/bin/spark-submit" --deploy-mode client \
      --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" "$@"
    ;;
  executor)
    options=()
    for ((number = 0; ; number++)); do
      name=SPARK_JAVA_OPT_$number
      [ -n "${!name+set}" ] || break
      options+=("${!name}")
    done
    jars="${SPARK_CONF_DIR:-$home/conf}:${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$home/jars/*"
    exec java "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
      -cp "$jars${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" \
      --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
      --hostname "$SPARK_EXECUTOR_POD_IP" --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
      --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
  *) exec "$@" ;;
esac
