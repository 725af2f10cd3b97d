"""``generate``: what a causal language model writes on from the prompt of every row."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from sparkdl.config import UseGpu
from sparkdl.errors import ConfigError, ModelError
from sparkdl.learner.prediction.generation import PROMPT, SEED, TEXT, draws_by_row
from sparkdl.learner.prediction.model_source import KerasSource
from sparkdl.learner.prediction.predictor_archive import Generation, PredictorArchive
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.process import payload
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.values import require_flag, require_int, require_objects, shown
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import PredictionChoice, predict_columns

_CALLS = 16
"""Calls of the model whose prompts are sorted together."""


@lists_its_arguments
def generate(
    task: Any,
    data: Any,
    prompt: str = "text",
    max_length: int | None = None,
    output_column: str = "generated",
    *,
    batch_size: int = 32,
    stop_token_ids: Iterable[int] | Literal["auto"] | None = "auto",
    strip_prompt: bool = False,
    seed: int | None = None,
    seed_column: str | None = None,
    handle_invalid: str = "error",
    custom_objects: dict[str, Any] | None = None,
    use_gpu: UseGpu = "auto",
) -> Any:
    """The frame with the text that ``task.generate`` makes of each row's prompt.

    ::

        task = keras_hub.models.CausalLM.from_preset('gpt2_base_en')
        task.compile(sampler='top_p')
        answered = sparkdl.generate(task, df, prompt='question', max_length=128, seed=1)

    The task's sampler draws. A row's text depends on the seed, its prompt, and its number in
    ``seed_column``, not on partitions, batches or other rows (rounding apart).

    Args:
        task: A causal language model of KerasHub with its preprocessor.
        data: A DataFrame of Spark, also a streaming one, of pandas or polars, or an Arrow table;
            or the path of Parquet or TFRecord files.
        prompt: The column of strings.
        max_length: Tokens of a prompt and its text together; None: the preprocessor's
            ``sequence_length``.
        output_column: Name of the column of texts.
        batch_size: Rows of each call of the model.
        stop_token_ids: Tokens that end a text: ``'auto'`` for the tokenizer's end tokens, None to
            write up to ``max_length``, or the tokens' numbers.
        strip_prompt: Whether the text is without the prompt.
        seed: Of a sampler that draws (``'random'``, ``'top_k'``, ``'top_p'``). None: the sampler's
            own seed, or one that is drawn now.
        seed_column: A column of integers that make rows of equal prompts draw differently.
        handle_invalid: A row without a prompt, or whose prompt has ``max_length`` tokens already:
            ``'error'``, ``'skip'`` (left out), or ``'keep'`` (its text is null).
        custom_objects: Name -> class or function that the task uses.
        use_gpu: See :class:`sparkdl.SparkModel`.

    Returns:
        A DataFrame of Spark: the same rows in the same order with all their columns, and the texts
        (lazy: Spark computes them when they are asked for).

    Raises:
        ModelError: No causal language model, or one that cannot be sent.
        ConfigError: ``max_length`` does not fit the model, or a sampler of another kind is to have
            a seed.
        DataError: A column is missing, not of strings, or there already.
    """
    choice = PredictionChoice(output_column, handle_invalid=handle_invalid)
    limit = _require_causal_model(task)
    given = task.preprocessor.sequence_length if max_length is None else max_length
    max_length = require_int("max_length", given, 2, limit)
    batch_size = require_int("batch_size", batch_size, 1)
    sampler, seed = task.sampler, _seed_of(task.sampler, seed, seed_column)
    generation = Generation(
        max_length, batch_size, _stop_tokens(task, stop_token_ids),
        require_flag("strip_prompt", strip_prompt), seed, choice.invalid != "error",
        payload.dump((type(sampler), sampler.get_config())),
        bool(task.jit_compile), bool(task.run_eagerly),
    )  # fmt: skip
    form = form_of(data)
    if not form.has_columns:
        raise ConfigError(
            "generate writes into a column", expected="a DataFrame, an Arrow table or a path",
            received=f"{type(data).__module__}.{type(data).__qualname__}",
            hint="spark.createDataFrame([(text,) for text in texts], 'text string')",
        )  # fmt: skip
    archive = _archive(task, require_objects(custom_objects), generation, seed_column is not None)
    features = {PROMPT: prompt} | ({} if seed_column is None else {SEED: seed_column})
    written = predict_columns(
        form.frame(), archive, Columns(features), [OutputColumn(output_column, TEXT)],
        batch_size=batch_size * _CALLS, use_gpu=use_gpu, handle_invalid=choice.invalid,
    )  # fmt: skip
    if choice.invalid == "skip":
        return written.filter(written[f"`{output_column}`"].isNotNull())
    return written


def _archive(
    task: Any, objects: dict[str, Any], generation: Generation, seeded: bool
) -> PredictorArchive:
    specs = [TensorSpec(PROMPT, (), "string"), *[TensorSpec(SEED, (), "int64")] * seeded]
    text = {TEXT: TensorSpec(TEXT, (), "string")}
    made = KerasSource(task, objects).encode([])
    told = repr(generation).encode()
    key = hashlib.sha256(made.archive.key.encode() + told).hexdigest()
    return PredictorArchive(
        replace(made.archive, key=key), "causal_lm",
        hashlib.sha256(made.digest.encode() + told).hexdigest(),
        Signature({spec.name: spec for spec in specs}, text, {TEXT: "own"}, True),
        generation=generation,
    )  # fmt: skip


def _require_causal_model(task: Any) -> int | None:
    """The most tokens that the model has places for; None where it does not say."""
    received = f"{type(task).__module__}.{type(task).__qualname__}"
    with contextlib.suppress(ImportError):
        from keras_hub.models import CausalLM, Seq2SeqLM

        if isinstance(task, CausalLM) and not isinstance(task, Seq2SeqLM):
            if task.preprocessor is not None:
                limit = getattr(task.backbone, "max_sequence_length", None)
                return limit if isinstance(limit, int) else None
            received += " without a preprocessor"
    raise ModelError(
        "this model cannot write texts on",
        expected="a keras_hub.models.CausalLM with its preprocessor", received=received,
        hint="keras_hub.models.CausalLM.from_preset(...); predict gives the outputs of any model",
    )  # fmt: skip


def _stop_tokens(task: Any, given: Any) -> tuple[int, ...] | None:
    if given == "auto":
        tokenizer = task.preprocessor.tokenizer
        names = ("end_token_id", "end_token2_id")
        return tuple(getattr(tokenizer, name) for name in names if hasattr(tokenizer, name))
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(
            "stop_token_ids must say which tokens end a text",
            expected="'auto', None, or numbers of tokens", received=shown(given),
        )  # fmt: skip
    return tuple(require_int("stop_token_ids", token, 0) for token in given)


def _seed_of(sampler: Any, seed: int | None, column: str | None) -> int:
    if seed is not None:
        seed = require_int("seed", seed, 0)
    if not draws_by_row(sampler):
        if sampler.variables and (seed is not None or column is not None):
            raise ConfigError(
                "the draws of this sampler cannot be repeated row by row",
                expected="the sampler 'random', 'top_k' or 'top_p', or one that does not draw",
                received=f"{type(sampler).__qualname__} and a seed",
                hint="without seed and seed_column it draws as it likes",
            )
        return seed or 0
    own = sampler.seed if seed is None else seed
    return secrets.randbits(62) if own is None else int(own)
