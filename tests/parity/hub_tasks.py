"""Tasks of KerasHub, small and made without a download, and texts for them."""

from __future__ import annotations

from typing import Any

import keras
import keras_hub as hub
import keras_rs
import numpy as np

WORDS = "the a cat dog film book was is good bad great awful fun dull i like hate this not very"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
LENGTH = 10
Texts = list[str]


def texts(count: int, seed: int = 0) -> tuple[Texts, np.ndarray]:
    """Sentences of some words, and whether a good one is among them."""
    random = np.random.default_rng(seed)
    made = [" ".join(random.choice(WORDS.split(), random.integers(3, 9))) for _ in range(count)]
    return made, np.array([int(bool({"good", "great"} & set(t.split()))) for t in made])


def _loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _bert(dtype: str | None = None) -> Any:
    return hub.models.BertBackbone(
        vocabulary_size=len(VOCABULARY), num_layers=1, num_heads=2, hidden_dim=8,
        intermediate_dim=16, max_sequence_length=LENGTH, dropout=0.0, dtype=dtype,
    )  # fmt: skip


def classifier() -> Any:
    """A text classifier on BERT."""
    preprocessor = hub.models.BertTextClassifierPreprocessor(
        hub.models.BertTokenizer(vocabulary=VOCABULARY), sequence_length=LENGTH
    )
    model = hub.models.BertTextClassifier(
        _bert(), num_classes=2, preprocessor=preprocessor, dropout=0.0
    )
    model.compile(keras.optimizers.Adam(1e-2), _loss(), metrics=["accuracy"])
    return model


def masked_model() -> Any:
    """A masked language model that masks each word."""
    preprocessor = hub.models.BertMaskedLMPreprocessor(
        hub.models.BertTokenizer(vocabulary=VOCABULARY), sequence_length=LENGTH,
        mask_selection_length=LENGTH, mask_selection_rate=1.0, mask_token_rate=1.0,
        random_token_rate=0.0,
    )  # fmt: skip
    model = hub.models.BertMaskedLM(_bert(), preprocessor=preprocessor)
    model.compile(keras.optimizers.Adam(1e-2), _loss(), weighted_metrics=["accuracy"])
    return model


def causal_model(lora: int = 0, dtype: str | None = None) -> Any:
    """A language model like GPT-2, whose tokens are letters; with adapters or without."""
    letters = sorted(set(WORDS.replace(" ", "")))
    tokens = ["<|endoftext|>", *letters, "Ġ", *("Ġ" + letter for letter in letters)]
    tokenizer = hub.models.GPT2Tokenizer(
        vocabulary={token: number for number, token in enumerate(tokens)},
        merges=[f"Ġ {letter}" for letter in letters],
    )
    backbone = hub.models.GPT2Backbone(
        vocabulary_size=len(tokens), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16,
        dropout=0.0, max_sequence_length=24, dtype=dtype,
    )  # fmt: skip
    preprocessor = hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=24)
    model = hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)
    if lora:
        model.backbone.enable_lora(lora)
    model.compile(
        keras.optimizers.Adam(1e-2), _loss(), weighted_metrics=["accuracy"], sampler="greedy"
    )
    return model


def image_classifier() -> Any:
    """An image classifier on a ResNet, whose converter makes images of 8 x 8 pixels."""
    backbone = hub.models.ResNetBackbone(
        input_conv_filters=[64], input_conv_kernel_sizes=[3], stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1], stackwise_num_strides=[1, 2], block_type="basic_block",
        image_shape=(8, 8, 3),
    )  # fmt: skip
    for layer in backbone._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False  # a batch has other rows with two workers
    preprocessor = hub.models.ResNetImageClassifierPreprocessor(
        hub.layers.ResNetImageConverter(image_size=(8, 8), scale=1 / 255.0)
    )
    model = hub.models.ResNetImageClassifier(backbone, num_classes=2, preprocessor=preprocessor)
    model.compile(keras.optimizers.SGD(1e-2), _loss(), metrics=["accuracy"])
    return model


class Embedder(hub.models.TextEmbedder):
    """The middle of a text's words as its vector, whose sum of squares is 1."""

    def __init__(self, backbone: Any, preprocessor: Any = None, **settings: Any) -> None:
        self.backbone, self.preprocessor = backbone, preprocessor
        inputs = backbone.input
        words = backbone(inputs)["sequence_output"]
        mask = keras.ops.expand_dims(keras.ops.cast(inputs["padding_mask"], words.dtype), -1)
        middle = keras.ops.sum(words * mask, 1) / keras.ops.sum(mask, 1)
        super().__init__(inputs, keras.ops.normalize(middle, axis=-1), **settings)


