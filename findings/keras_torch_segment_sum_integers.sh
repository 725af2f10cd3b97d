#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: segment_sum and segment_max of integers go through float32 and lose digits.
#
# ops.segment_max of int32 gives int32, and 16777216 for 16777217; of 2147483647 it gives -2147483648, the smallest number there is, since
# the float is one too large to come back. segment_sum of 16777217 alone is 16777216. On TensorFlow and JAX both are exact. Sums of
# ids, counts or cents per group are off by a few, without a word.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

rows, groups = np.array([16777217, 2147483647], "int32"), np.array([0, 1])
seen = {name: keras.ops.convert_to_numpy(getattr(keras.ops, name)(rows, groups, 2)) for name in ("segment_sum", "segment_max")}
print(f"Keras {keras.__version__}: {rows.tolist()} become", {n: (v.tolist(), str(v.dtype)) for n, v in seen.items()})
raise SystemExit(not (seen["segment_sum"][0] == 16777216 and seen["segment_max"].tolist() == [16777216, -2147483648]))
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
KERAS_BACKEND=torch "$folder/env/bin/python" seen.py
