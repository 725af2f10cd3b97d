#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow 2.21.0: one NaN leaves the other numbers unsorted in ops.sort and ops.argsort.
#
# NumPy, JAX and PyTorch put NaN last: 3, NaN, 1, 2 becomes 1, 2, 3, NaN. On TensorFlow it becomes 1, 3, NaN, 2: no order that a search or a
# quantile of one's own could use, and no error. A ranking metric over scores with one NaN is wrong for the other rows, too.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

rows = np.array([3.0, np.nan, 1.0, 2.0], "float32")
seen = keras.ops.convert_to_numpy(keras.ops.sort(rows))
order = keras.ops.convert_to_numpy(keras.ops.argsort(rows))
print(f"Keras {keras.__version__}: sorted {seen.tolist()}, argsort {order.tolist()}, NumPy {np.sort(rows).tolist()}")
known = seen[~np.isnan(seen)]
raise SystemExit(not (known != np.sort(known)).any())
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
KERAS_BACKEND=tensorflow "$folder/env/bin/python" seen.py