def embedder() -> Any:
    """Texts as vectors, trained towards given ones."""
    preprocessor = hub.models.BertTextClassifierPreprocessor(
        hub.models.BertTokenizer(vocabulary=VOCABULARY), sequence_length=LENGTH
    )
    model = Embedder(_bert(), preprocessor)
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.CosineSimilarity())
    return model


def translator() -> Any:
    """A model like BART that writes a text of another one."""
    letters = sorted(set(WORDS.replace(" ", "")))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokens = [*special, *letters, "Ġ", *("Ġ" + letter for letter in letters)]
    tokenizer = hub.models.BartTokenizer(
        vocabulary={token: number for number, token in enumerate(tokens)},
        merges=[f"Ġ {letter}" for letter in letters],
    )
    backbone = hub.models.BartBackbone(
        vocabulary_size=len(tokens), num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16,
        dropout=0.0, max_sequence_length=24,
    )  # fmt: skip
    preprocessor = hub.models.BartSeq2SeqLMPreprocessor(
        tokenizer, encoder_sequence_length=24, decoder_sequence_length=16
    )
    model = hub.models.BartSeq2SeqLM(backbone, preprocessor=preprocessor)
    model.compile(keras.optimizers.Adam(1e-2), _loss(), weighted_metrics=["accuracy"])
    return model


def head_on_backbone() -> Any:
    """A functional model on the inputs of a backbone, which is one of its layers, too."""
    backbone = _bert()
    outputs = keras.layers.Dense(2)(backbone(backbone.input)["pooled_output"])
    model = keras.Model(backbone.input, outputs)
    model.compile("adam", _loss())
    return model


def ranking() -> Any:
    """Scores of the five items of a row for its query, compared in pairs: a row is a list."""
    query = keras.Input((3,), dtype="int32", name="query")
    items = keras.Input((5,), dtype="int32", name="items")
    asked = keras_rs.layers.EmbedReduce(20, 4, combiner="mean")(query)
    both = keras.layers.Concatenate()(
        [keras.layers.Embedding(20, 4)(items), keras.layers.RepeatVector(5)(asked)]
    )
    scores = keras.layers.Dense(1)(keras_rs.layers.FeatureCross()(both))
    model = keras.Model({"query": query, "items": items}, keras.layers.Reshape((5,))(scores))
    model.compile(keras.optimizers.Adam(1e-2), keras_rs.losses.PairwiseHingeLoss())
    return model


class TwoTowers(keras.Model):
    """Users and items as vectors; the other items of a batch are those that a user did not take."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = keras.layers.Embedding(20, 4), keras.layers.Embedding(20, 4)

    def call(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {"user": self.users(inputs["user"]), "item": self.items(inputs["item"])}

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        scores = keras.ops.matmul(y_pred["user"], keras.ops.transpose(y_pred["item"]))
        rows = keras.ops.arange(keras.ops.shape(scores)[0])
        losses = keras.losses.sparse_categorical_crossentropy(rows, scores, from_logits=True)
        return keras.ops.mean(losses)


def retrieval() -> Any:
    """Two towers, built by a call."""
    model = TwoTowers()
    model({"user": np.zeros(2, "int32"), "item": np.zeros(2, "int32")})
    model.compile(keras.optimizers.Adam(1e-2))
    return model


def rows_of(name: str, count: int) -> tuple[Any, ...]:
    """Arrays as a user gives them to ``fit`` of a task."""
    sentences, labels = texts(count)
    random = np.random.default_rng(0)
    if name == "ranking":
        ids = {
            "query": random.integers(0, 20, (count, 3)),
            "items": random.integers(0, 20, (count, 5)),
        }
        return {n: a.astype("int32") for n, a in ids.items()}, random.uniform(0, 1, (count, 5))
    if name == "retrieval":
        return ({n: random.integers(0, 20, count).astype("int32") for n in ("user", "item")},)
    if name == "images":
        return random.uniform(0, 255, (count, 9, 9, 3)).astype("float32"), labels
    if name == "translator":
        return ({"encoder_text": np.array(sentences), "decoder_text": np.array(sentences[::-1])},)
    if name == "embedder":
        return np.array(sentences), random.normal(size=(count, 8)).astype("float32")
    return (np.array(sentences), labels) if name == "classifier" else (np.array(sentences),)


TASKS = {
    "classifier": classifier,
    "masked": masked_model,
    "causal": causal_model,
    "lora": lambda: causal_model(lora=4),
    "lora in bfloat16": lambda: causal_model(lora=4, dtype="mixed_bfloat16"),
    "images": image_classifier,
    "embedder": embedder,
    "translator": translator,
    "head on a backbone": head_on_backbone,
    "ranking": ranking,
    "retrieval": retrieval,
}
"""Name -> what makes a compiled task."""
