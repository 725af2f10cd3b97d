"""From the arguments of ``predict`` to the columns that it appends, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.learner.forward_model import LAYER
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature
from sparkdl.spark.inference.forward import HANDLE_INVALID, HandleInvalid
from sparkdl.spark.inference.output_columns import NUMBER_TYPES, Form, NumberType, OutputColumn
from sparkdl.values import shown

Names = str | Mapping[str, str] | None
"""A column for the model's only output, or output name -> column; None for no column."""


@dataclass(frozen=True)
class PredictionChoice:
    """Which columns a user wants; the arguments of :func:`sparkdl.predict` of the same names."""

    output_column: str = "prediction"
    outputs: Iterable[str] | Mapping[str, str] | None = None
    probability_column: Names = None
    class_column: Names = None
    layers: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    handle_invalid: str = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.output_column, str) or not self.output_column:
            raise ConfigError(
                "output_column must name the column of predictions",
                expected="a name",
                received=shown(self.output_column),
                hint="outputs=[] leaves the column out, beside layers or a class_column",
            )
        if isinstance(self.outputs, str):
            object.__setattr__(self, "outputs", (self.outputs,))
        elif self.outputs is not None and not isinstance(self.outputs, Iterable):
            raise ConfigError(
                "outputs must say which of the model's outputs become columns",
                expected="names of outputs, output name -> column, or None for all",
                received=shown(self.outputs),
            )
        elif self.outputs is not None and not isinstance(self.outputs, Mapping):
            object.__setattr__(self, "outputs", tuple(self.outputs))
        if self.layers is None:
            object.__setattr__(self, "layers", {})
        if not isinstance(self.layers, Mapping):
            raise ConfigError(
                "layers must say what to call the columns",
                expected="layer name -> column",
                received=shown(self.layers),
                hint="layers={'avg_pool': 'embedding'}",
            )
        known = [name for name in NUMBER_TYPES if name.startswith("float")]
        if self.dtype not in known:
            raise UnknownNameError("dtype of predictions", self.dtype, known)
        if self.handle_invalid not in HANDLE_INVALID:
            raise UnknownNameError("handle_invalid", self.handle_invalid, HANDLE_INVALID)

    @property
    def invalid(self) -> HandleInvalid:
        """``handle_invalid``, which is one of the known names."""
        return cast(HandleInvalid, self.handle_invalid)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked but every output as it is, which RDDs and arrays can have."""
        return self == PredictionChoice(self.output_column)

    def outputs_of(self, model: Signature) -> list[str]:
        """The outputs that must be computed, in the model's order; layers are not among them.

        Raises:
            UnknownNameError: No such output.
            ConfigError: Nothing is asked for, or of which output is not said.
        """
        wanted = [output for output, _, _ in self._asked(model)]
        if not wanted and not self.layers:
            raise ConfigError(
                "predict is asked for no column",
                expected="outputs, layers, probability_column or class_column",
                received="outputs=[] and nothing else",
            )
        return [name for name in model.outputs if name in wanted]

    def columns(self, archive: PredictorArchive, model: Signature) -> list[OutputColumn]:
        """The columns, in the order: outputs, probabilities, classes, layers.

        Args:
            archive: The predictor, made with :meth:`outputs_of` and ``layers``.
            model: The whole model's signature.

        Raises:
            ConfigError: Classes or probabilities of an output that is not a classifier's.
        """
        number = cast(NumberType, self.dtype)
        columns = []
        for output, form, name in self._asked(model):
            if form != "values":
                self._require_scores(archive, output, form)
            dtype = "int32" if form == "class" else number
            columns.append(OutputColumn(name, output, form, dtype))
        layers = self.layers.items()
        return columns + [OutputColumn(str(n), LAYER + k, dtype=number) for k, n in layers]

    def _asked(self, model: Signature) -> list[tuple[str, Form, str]]:
        """Output, form and column name of all columns that are made of outputs."""
        single = len(model.outputs) == 1
        if isinstance(self.outputs, Mapping):
            values = {str(o): str(c) for o, c in self.outputs.items()}
        else:
            chosen = model.outputs if self.outputs is None else self.outputs
            prefix = self.output_column
            values = {str(o): prefix if single else f"{prefix}_{o}" for o in chosen}
        for output in values:
            _require_output(output, model)
        asked: list[tuple[str, Form, str]] = [(o, "values", c) for o, c in values.items()]
        only = next(iter(values)) if len(values) == 1 else None
        only = next(iter(model.outputs)) if single else only
        forms: list[tuple[Form, str, Names]] = [
            ("probability", "probability_column", self.probability_column),
            ("class", "class_column", self.class_column),
        ]
        for form, argument, names in forms:
            by_output = _by_output(names, argument, only, model)
            asked += [(output, form, column) for output, column in by_output.items()]
        return asked

    def _require_scores(self, archive: PredictorArchive, output: str, form: Form) -> None:
        scores = archive.scores.get(output)
        argument = f"{form}_column"
        if scores is None:
            raise ConfigError(
                f"{argument}: output {output!r} is not known to be a classifier's",
                expected="a cross-entropy as the loss that the model was compiled with, or a last "
                "layer with activation softmax or sigmoid",
                received="neither",
                hint="model.compile(loss='sparse_categorical_crossentropy'), or "
                "SparseCategoricalCrossentropy(from_logits=True) for a model that gives logits",
            )
        if form == "class" and scores.num_classes is None:
            raise ConfigError(
                f"{argument}: a row may be of several classes of output {output!r}, or of none",
                expected="softmax over the classes, or one unit with a sigmoid",
                received=f"{scores.units} units with a probability each",
                hint="probability_column has the probability of each; compare it with a threshold",
            )


def _by_output(names: Names, argument: str, only: str | None, model: Signature) -> dict[str, str]:
    if names is None:
        return {}
    if isinstance(names, Mapping):
        for output in names:
            _require_output(str(output), model)
        return {str(output): str(column) for output, column in names.items()}
    if not isinstance(names, str):
        raise ConfigError(
            f"{argument} must name a column", expected="a name, or output name -> column",
            received=shown(names),
        )  # fmt: skip
    if only is None:
        raise ConfigError(
            f"{argument}: the model has {len(model.outputs)} outputs, and one column is named",
            expected=f"output name -> column, for outputs among {sorted(model.outputs)}",
            received=repr(names),
            hint=f"{argument}={{{next(iter(model.outputs))!r}: {names!r}}}",
        )
    return {only: names}


def _require_output(output: str, model: Signature) -> None:
    if output not in model.outputs:
        raise UnknownNameError("output of the model", output, model.outputs)
