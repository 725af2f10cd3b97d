#!/usr/bin/env bash
# TensorFlow 2.18.0 (CPU): in a tf.function, tf.maximum(t, t * 2.0) is not the larger of the two.
#
# Eagerly it is max(t, 2 t); compiled, with the graph rewritten as it is by default, other numbers come out, up to 2.3 off for
# standard normal t. tf.minimum is right in both. So is tf.maximum where the graph is not rewritten (meta optimizer off). Keras'
# Maximum layer on [x, 2 x] predicts wrong numbers by it.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tensorflow-cpu==2.18.0 numpy==1.26.4
TF_CPP_MIN_LOG_LEVEL=3 "$folder/env/bin/python" - <<'PY'
import numpy as np
import tensorflow as tf

t = np.random.default_rng(0).normal(size=(13, 6)).astype("float32")


def off(function, expected):
    return float(np.abs(np.asarray(function(tf.constant(t))) - expected).max())


def larger(x):
    return tf.maximum(x, x * 2.0)


def smaller(x):
    return tf.minimum(x, x * 2.0)


largest, least = np.maximum(t, 2 * t), np.minimum(t, 2 * t)
eager = off(larger, largest)
compiled = off(tf.function(larger), largest)
minimum = off(tf.function(smaller), least)
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
plain = off(tf.function(lambda x: tf.maximum(x, x * 2.0)), largest)
print(f"TensorFlow {tf.__version__}: off by eager {eager}, compiled {compiled}, "
      f"not rewritten {plain}; minimum compiled {minimum}")
raise SystemExit(not (eager == plain == minimum == 0 and compiled > 1))
PY
