#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: RandomBrightness, when it trains, writes to the tensor that it is given.
#
# transform_images adds the brightness with +=, which PyTorch does in place: after layer(x, training=True) the caller's x (and the
# NumPy array whose memory it shares) holds the brightened images. Called again, it brightens them again. RandomContrast
# leaves x as it is. On JAX and TensorFlow tensors cannot change.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0
KERAS_BACKEND=torch CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import keras
import numpy as np
import torch


def change(layer):
    array = np.full((1, 2, 2, 3), 0.5, "float32")
    layer(torch.from_numpy(array), training=True)
    return float(np.abs(array - 0.5).max())


brightness = change(keras.layers.RandomBrightness((0.2, 0.2), (0, 1), seed=1))
contrast = change(keras.layers.RandomContrast(0.5, (0, 1), seed=1))
print(f"Keras {keras.__version__}, torch {torch.__version__}: the input changed by {brightness:.3f} "
      f"(RandomBrightness), {contrast:.3f} (RandomContrast)")
raise SystemExit(not (brightness > 0.1 and contrast == 0))
PY
