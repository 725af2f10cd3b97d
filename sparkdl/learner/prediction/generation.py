"""Text that a causal language model of KerasHub writes on from prompts, on the running backend.

A row's text depends on its prompt (and its seed), not on the rows beside it: every call has equally
many rows, and the noise of a sampler that draws is a function of the row and the position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from sparkdl.errors import DataError
from sparkdl.learner.prediction.predictor import filled
from sparkdl.learner.prediction.predictor_archive import Generation
from sparkdl.process import payload
from sparkdl.training.learning import Arrays

PROMPT, SEED, TEXT = "prompt", "seed", "text"
"""The inputs of a generator, and its output."""
_DRAWING = ("RandomSampler", "TopKSampler", "TopPSampler")
_GOLDEN, _FIRST, _SECOND = -1640531527, 2146121005, -2073254261
"""Constants of a hash of 32 bits, as signed integers, which every backend multiplies modulo 2**32:
of steps (the golden ratio), and of ``lowbias32`` (C. Wellons, Hash Function Prospector, 2018)."""


def draws_by_row(sampler: Any) -> bool:
    """Whether the draws of a sampler can be made functions of the row."""
    import keras_hub

    return type(sampler) in [getattr(keras_hub.samplers, name) for name in _DRAWING]


class RowSampler:
    """A sampler of KerasHub whose draws depend on a row's seed and a position alone.

    The token drawn is ``argmax_j(log p_j + g_j)`` over the sampler's candidates, where ``g_j`` is
    Gumbel noise from a hash of the row's seed, the position and the token ``j``: it has the
    probability ``p_j / Σ p`` (E. J. Gumbel, 1954), as in the sampler itself.

    Args:
        sampler: A ``RandomSampler``, ``TopKSampler`` or ``TopPSampler``.
        rows: Rows of every call.
    """

    def __init__(self, sampler: Any, rows: int) -> None:
        self._sampler = sampler
        self.seeds = keras.Variable(np.zeros((rows, 2), "int32"), trainable=False, dtype="int32")
        self.variables = [self.seeds]  # what KerasHub hands to the compiled call
        sampler.get_next_token = self._next_token
        self._seeds: Any = None
        self._position: Any = None

    def __call__(self, next: Callable[..., Any], **arguments: Any) -> Any:
        """The prompts with what is written on from them; see ``keras_hub.samplers.Sampler``."""
        self._seeds = keras.ops.convert_to_tensor(self.seeds)

        def noting(prompt: Any, cache: Any, index: Any) -> Any:
            self._position = index
            return next(prompt, cache, index)

        try:
            return self._sampler(next=noting, **arguments)
        finally:
            self._seeds = self._position = None  # symbols of a graph that is made

    def _next_token(self, probabilities: Any) -> Any:
        ops = keras.ops
        kept, tokens = self._candidates(probabilities)
        position = _hash(ops.cast(self._position, "int32") * _GOLDEN)
        row = _hash(ops.bitwise_xor(self._seeds, position))
        bits = _hash(tokens * _GOLDEN + row[:, :1])
        bits = _hash(ops.bitwise_xor(bits, row[:, 1:]))
        share = (ops.cast(_shifted(bits, 9), "float32") + 0.5) / 2.0**23  # within (0, 1)
        scores = ops.log(kept) - ops.log(-ops.log(share))
        best = ops.argmax(scores, axis=-1)[:, None]
        return ops.squeeze(ops.take_along_axis(tokens, best, axis=-1), axis=-1)

    def _candidates(self, probabilities: Any) -> tuple[Any, Any]:
        """The probabilities that the sampler draws from, and whose tokens they are."""
        ops, sampler = keras.ops, self._sampler
        kind, k = type(sampler).__name__, getattr(sampler, "k", None)
        if kind == "RandomSampler":
            tokens = ops.arange(probabilities.shape[-1], dtype="int32")
            return probabilities, ops.broadcast_to(tokens[None], probabilities.shape)
        count = probabilities.shape[-1] if k is None else k
        kept, tokens = ops.top_k(probabilities, k=count, sorted=True)
        if kind == "TopPSampler":
            before = ops.cumsum(kept, axis=-1) <= sampler.p  # the first that exceeds p is kept
            is_kept = ops.concatenate([ops.ones_like(before[:, :1]), before[:, :-1]], axis=-1)
            kept = ops.where(is_kept, kept, ops.zeros_like(kept))
        return kept, ops.cast(tokens, "int32")


def _shifted(x: Any, places: int) -> Any:
    return keras.ops.bitwise_and(keras.ops.right_shift(x, places), (1 << (32 - places)) - 1)


def _hash(x: Any) -> Any:
    x = keras.ops.bitwise_xor(x, _shifted(x, 16)) * _FIRST
    x = keras.ops.bitwise_xor(x, _shifted(x, 15)) * _SECOND
    return keras.ops.bitwise_xor(x, _shifted(x, 16))


def row_seeds(prompts: list[str], seeds: npt.NDArray[Any], seed: int) -> npt.NDArray[np.int32]:
    """Two numbers for each row, ``(rows, 2)``, from its prompt, its own seed and the call's."""
    content = b"".join(
        hashlib.sha256(f"{seed} {own} {prompt}".encode()).digest()[:8]
        for prompt, own in zip(prompts, seeds.tolist(), strict=True)
    )
    return np.frombuffer(content, np.int32).reshape(-1, 2)


