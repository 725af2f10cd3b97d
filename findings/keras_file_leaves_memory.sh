#!/usr/bin/env bash
# Keras 3.15.1, TensorFlow 2.21.0: each model.save of a small .keras file leaves some 70 KB of C memory behind.
#
# Python's own memory stays as it is (same number of objects), so that no profiler of Python shows it; malloc's count of
# bytes in use rises with each save and each load, of a model of 200 bytes. To find which attributes of an optimizer are
# no settings, Keras makes one for each file, and the variables of that optimizer leave their native handles behind. A
# process that saves 10,000 checkpoints of any size grows by .7 GB.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import ctypes
import gc

import keras


class Numbers(ctypes.Structure):  # struct mallinfo2 of glibc
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


library = ctypes.CDLL(None)
library.mallinfo2.restype = Numbers


def in_use():
    gc.collect()
    numbers = library.mallinfo2()
    return numbers.uordblks + numbers.hblkhd, len(gc.get_objects())


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
model.compile("adam", "mse")
for _ in range(20):
    model.save("model.keras")
(before, objects), saves = in_use(), 100
for _ in range(saves):
    model.save("model.keras")
after, objects_after = in_use()
each = (after - before) / saves / 1024
print(f"Keras {keras.__version__}: {each:.1f} KiB of C memory a save, {(objects_after - objects) / saves:.2f} objects")
raise SystemExit(not (20 < each < 300 and abs(objects_after - objects) < saves))
PY
