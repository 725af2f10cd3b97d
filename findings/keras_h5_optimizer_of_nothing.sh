#!/usr/bin/env bash
# Keras 3.15.1, TensorFlow: a compiled model that comes from an .h5 file cannot be trained any further.
#
# load_model builds the optimizer of the file with the variables that belong to the model object itself. A Sequential
# or functional model has none of its own, for its layers hold them. So the optimizer counts as built, knows no
# variable, and the first step of fit ends with "Unknown variable". The same model from a .keras file goes on.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import keras
import numpy as np

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(), keras.losses.MeanSquaredError())
rows = np.ones((8, 3), "float32"), np.zeros((8, 1), "float32")
model.fit(*rows, verbose=0)
found = {}
for ending in ("keras", "h5"):
    model.save(f"model.{ending}")
    loaded = keras.models.load_model(f"model.{ending}")
    try:
        loaded.fit(*rows, verbose=0)
        found[ending] = "trains"
    except ValueError as error:
        found[ending] = str(error).partition(":")[0]
print(f"Keras {keras.__version__}:", found)
raise SystemExit(found != {"keras": "trains", "h5": "Unknown variable"})
PY
