#!/usr/bin/env bash
# Keras 3.15.1: its own Distiller, compiled and saved, comes back from its file without its loss and its optimizer.
#
# keras.distillation.Distiller has a compile of its own, which tells keras.Model of no loss, and no compile_from_config.
# So the file of a compiled one names loss None, and load_model, with compile=True, warns as it does for classes of a
# user's own and compiles nothing: the model says that it is compiled, has no optimizer, and fit ends in an error.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import json
import warnings
import zipfile

import keras
import numpy as np

X, Y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")


def network():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


model = keras.distillation.Distiller(network(), network(), keras.distillation.LogitsDistillation(loss="mse"))
model.compile("adam", "mse")
model.fit(X, Y, verbose=0)
model.save("distiller.keras")
with zipfile.ZipFile("distiller.keras") as file:
    saved = json.loads(file.read("config.json"))["compile_config"]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    loaded = keras.models.load_model("distiller.keras", compile=True)
warned = any("not called as part of model loading" in str(one.message) for one in told)
optimizer = getattr(loaded, "optimizer", None)
try:
    loaded.fit(X, Y, verbose=0)
    ended = "trained"
except Exception as error:
    ended = type(error).__name__
print(f"Keras {keras.__version__}: saved loss {saved['loss']}, loaded optimizer {optimizer}, warned {warned}, fit {ended}")
raise SystemExit(not (saved["loss"] is None and optimizer is None and warned and ended != "trained"))
PY