class TextGenerator:
    """Writes texts on; see :class:`sparkdl.training.learning.Predictor`.

    Prompts that come together are sorted by their number of tokens: a call of the model starts at
    the end of its shortest prompt.

    Args:
        task: A causal language model of KerasHub with a preprocessor. Its sampler is set, and its
            preprocessor is taken from it.
        generation: How to write.
    """

    passes = 1

    def __init__(self, task: Any, generation: Generation) -> None:
        self._task, self._generation = task, generation
        self._preprocessor = task.preprocessor
        kind, config = payload.load_apart(generation.sampler)
        sampler = kind.from_config(config)
        self._drawn = RowSampler(sampler, generation.batch_size) if draws_by_row(sampler) else None
        task.preprocessor, task.generate_function = None, None
        task.sampler = self._drawn or sampler
        task.jit_compile, task.run_eagerly = generation.jit_compile, generation.run_eagerly

    def predict(self, x: Arrays, batch_size: int) -> Arrays:
        """One text for each prompt, of any number of rows; None where a prompt leaves no room.

        Raises:
            DataError: A prompt leaves no room, and that is an error.
        """
        given, rows = self._generation, self._generation.batch_size
        prompts = [text.decode() for text in x[PROMPT].reshape(-1).tolist()]
        told = self._preprocessor.generate_preprocess(prompts, sequence_length=given.max_length)
        inputs = {n: np.asarray(keras.ops.convert_to_numpy(tensor)) for n, tensor in told.items()}
        lengths = inputs["padding_mask"].sum(axis=1)
        fits = (lengths > 0) & (lengths < given.max_length)
        if not fits.all() and not given.skips:
            row = int(np.argmin(fits))
            raise DataError(
                "a prompt leaves no room for a text",
                expected=f"1 to {given.max_length - 1} tokens, as max_length={given.max_length}",
                received=f"{lengths[row]} tokens or more: {prompts[row][:80]!r}",
                hint="a larger max_length, or handle_invalid='skip' or 'keep'",
            )
        seeds = row_seeds(prompts, x[SEED] if SEED in x else np.zeros(len(prompts)), given.seed)
        order = np.flatnonzero(fits)[np.argsort(lengths[fits], kind="stable")]
        texts = np.full(len(prompts), None, object)
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            if self._drawn is not None:
                self._drawn.seeds.assign(filled(seeds[chosen], rows))
            full = {name: filled(array[chosen], rows) for name, array in inputs.items()}
            batch = {name: keras.ops.convert_to_tensor(array) for name, array in full.items()}
            made = self._task.generate(
                batch, stop_token_ids=given.stop_token_ids, strip_prompt=given.strip_prompt
            )
            made = {name: array[: len(chosen)] for name, array in made.items()}
            texts[chosen] = [str(text) for text in self._preprocessor.generate_postprocess(made)]
        return {TEXT: texts}

    def reload(self) -> None:
        """Nothing to do: the model's own variables are read."""
