#!/usr/bin/env bash
# Keras 3.15.1: a functional model of the wrong kinds is built without an error: texts into an Embedding, numbers into a
# StringLookup. Shapes and dtypes of the outputs are known, the summary prints; the first row that is computed fails.
#
# Both layers only cast their input, and a cast between texts and numbers is an error of TensorFlow's kernels, not of its
# graphs. So that a call can be traced with symbols of a kind does not tell that it takes values of that kind.
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

found = {}
for name, layer, dtype, values in (
    ("texts into Embedding", keras.layers.Embedding(4, 2), "string", np.array(["a", "b"])),
    ("numbers into StringLookup", keras.layers.StringLookup(vocabulary=["a", "b"]), "float32", np.zeros(2, "float32")),
):
    given = keras.Input((), dtype=dtype)
    model = keras.Model(given, layer(given))
    built = f"{model.output.dtype} {tuple(model.output.shape)}"
    try:
        model(keras.ops.convert_to_tensor(values))
        found[name] = (built, "computes")
    except Exception as error:
        found[name] = (built, type(error).__name__)
print(f"Keras {keras.__version__}: {found}")
raise SystemExit(any(ended == "computes" for _, ended in found.values()))
PY
