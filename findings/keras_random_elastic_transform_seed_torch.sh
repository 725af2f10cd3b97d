#!/usr/bin/env bash
# Keras 3.15.1 on PyTorch 2.13.0: RandomElasticTransform(seed=1) does not draw by its seed.
#
# Two layers with one seed, called on one image, distort it in two ways; torch.manual_seed before each call makes them equal:
# they draw from PyTorch's global generator. RandomRotation with a seed gives the same twice, and so does
# RandomElasticTransform on JAX.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 jax==0.10.2
cat > "$folder/tried.py" <<'PY'
import sys

import keras
import numpy as np

image = 255 * np.random.default_rng(0).uniform(size=(1, 12, 12, 3)).astype("float32")


def once(kind, **options):
    layer = kind(**options, seed=1)
    return keras.ops.convert_to_numpy(layer(keras.ops.convert_to_tensor(image), training=True))


def off(kind, **options):
    return float(np.abs(once(kind, **options) - once(kind, **options)).max())


elastic = {"factor": 1.0, "scale": 1.0}
found = [off(keras.layers.RandomElasticTransform, **elastic),
         off(keras.layers.RandomRotation, factor=0.3)]
if keras.backend.backend() == "torch":
    import torch

    torch.manual_seed(3)
    first = once(keras.layers.RandomElasticTransform, **elastic)
    torch.manual_seed(3)
    found.append(float(np.abs(once(keras.layers.RandomElasticTransform, **elastic) - first).max()))
print(f"Keras {keras.__version__}, {keras.backend.backend()}: two layers of one seed differ by "
      f"{found[0]:.2e} (elastic), {found[1]:.2e} (rotation)", *found[2:])
wanted = [True, False, False] if keras.backend.backend() == "torch" else [False, False]
sys.exit([value > 1e-6 for value in found] != wanted)
PY
for backend in torch jax; do
  KERAS_BACKEND=$backend CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" "$folder/tried.py"
done
