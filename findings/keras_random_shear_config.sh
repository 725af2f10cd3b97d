#!/usr/bin/env bash
# Keras 3.15.1 (JAX 0.10.2): a RandomShear layer cannot be made again from its own configuration.
#
# RandomShear(0.3, 0.3) keeps its factors as (-0.3, 0.3), get_config writes them so, and the constructor takes only numbers in
# [0, 1]. Seen: from_config(get_config()) raises; so does load_model of every saved model that has the layer. The other
# random layers with factors (RandomZoom, RandomRotation) can be made again.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 jax==0.10.2
KERAS_BACKEND=jax "$folder/env/bin/python" - <<'PY'
import keras


def made_again(layer):
    try:
        type(layer).from_config(layer.get_config())
        return "can be made again"
    except Exception as error:
        return f"cannot: {str(error).strip().splitlines()[-1]}"


shear, zoom = keras.layers.RandomShear(0.3, 0.3), keras.layers.RandomZoom(0.3, 0.3)
print(f"Keras {keras.__version__}: writes x_factor={shear.get_config()['x_factor']}")
found = [made_again(shear), made_again(zoom)]
print("RandomShear", found[0])
print("RandomZoom", found[1])
raise SystemExit(not (found[0].startswith("cannot") and found[1].startswith("can be")))
PY
