#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: AveragePooling with padding='same' gives other numbers at the far edge than on TensorFlow and JAX.
#
# AveragePooling1D(3, 2, padding='same') of 0, 1, 2, 3: one row of padding belongs at the end. TensorFlow and JAX leave padding out of the
# mean: 1.0 and 2.5. On PyTorch the padding repeats the last row and is counted: 1.0 and 2.667. Where the padding is the
# same on both sides all agree. A network that was trained on one backend and pools an even size by 3 predicts otherwise on PyTorch.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

rows = np.arange(4, dtype="float32").reshape(1, 4, 1)
seen = keras.ops.convert_to_numpy(keras.layers.AveragePooling1D(3, 2, padding="same")(rows)).ravel()
even = keras.ops.convert_to_numpy(keras.layers.AveragePooling1D(3, 1, padding="same")(rows)).ravel()
print(f"Keras {keras.__version__}: every second {seen.round(3).tolist()}, each {even.round(3).tolist()}")
raise SystemExit(not (abs(seen[1] - 8 / 3) < 1e-3 and abs(even[3] - 2.5) < 1e-3))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
KERAS_BACKEND=torch "$folder/env/bin/python" seen.py
