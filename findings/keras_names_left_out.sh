#!/usr/bin/env bash
# Keras 3.15.1: saving or loading a model makes a layer or an optimizer anew for each part of it, only to list its attributes.
#
# saving_lib.get_attr_skipset keeps the names that a file leaves out per kind of object, as "saving_attr_skipset_Layer", and asks
# for "saving_attr_skiplist_Layer": it never finds them. So each layer, metric and optimizer that is saved or loaded costs the
# construction of another one: here about a third of the time of model.save and of load_weights. Who sets the name that is asked
# for gets the same file sooner.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 jax==0.10.2
KERAS_BACKEND=jax FOLDER="$folder" "$folder/env/bin/python" - <<'PY'
import os
import time
from unittest.mock import patch

import keras
from keras.src.saving import saving_lib

model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(50))])
path = os.path.join(os.environ["FOLDER"], "model.keras")
model.save(path)
made, init = [], keras.Layer.__init__


def counted(self, *args, **settings):
    made.append(type(self).__name__)
    init(self, *args, **settings)


with patch.object(keras.Layer, "__init__", counted):
    began = time.perf_counter()
    model.load_weights(path)
    seconds = time.perf_counter() - began
known = saving_lib.get_attr_skipset("Layer") is saving_lib.get_attr_skipset("Layer")
print(f"Keras {keras.__version__}: load_weights of 50 layers made {made.count('Layer')} others, {seconds:.3f} s; known again: {known}")
raise SystemExit(not (made.count("Layer") >= 50 and not known))
PY
