"""An argument that a call does not take: the list of those that it takes, no bare TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import sparkdl
from sparkdl import tune
from sparkdl.compat.distkeras import evaluators, predictors, trainers, transformers
from sparkdl.errors import ConfigError, UnknownArgumentError
from sparkdl.settings.call_arguments import lists_its_arguments, require_call
from sparkdl.spark.spark_model import SparkModel
from sparkdl.tune import searchers

pytestmark = pytest.mark.keras


@pytest.mark.parametrize(
    ("function", "arguments", "hint"),
    [
        (SparkModel.predict, {"handleInvalid": "skip"}, "did you mean 'handle_invalid'?"),
        (SparkModel.predict, {"num_workers": 2}, "another call: SparkModel(model, num_workers"),
        (SparkModel.predict, {"verbose": 0}, "another call: fit(data, verbose=...)"),
        (SparkModel.evaluate, {"return_dict": True}, ""),
        (SparkModel.evaluate, {"epochs": 3}, "another call: fit(data, epochs=...)"),
        (SparkModel.save, {"overwrit": True}, "did you mean 'overwrite'?"),
        (SparkModel.export, {"format": "onnx"}, "did you mean 'file_format'?"),
        (SparkModel.fit_stream, {"checkpoint": "c"}, "did you mean 'checkpoint_dir'?"),
        (sparkdl.predict, {"batchsize": 3}, "did you mean 'batch_size'?"),
        (sparkdl.predict_udf, {"return_": "class"}, "did you mean 'returns'?"),
        (sparkdl.run, {"num_worker": 1}, "did you mean 'num_workers'?"),
        (sparkdl.run, {"np": 1}, ""),
        (sparkdl.inference, {"batchsize": 1}, "did you mean 'batch_size'?"),
        (sparkdl.doctor, {"timeout": 1}, "did you mean 'timeout_s'?"),
        (sparkdl.read_tfrecords, {"infer_row": 1}, "did you mean 'infer_rows'?"),
        (sparkdl.write_tfrecords, {"partitionby": "day"}, "did you mean 'partition_by'?"),
        (tune.Grid, {"epochs": 1}, "did you mean 'max_epochs'?"),
        (tune.Asha, {"trials": 1}, "did you mean 'max_trials'?"),
        (tune.OptunaSampler, {"study_name": 1}, ""),
        (sparkdl.HorovodRunner, {"num_proc": 2}, ""),
        (sparkdl.DeepImageFeaturizer, {"modelname": "Xception"}, "did you mean 'modelName'?"),
        (sparkdl.DeepImagePredictor, {"topk": 3}, "did you mean 'topK'?"),
        (sparkdl.KerasImageFileTransformer, {"loader": print}, ""),
        (sparkdl.KerasImageFileEstimator, {"optimizer": "sgd"}, ""),
        (sparkdl.registerKerasImageUDF, {"name": "f"}, ""),
        (trainers.ADAG, {"num_epochs": 3}, "did you mean 'num_epoch'?"),
        (trainers.SingleTrainer, {"feature_col": "x"}, "did you mean 'features_col'?"),
        (transformers.OneHotTransformer, {"output_dims": 3}, "did you mean 'output_dim'?"),
        (predictors.ModelPredictor, {"feature_col": "x"}, "did you mean 'features_col'?"),
        (evaluators.AccuracyEvaluator, {"label": "y"}, "did you mean 'label_col'?"),
    ],
)
def test_an_argument_that_a_call_does_not_take(
    function: Callable[..., Any], arguments: dict[str, Any], hint: str
) -> None:
    is_method = next(iter(inspect.signature(function).parameters)) == "self"
    given = (SparkModel.__new__(SparkModel),) if is_method else ()
    with pytest.raises(UnknownArgumentError) as caught:
        function(*given, **arguments)
    (name,) = arguments
    assert repr(name) in caught.value.what
    known = [n for n in inspect.signature(function).parameters if n != "self"]
    assert caught.value.expected == "one of " + ", ".join(map(repr, known))
    assert hint in caught.value.hint
    assert issubclass(UnknownArgumentError, TypeError)


@pytest.mark.parametrize(
    "cls",
    [
        *(getattr(trainers, name) for name in trainers.__all__ if name[0].isupper()),
        *(getattr(searchers, name) for name in tune.__all__ if hasattr(searchers, name)),
        *(c for c in vars(transformers).values() if inspect.isclass(c)
          and issubclass(c, transformers.Transformer) and c is not transformers.Transformer),
    ],
    ids=lambda cls: cls.__name__,
)  # fmt: skip
def test_every_trainer_searcher_and_transformer_lists_its_arguments(cls: Any) -> None:
    if cls is tune.Searcher:
        return
    with pytest.raises(UnknownArgumentError, match="no_such_argument"):
        cls(no_such_argument=1)


def test_what_a_wrapped_function_keeps() -> None:
    @lists_its_arguments
    def double(number: int, *, times: int = 1) -> int:
        """Twice as much."""
        return 2 * number * times

    assert double(2, times=3) == 12
    assert double.__doc__ == "Twice as much."
    assert list(inspect.signature(double).parameters) == ["number", "times"]
    with pytest.raises(TypeError, match="missing"):
        double()  # type: ignore[call-arg]


def test_a_function_that_cannot_be_called_with_its_arguments() -> None:
    def train(feed: Any, rate: float, *, steps: int = 1) -> None: ...

    require_call("the function", train, ("feed", 0.1), {"steps": 2})
    require_call("the function", print, (1, 2, 3), {})
    require_call("the function", dict, (), {"a": 1})  # a signature that Python does not know
    for args, kwargs, words in [
        (("feed",), {}, "missing a required argument: 'rate'"),
        (("feed", 0.1, 0.2), {}, "too many positional arguments"),
        (("feed", 0.1), {"step": 2}, "unexpected keyword argument 'step'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            require_call("the function", train, args, kwargs)
        assert words in caught.value.received
        assert caught.value.expected.startswith("train(feed")


@pytest.mark.parametrize(
    ("function", "names"),
    [(sparkdl.HorovodRunner.__init__, ["self"]), (SparkModel.evaluate, ["self", "data"]),
     (SparkModel.fit, ["self", "data", "epochs"]), (sparkdl.predict, ["model", "data"])],
)  # fmt: skip
def test_a_checked_function_shows_its_own_arguments(function: Any, names: list[str]) -> None:
    """Also to ``getfullargspec``, which looks at no ``__wrapped__``."""
    found = inspect.getfullargspec(function)
    assert found.varargs is None
    assert found.args[: len(names)] == names


def test_horovod_runners_arguments_are_databricks() -> None:
    found = inspect.getfullargspec(sparkdl.HorovodRunner.__init__)
    assert (found.args, found.kwonlyargs) == (["self"], ["np", "driver_log_verbosity"])
