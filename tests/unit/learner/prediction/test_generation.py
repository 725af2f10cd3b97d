"""Texts are those of ``task.generate``, and do not depend on the rows beside them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from causal_models import WORDS, tiny_gpt2

from sparkdl.errors import DataError
from sparkdl.learner.cache import cached_predictor
from sparkdl.learner.prediction.generation import RowSampler, row_seeds
from sparkdl.learner.prediction.predictor_archive import Generation
from sparkdl.process import payload
from sparkdl.spark.generate import _archive, _seed_of, _stop_tokens

hub = pytest.importorskip("keras_hub")
RNG = np.random.default_rng(0)
PROMPTS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 4))) for _ in range(11)]


def written(
    task: Any, rows: list[int], *, batch_size: int = 4, max_length: int = 16, skips: bool = False,
    strip_prompt: bool = False, seed: int | None = None, prompts: list[str] = PROMPTS,
) -> dict[int, Any]:  # fmt: skip
    sampler = task.sampler
    generation = Generation(
        max_length, batch_size, _stop_tokens(task, "auto"), strip_prompt,
        _seed_of(sampler, seed, None), skips,
        payload.dump((type(sampler), sampler.get_config())), True, False,
    )  # fmt: skip
    x = np.array([prompts[row].encode() for row in rows], object)
    with cached_predictor(_archive(task, {}, generation, False)) as generator:
        return dict(zip(rows, generator.predict({"prompt": x}, 64)["text"], strict=True))


@pytest.mark.parametrize("strip_prompt", [False, True])
def test_greedy_texts_are_those_of_plain_keras_hub(strip_prompt: bool) -> None:
    """Sorted, in batches of which the last is filled up, and put back into their order."""
    plain = tiny_gpt2().generate(PROMPTS, max_length=16, strip_prompt=strip_prompt)
    assert len(set(plain)) > 4
    made = written(tiny_gpt2(), list(range(11)), strip_prompt=strip_prompt)
    assert [made[row] for row in range(11)] == plain


@pytest.mark.parametrize(
    "kind", ["TopKSampler", pytest.param("TopPSampler", marks=pytest.mark.slow)]
)
def test_a_drawn_text_depends_on_its_prompt_and_the_seed_alone(kind: str) -> None:
    def make() -> Any:
        return getattr(hub.samplers, kind)(**{"p": 0.9} if kind == "TopPSampler" else {})

    rows = list(range(11))
    first = written(tiny_gpt2(make()), rows, seed=5)
    assert written(tiny_gpt2(make()), rows[::-1], seed=5) == first
    assert written(tiny_gpt2(make()), [7, 3], batch_size=3, seed=5) == {3: first[3], 7: first[7]}
    assert written(tiny_gpt2(make()), rows, seed=6) != first


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (hub.samplers.RandomSampler(), [0.5, 0.25, 0.125, 0.1, 0.025]),
        (hub.samplers.TopKSampler(k=2), [2 / 3, 1 / 3, 0, 0, 0]),
        (hub.samplers.TopPSampler(p=0.8), [0.5 / 0.875, 0.25 / 0.875, 0.125 / 0.875, 0, 0]),
    ],
    ids=["random", "top_k", "top_p"],
)
def test_rows_draw_with_the_probabilities_of_the_sampler(sampler: Any, expected: Any) -> None:
    rows, p = 20_000, np.array([0.5, 0.25, 0.125, 0.1, 0.025], "float32")
    drawn = RowSampler(sampler, rows)
    drawn.seeds.assign(row_seeds([str(i) for i in range(rows)], np.zeros(rows), 3))
    probabilities = keras.ops.convert_to_tensor(np.tile(p, (rows, 1)))
    mask = keras.ops.convert_to_tensor(np.tile([[True, False, False]], (rows, 1)))
    tokens = drawn(
        next=lambda prompt, cache, index: (keras.ops.log(probabilities), None, cache),
        prompt=keras.ops.zeros((rows, 3), "int32"), index=1, mask=mask,
    )  # fmt: skip
    first, second = keras.ops.convert_to_numpy(tokens)[:, 1:].T
    for token in (first, second):
        shares = np.bincount(token, minlength=5) / rows
        np.testing.assert_allclose(shares, expected, atol=0.015)
    both = np.mean((first == 0) & (second == 0))  # steps are independent
    assert abs(both - expected[0] ** 2) < 0.015


def test_a_prompt_without_room() -> None:
    prompts = ["the cat", "the cat in the hat", ""]
    with pytest.raises(DataError, match="leaves no room") as caught:
        written(tiny_gpt2(), [0, 1], max_length=7, prompts=prompts)
    assert "'the cat in the hat'" in caught.value.received
    made = written(tiny_gpt2(), [0, 1], max_length=7, prompts=prompts, skips=True)
    assert made[1] is None
    assert made[0].startswith("the cat")
