#!/usr/bin/env bash
# Keras 3.15.1: layers that a model holds in a set train, but are left out when it is saved.
#
# Layers in a list, a dict or a set are tracked alike: their variables are the model's, and fit changes them. save writes
# those of lists and dicts alone. load_model of a model with a set says nothing: its layers have new random values.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import warnings

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


@keras.saving.register_keras_serializable()
class Sum(keras.Model):
    def __init__(self, kind="set", **named):
        super().__init__(**named)
        self.kind = kind
        made = [keras.layers.Dense(3), keras.layers.Dense(3)]
        self.branches = {"set": set, "list": list}[kind](made)

    def call(self, inputs):
        return sum(layer(inputs) for layer in self.branches)

    def get_config(self):
        return {"kind": self.kind}


found = {}
for kind in ("list", "set"):
    model = Sum(kind)
    model.compile("adam", "mse")
    model.fit(X, X, verbose=0)
    model.save("sum.keras")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = keras.models.load_model("sum.keras")
    same = bool(np.allclose(model.predict(X, verbose=0), loaded.predict(X, verbose=0), atol=1e-5))
    about = [str(w.message) for w in told if "weight" in str(w.message) or "load" in str(w.message)]
    found[kind] = len(model.trainable_variables), same, len(about)
print(f"Keras {keras.__version__}: variables, same outputs when loaded, warnings:", found)
raise SystemExit(found != {"list": (4, True, 0), "set": (4, False, 0)})
PY
