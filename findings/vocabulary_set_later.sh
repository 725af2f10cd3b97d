#!/usr/bin/env bash
# Keras 3.15.1: a lookup that was made with a vocabulary is saved with that one, whatever set_vocabulary set later.
#
# StringLookup(vocabulary=['a', 'b']) gets set_vocabulary(['b', 'a']), and looks 'a' up as 2. Its get_config() says
# ['a', 'b'] still, no asset is written, and the loaded layer looks 'a' up as 1, without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6
TF_CPP_MIN_LOG_LEVEL=3 KERAS_BACKEND=tensorflow "$folder/venv/bin/python" - "$folder/m.keras" <<'PYTHON'
import sys

import keras
import numpy as np
import tensorflow as tf

lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
given = keras.Input((1,), dtype="string")
model = keras.Model(given, lookup(given))
lookup.set_vocabulary(["b", "a"])
rows = tf.constant([["a"], ["b"]])
model.save(sys.argv[1])
here = np.asarray(model(rows)).ravel().tolist()
there = np.asarray(keras.models.load_model(sys.argv[1])(rows)).ravel().tolist()
print("Keras", keras.__version__, "config", lookup.get_config()["vocabulary"], "here", here, "loaded", there)
assert (here, there) == ([2, 1], [1, 2])
PYTHON
