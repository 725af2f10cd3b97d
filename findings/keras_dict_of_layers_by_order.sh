#!/usr/bin/env bash
# Keras 3.15.1: weights of layers in a dict are saved and loaded by their order, not by their keys.
#
# A model has heads = {'price': Dense, 'speed': Dense}. Another one of the same class, whose dict has the same keys in the
# other order, loads its weights without a word: each head has the weights of the other. So does a program that makes the
# dict of a set of names, run twice: Python orders texts in a set anew in each process.
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

X = np.ones((1, 3), "float32")


class Heads(keras.Model):
    def __init__(self, names):
        super().__init__()
        self.heads = {name: keras.layers.Dense(1) for name in names}

    def call(self, inputs):
        return {name: layer(inputs) for name, layer in self.heads.items()}


def told(model):
    return {name: round(float(keras.ops.convert_to_numpy(made)[0, 0]), 5) for name, made in model(X).items()}


one, other = Heads(["price", "speed"]), Heads(["speed", "price"])
told(one)
told(other)  # makes its variables
one.save_weights("heads.weights.h5")
other.load_weights("heads.weights.h5")
saved, loaded = told(one), told(other)
print(f"Keras {keras.__version__}: saved {saved}, loaded {loaded}")
crossed = loaded == {"price": saved["speed"], "speed": saved["price"]}
raise SystemExit(not (crossed and saved["price"] != saved["speed"]))
PY
