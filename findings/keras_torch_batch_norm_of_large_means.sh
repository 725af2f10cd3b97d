#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: BatchNormalization, when it trains, is wrong for inputs that are large beside their spread.
#
# It takes the variance as the mean of squares less the square of the mean, in float32. Three rows with 999, 1000 and 1001 come out as
# -1.206, 0 and 1.206 (1.225 is right), rows with 3999, 4000 and 4001 as -3162, 0 and 3162; random rows about 10,000 as NaN, where the
# difference falls below zero. keras.ops.var of the same numbers is right, and so is the layer on TensorFlow and JAX. So years,
# pressures in hPa or pixels of 16 bits that nobody scaled train there, and not here.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

seen = {}
for mean in (0, 1000, 4000):
    rows = (np.array([[-1.0], [0.0], [1.0]]) + mean).astype("float32")
    layer = keras.layers.BatchNormalization(epsilon=1e-7)
    seen[mean] = float(keras.ops.convert_to_numpy(layer(rows, training=True))[2, 0])
    variance = float(keras.ops.var(rows))
print(f"Keras {keras.__version__}: the largest of three rows, by their mean: {seen}; ops.var {variance:.4f}")
right = abs(seen[0] - 1.2247) < 1e-3 and abs(variance - 2 / 3) < 1e-4
raise SystemExit(not (right and abs(seen[1000] - 1.2247) > 0.01 and abs(seen[4000]) > 1000))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
KERAS_BACKEND=torch "$folder/env/bin/python" seen.py
