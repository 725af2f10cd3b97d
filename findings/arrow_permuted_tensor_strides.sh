#!/usr/bin/env bash
# pyarrow 26.0.1: to_numpy_ndarray of a tensor column whose axes are permuted in a ring shows some numbers twice and others never.
#
# A fixed_shape_tensor of physical shape (2, 3, 4) with permutation [2, 0, 1] has the logical shape (4, 2, 3), as the format's page says, and
# pyarrow gives that shape. Its strides are (4, 32, 8) bytes, where those of the stored axes are (4, 48, 16): of 24 different numbers
# 16 are seen. [1, 0, 2], [0, 2, 1] and [2, 1, 0], which are their own inverse, are right. numpy.transpose of the storage gives all of them.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pyarrow==26.0.1 numpy==2.2.6
"$folder/env/bin/python" - <<'PY'
import numpy as np
import pyarrow as pa

numbers = np.arange(24, dtype=np.float32)
right = {}
for order in ([1, 0, 2], [0, 2, 1], [2, 1, 0], [2, 0, 1], [1, 2, 0]):
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3, 4), permutation=order)
    storage = pa.array([numbers.tolist()], pa.list_(pa.float32(), 24))
    tensor = pa.ExtensionArray.from_storage(kind, storage).to_numpy_ndarray()[0]
    wanted = numbers.reshape(2, 3, 4).transpose(order)
    assert tensor.shape == wanted.shape
    right[str(order)] = np.array_equal(tensor, wanted)
    print(f"pyarrow {pa.__version__}: {order}: {len(np.unique(tensor))} of 24 numbers, strides {tensor.strides}")
raise SystemExit(list(right.values()) != [True, True, True, False, False])
PY
