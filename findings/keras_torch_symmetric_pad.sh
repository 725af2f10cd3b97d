#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: ops.pad(..., mode='symmetric') repeats the edge in place of mirroring.
#
# NumPy, TensorFlow and JAX pad 1, 2, 3 by two to 2 1 1 2 3 3 2. Keras on PyTorch gives 1 1 1 2 3 3 3, which is mode 'edge'. By one
# row both are the same, so that a test with a padding of one does not notice.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

rows = np.array([1.0, 2.0, 3.0], "float32")
seen = {n: keras.ops.convert_to_numpy(keras.ops.pad(rows, n, "symmetric")).tolist() for n in (1, 2)}
wanted = {n: np.pad(rows, n, "symmetric").tolist() for n in (1, 2)}
print(f"Keras {keras.__version__}: {seen}; NumPy {wanted}")
raise SystemExit(not (seen[1] == wanted[1] and seen[2] == np.pad(rows, 2, "edge").tolist()))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
KERAS_BACKEND=torch "$folder/env/bin/python" seen.py
