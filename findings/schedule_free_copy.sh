#!/usr/bin/env bash
# Keras 3.15.1, TensorFlow: ScheduleFreeAdamW starts its copy of the weights from zero when `fit` builds it.
#
# The optimizer keeps a second copy of the weights, which build() sets to them. On TensorFlow fit builds the optimizer
# within the step that it traces, and that assignment never runs: after one step the copy is 0 and, at a learning
# rate of 0, a weight of 1.0 has become 0.0. Built before fit, or on JAX, it stays 1.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q keras==3.15.1 tensorflow-cpu numpy
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/venv/bin/python" - <<'PYTHON'
import keras
import numpy as np

x, y = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")
found = {}
for built in (False, True):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), dense])
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.0)
    model.compile(optimizer, "mse")
    if built:
        optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    found[built] = float(model.get_weights()[0][0, 0])
print("Keras", keras.__version__, "weight after a step of rate 0:", found)
assert found == {False: 0.0, True: 1.0}, found
PYTHON
