#!/usr/bin/env bash
# Keras 3.15.1, TensorFlow: the output of StringLookup(invert=True) is declared int64 and holds texts.
#
# In a functional model the layer's symbolic output, and so model.output.dtype, says int64; predict gives strings. Whoever
# makes a table or an exported signature from the declared dtype gets a column of the wrong type. The forward lookup
# declares int64 and gives int64.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import keras
import numpy as np

given = keras.Input((1,), dtype="int64")
model = keras.Model(given, keras.layers.StringLookup(vocabulary=["a", "b"], invert=True)(given))
told, found = keras.backend.standardize_dtype(model.output.dtype), model(np.array([[1], [2]])).dtype.name
print(f"Keras {keras.__version__}: the output is declared {told}, its values are {found}")
raise SystemExit(not (told == "int64" and found == "string"))
PY
