#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: LayerNormalization along axes that are not the last ones raises.
#
# The argument axis takes any axes, and TensorFlow and JAX do. On PyTorch the layer hands the sizes of these axes to PyTorch's own
# layer_norm, which looks at the last axes only. LayerNormalization(axis=1) of (2, 3, 4) raises RuntimeError with "Given
# normalized_shape=[3]". Where the sizes happen to be those of the last axes too, the same layer passes, and what it gives
# is normalized along the last axis: (2, 4, 4) with axis=1.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

layer = keras.layers.LayerNormalization(axis=1, epsilon=1e-7)
try:
    layer(np.zeros((2, 3, 4), "float32"))
    refused = ""
except RuntimeError as error:
    refused = next(line for line in str(error).splitlines() if "normalized_shape" in line)
rows = np.random.default_rng(0).normal(size=(2, 4, 4)).astype("float32")
given = keras.ops.convert_to_numpy(keras.layers.LayerNormalization(axis=1, epsilon=1e-7)(rows))
inner, last = float(np.abs(given.mean(1)).max()), float(np.abs(given.mean(2)).max())
print(f"Keras {keras.__version__}: {refused}; means along axis 1 up to {inner:.3f}, along the last axis {last:.3f}")
raise SystemExit(not (refused and inner > 0.1 and last < 1e-5))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
KERAS_BACKEND=torch "$folder/env/bin/python" seen.py
