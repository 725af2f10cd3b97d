#!/usr/bin/env bash
# Keras 3.15.1: on JAX 0.10.2 ops.image.gaussian_blur blurs along one axis only, and makes images half as bright.
#
# With a kernel of 3 x 3 and sigma 1, a single white point is spread over one row on JAX, over three on TensorFlow 2.21.0; the inside of a white image
# becomes .452 on JAX, and stays 1 on TensorFlow (dark at its border only, where zeros lie outside). So images that are blurred
# in training look otherwise, and a network that learned from them on one backend sees others on the other.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0 jax==0.10.2
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

white, point = np.ones((1, 7, 7, 1), "float32"), np.zeros((1, 7, 7, 1), "float32")
point[0, 3, 3] = 1
blurred = [keras.ops.convert_to_numpy(keras.ops.image.gaussian_blur(i, (3, 3), (1.0, 1.0)))[0, :, :, 0] for i in (white, point)]
rows = int((blurred[1].sum(1) > 0.001).sum())
print(f"Keras {keras.__version__}, {keras.backend.backend()}: white becomes {blurred[0][3, 3]:.3f}, a point lies in {rows} rows")
wanted = {"tensorflow": (1, 3), "jax": (0.452, 1)}[keras.backend.backend()]
raise SystemExit(not (abs(blurred[0][3, 3] - wanted[0]) < 0.001 and rows == wanted[1]))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
for backend in tensorflow jax; do KERAS_BACKEND=$backend "$folder/env/bin/python" seen.py; done
