#!/usr/bin/env bash
# Keras 3.15.1: to quantize a model looks through every object of the process once for each weight, so that it takes longer the more a session holds.
#
# A layer whose variable is deleted calls gc.collect(), for the device's memory: model.quantize('int8') of ten Dense layers makes ten full
# collections. With 3 million rows of collected data in the session (lists of numbers) each of these looks at all of them: a call of a
# tenth of a second takes seconds. After gc.freeze(), which leaves what is there out of collections, it is as quick as in a
# new process. enable_lora and loading a quantized file delete variables likewise.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 jax==0.10.2
cd "$folder"
KERAS_BACKEND=jax "$folder/env/bin/python" - <<'PY'
import gc
import time

import keras

collections = []
gc.callbacks.append(lambda phase, info: phase == "start" and info["generation"] == 2 and collections.append(1))


def quantize():
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(10))])
    collections.clear()
    begun = time.process_time()
    model.quantize("int8")
    return time.process_time() - begun, len(collections)


quantize()
alone, count = quantize()
rows = [[float(i)] for i in range(3_000_000)]
beside, _ = quantize()
gc.freeze()
frozen, _ = quantize()
print(f"Keras {keras.__version__}: {count} full collections; {alone:.2f} s alone, {beside:.2f} s beside {len(rows):,} rows, "
      f"{frozen:.2f} s after gc.freeze()")
raise SystemExit(not (count >= 10 and beside > 3 * alone and frozen < beside / 3))
PY
