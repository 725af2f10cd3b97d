#!/usr/bin/env bash
# KerasHub 0.32.0, Keras 3.15.1: a task that was saved and loaded again counts as compiled, with another optimizer.
#
# load_model leaves the compile settings of a task out, since its compile is its own, and says so in a warning. But a
# task's constructor compiles it with defaults, so that the loaded task has compiled True and trains on: the optimizer is
# KerasHub's Adam, which got the learning rate that the file has of the user's SGD (0.5); the sampler is another one; and
# what enable_lora froze is trained again: 20 variables in place of 6.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 keras-hub==0.32.0 tensorflow==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import warnings

import keras
import keras_hub

warnings.simplefilter("ignore")
letters = sorted(set("a good dog".replace(" ", "")))
tokens = ["<|endoftext|>", *letters, "\u0120", *("\u0120" + letter for letter in letters)]
tokenizer = keras_hub.models.GPT2Tokenizer(
    vocabulary={token: number for number, token in enumerate(tokens)},
    merges=[f"\u0120 {letter}" for letter in letters],
)
task = keras_hub.models.GPT2CausalLM(
    keras_hub.models.GPT2Backbone(
        vocabulary_size=len(tokens), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8,
        max_sequence_length=8,
    ),
    preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8),
)
task.backbone.enable_lora(2)
task.compile(keras.optimizers.SGD(0.5), sampler="greedy")
task.save("task.keras")
loaded = keras.models.load_model("task.keras")


def told(model):
    optimizer = model.optimizer
    return (
        model.compiled, type(optimizer).__name__, round(float(optimizer.learning_rate), 6),
        type(model.sampler).__name__, len(model.trainable_weights),
    )


print(f"KerasHub {keras_hub.__version__}, Keras {keras.__version__}:", told(task), told(loaded))
wanted = [(True, "SGD", 0.5, "GreedySampler", 6), (True, "Adam", 0.5, "TopKSampler", 20)]
raise SystemExit([told(task), told(loaded)] != wanted)
PY
