#!/usr/bin/env bash
# KerasHub 0.32.0: an array of strings that a task's fit takes is refused by its train_on_batch, for some tokenizers.
#
# task.fit(np.array([...])) of a GPT-2 causal language model trains. task.train_on_batch and task.preprocessor with the
# same array raise "Input should be a string or a list of strings": a byte-pair tokenizer takes a list, a tensor of
# TensorFlow, and no array of NumPy when it is called by itself. The tokenizer of BERT takes all of them.
# Exits with 0 while that is so, with 1 when it is not any more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet keras==3.15.1 keras-hub==0.32.0 tensorflow==2.21.0
cd "$folder"
KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES="" "$folder/env/bin/python" - <<'PY'
import warnings

import keras_hub
import numpy as np

warnings.simplefilter("ignore")
texts = np.array(["a good dog", "a dog"])
letters = sorted(set("agoodd"))
tokens = ["<|endoftext|>", *letters, "\u0120", *("\u0120" + letter for letter in letters)]
byte_pairs = keras_hub.models.GPT2Tokenizer(
    vocabulary={token: number for number, token in enumerate(tokens)},
    merges=[f"\u0120 {letter}" for letter in letters],
)
words = keras_hub.models.BertTokenizer(
    vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "dog"]
)
task = keras_hub.models.GPT2CausalLM(
    keras_hub.models.GPT2Backbone(
        vocabulary_size=len(tokens), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8,
        max_sequence_length=8,
    ),
    preprocessor=keras_hub.models.GPT2CausalLMPreprocessor(byte_pairs, sequence_length=8),
)
found = {}
for name, call in {
    "fit": lambda: task.fit(texts, verbose=0),
    "train_on_batch": lambda: task.train_on_batch(texts),
    "list": lambda: byte_pairs(texts.tolist()),
    "array": lambda: byte_pairs(texts),
    "array of BERT": lambda: words(texts),
}.items():
    try:
        call()
        found[name] = True
    except ValueError as error:
        found[name] = "a string or a list of strings" not in str(error)
print(f"KerasHub {keras_hub.__version__}:", found)
wanted = {"fit": True, "train_on_batch": False, "list": True, "array": False, "array of BERT": True}
raise SystemExit(found != wanted)
PY
