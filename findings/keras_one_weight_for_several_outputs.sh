#!/usr/bin/env bash
# Keras 3.15.1: what compute_loss gets of one array of sample weights, beside a dict of labels, depends on how the rows were given.
#
# From arrays in memory it is a dict with that array for each label; from a tf.data.Dataset of the same rows it is the array. So a
# compute_loss written for one of them fails with the other, or weighs otherwise. Losses given to compile take both.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import keras
import numpy as np
import tensorflow as tf

seen = {}


class Model(keras.Model):
    way = ""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        seen[self.way] = sorted(sample_weight) if isinstance(sample_weight, dict) else "one tensor"
        return keras.ops.mean(keras.ops.square(y_pred["a"]))


given = keras.Input((2,))
model = Model(given, {name: keras.layers.Dense(1, name=name)(given) for name in "ab"})
x, y, weight = np.ones((4, 2)), {"a": np.ones(4), "b": np.ones(4)}, np.ones(4)
for way, call in (
    ("arrays", lambda: model.fit(x, y, sample_weight=weight, verbose=0)),
    ("dataset", lambda: model.fit(tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(2), verbose=0)),
):
    model.way = way
    model.compile("sgd")
    call()
print(f"Keras {keras.__version__}: {seen}")
raise SystemExit(seen != {"arrays": ["a", "b"], "dataset": "one tensor"})
PY
