#!/usr/bin/env bash
# Keras 3.15.1: ScheduleFreeAdamW leaves the weights at another point on TensorFlow 2.21.0 than on JAX 0.10.2.
#
# The method (Defazio and others, 2024) takes gradients at y = (1 - beta) z + beta x. With x .85 and z .8 after two steps and beta .9, y is .845: so
# it is on JAX. On TensorFlow the weight is .85, which is x itself; a third step gives .80 in place of .79. The states of the optimizer
# are equal as long as the gradients are. So one program trains in two ways, and TensorFlow's is plain averaging.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 tensorflow==2.21.0 jax==0.10.2
cat > "$folder/seen.py" <<'PY'
import keras
import numpy as np

weight = keras.Variable(np.array([1.0], "float32"))
optimizer = keras.optimizers.ScheduleFreeAdamW(0.1, warmup_steps=0)
optimizer.build([weight])
seen = []
for _ in range(3):
    optimizer.apply([keras.ops.convert_to_tensor(np.array([0.5], "float32"))], [weight])
    seen.append(round(float(weight.numpy()[0] if hasattr(weight, "numpy") else np.asarray(weight)[0]), 3))
print(f"Keras {keras.__version__}, {keras.backend.backend()}: a weight of 1.0 after each step: {seen}")
raise SystemExit(seen != {"tensorflow": [0.9, 0.85, 0.8], "jax": [0.9, 0.845, 0.79]}[keras.backend.backend()])
PY
cd "$folder"
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=""
for backend in tensorflow jax; do KERAS_BACKEND=$backend "$folder/env/bin/python" seen.py; done
