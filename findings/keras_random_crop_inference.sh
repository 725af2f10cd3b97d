#!/usr/bin/env bash
# Keras 3.15.1 (JAX 0.10.2): RandomCrop leaves images as they are when it does not train.
#
# Its docstring says that at inference time "the input will be resized and cropped" to the target's aspect ratio, and that the
# output shape is (..., target_height, target_width, channels); compute_output_shape says so, too. Seen: an image of
# 6 x 6 comes out of RandomCrop(4, 4)(x, training=False) as 6 x 6. So a model whose next layers need the size (Flatten, Dense)
# trains with fit, and raises in predict and evaluate.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 jax==0.10.2
KERAS_BACKEND=jax "$folder/env/bin/python" - <<'PY'
import keras
import numpy as np

layer = keras.layers.RandomCrop(4, 4, seed=1)
image = np.zeros((1, 6, 6, 3), "float32")
trained = tuple(layer(image, training=True).shape)
told, given = layer.compute_output_shape(image.shape), tuple(layer(image, training=False).shape)
print(f"Keras {keras.__version__}: in training {trained}; at inference {given}, told {told}")

x = keras.Input((6, 6, 3))
model = keras.Model(x, keras.layers.Dense(1)(keras.layers.Flatten()(layer(x))))
try:
    model.predict(image, verbose=0)
    raised = False
except ValueError as error:
    raised = True
    print("predict raises:", str(error)[:180])
raise SystemExit(not (trained == told == (1, 4, 4, 3) and given == (1, 6, 6, 3) and raised))
PY
