"""Params of the stages: names, getters, setters, defaults, what bad values get. No Spark job."""

from __future__ import annotations

import inspect
import json
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml.classification import ProbabilisticClassifier
from pyspark.ml.param import Param
from pyspark.ml.regression import Regressor
from stage_cases import builder, quick

from sparkdl.config import FitConfig
from sparkdl.errors import (
    ConfigError,
    ModelError,
    NoParamError,
    ParamTypeError,
    UnknownArgumentError,
)
from sparkdl.ml import (
    KerasClassificationModel,
    KerasClassifier,
    KerasEstimator,
    KerasModel,
    KerasRegressionModel,
    KerasRegressor,
    KerasTransformer,
)

STAGES = [
    KerasClassificationModel, KerasClassifier, KerasEstimator, KerasModel, KerasRegressionModel,
    KerasRegressor, KerasTransformer,
]  # fmt: skip


@pytest.mark.parametrize("cls", STAGES, ids=lambda cls: cls.__name__)
def test_every_param_has_a_getter_a_setter_and_an_explanation(cls: Any) -> None:
    stage = cls()  # each can be made without arguments
    assert f"{cls.__module__}.{cls.__name__}" == f"sparkdl.ml.{cls.__name__}"
    explained = stage.explainParams()
    for param in stage.params:
        title = param.name[0].upper() + param.name[1:]
        assert callable(getattr(stage, f"set{title}")), param.name
        if stage.isDefined(param):
            assert getattr(stage, f"get{title}")() == stage.getOrDefault(param)
        assert f"{param.name}: " in explained
        assert isinstance(getattr(cls, param.name), Param)
    arguments = set(inspect.signature(cls).parameters)
    assert arguments == {p.name for p in stage.params} | set(cls.PARTS)


def test_defaults_are_those_of_sparkmodel() -> None:
    classifier = KerasClassifier()
    config = FitConfig()
    assert classifier.getMode() == config.mode
    assert classifier.getBatchSize() == config.batch_size
    assert classifier.getNumWorkers() is None
    assert classifier.getSeed() == 0  # Spark's own is another number in each process
    assert not classifier.isSet("mode")


def test_setters_return_the_stage_and_copies_are_independent() -> None:
    classifier = KerasClassifier(featuresCol="x", epochs=3)
    assert classifier.setEpochs(4).setMode("allreduce").setLabelCol("y") is classifier
    copied = classifier.copy({classifier.epochs: 9})
    assert (copied.getEpochs(), classifier.getEpochs()) == (9, 4)
    assert copied.uid == classifier.uid
    classifier.setEpochs(None)
    assert classifier.getEpochs() == 1
    assert isinstance(classifier, ProbabilisticClassifier)
    assert isinstance(KerasRegressor(), Regressor)


def test_a_list_of_features_is_several_columns() -> None:
    classifier = KerasClassifier(featuresCol=["a", "b"])
    assert classifier.getFeaturesCols() == ["a", "b"]
    assert classifier.features == ["a", "b"]
    assert classifier.setFeaturesCol("one").features == "one"
    estimator = KerasEstimator(featuresCol={"wide": ["a", "b"], "deep": "c"}, labelCol={"p": "q"})
    assert estimator.features == {"wide": ["a", "b"], "deep": "c"}
    assert estimator.labels == {"p": "q"}


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"batchSize": "32"}, ParamTypeError, "a whole number >= 1"),
        ({"batchSize": 0}, ParamTypeError, "a whole number >= 1"),
        ({"epochs": True}, ParamTypeError, "a whole number >= 1"),
        ({"repartition": 1}, ParamTypeError, "True or False"),
        ({"learningRate": -1}, ParamTypeError, "a number above 0"),
        ({"weightCol": 3}, ParamTypeError, "weight column name"),
        ({"thresholds": "high"}, ParamTypeError, "listfloat"),
        ({"builderArgs": {"layer": keras}}, ParamTypeError, "JSON"),
        ({"featuresCol": [1, 2]}, ParamTypeError, "names of columns"),
        ({"mode": "async"}, ConfigError, "did you mean 'asynchronous'"),
        ({"featureCol": "x"}, UnknownArgumentError, "did you mean 'featuresCol'"),
        ({"classWeight": {"cat": 1.0}}, ParamTypeError, "class number -> weight"),
        ({"classWeight": {0: -1.0}}, ParamTypeError, "no weight below 0"),
        ({"stepsPerEpoch": 0}, ParamTypeError, "a whole number >= 1"),
        ({"resources": {"cpus": 0}}, ConfigError, "amount above 0"),
        ({"pad": "zero"}, ConfigError, "a number, or input name -> number"),
        ({"serverBind": "::"}, UnknownArgumentError, "network=Network(server_bind=...)"),
        ({"network": {"port": 5}}, ConfigError, "network=Network(port=5)"),
        ({"maxRestarts": -1}, ParamTypeError, "a whole number >= 0"),
        ({"sinks": []}, UnknownArgumentError, "callbacks"),
        ({"timeline": "t.json"}, UnknownArgumentError, "fit(timeline=...)"),
        ({"profile": True}, UnknownArgumentError, "fit(profile=True)"),
        ({"initialEpoch": 2}, UnknownArgumentError, "checkpointDir"),
        ({"callbacks": keras.callbacks.EarlyStopping}, ConfigError, "objects"),
        ({"model": "model.keras"}, ConfigError, "a keras.Model"),
        ({"modelBuilder": 3}, ConfigError, "a function that returns"),
    ],
)
def test_bad_arguments_say_what_was_expected(arguments: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=r"(?s)expected: .*received: ") as caught:
        KerasClassifier(**arguments)
    assert text in str(caught.value)
    assert isinstance(caught.value, (TypeError, ValueError))


def test_a_model_is_taken_as_it_is_and_never_shared() -> None:
    model = builder()
    classifier = KerasClassifier(model=model)
    model.layers[0].set_weights([w * 0 for w in model.layers[0].get_weights()])
    first = classifier._parts.make_model(None, None)
    second = classifier.copy()._parts.make_model(None, 0.5)
    assert first is not second
    assert first.layers[0].get_weights()[0].any()
    assert float(second.optimizer.learning_rate) == 0.5
    assert float(first.optimizer.learning_rate) == pytest.approx(0.02)


def test_copies_have_callbacks_of_their_own() -> None:
    stop = keras.callbacks.EarlyStopping("loss", patience=3)
    stop.set_model(builder())
    classifier = KerasClassifier(callbacks=[stop])
    assert classifier._parts.callbacks == (stop,)
    copied = classifier.copy()._parts.callbacks[0]
    assert copied is not stop
    assert (copied.patience, copied.model) == (3, None)


def test_optimizers_losses_and_metrics_apart_from_the_model() -> None:
    def bare() -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])

    def my_loss(y: Any, p: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - p))

    adam = keras.optimizers.Adam(0.25)
    classifier = KerasClassifier(
        modelBuilder=bare, optimizer=adam, metrics=["mae"],
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )  # fmt: skip
    first = classifier._parts.make_model(None, None)
    second = classifier._parts.make_model(None, None)
    assert first.optimizer is not second.optimizer
    assert float(first.optimizer.learning_rate) == 0.25
    assert first.loss.get_config()["from_logits"] is True
    assert not [v for v in classifier._parts.compiled.values() if isinstance(v, bytes)]
    own = KerasRegressor(modelBuilder=bare, loss=my_loss)._parts
    assert isinstance(own.compiled["loss"], bytes)  # pickled: Keras alone cannot make it
    assert own.make_model(None, None).loss.__name__ == "my_loss"


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({}, ConfigError, "has no model"),
        ({"model": builder, "modelBuilder": builder}, ConfigError, "one of the two"),
        ({"model": builder, "builderArgs": {"units": 3}}, ConfigError, "no effect without"),
        ({"modelBuilder": builder, "builderArgs": {"unit": 3}}, ConfigError, "does not take"),
        ({"modelBuilder": lambda: 3}, ModelError, "no Keras model"),
        ({"model": builder, "metrics": ["mae"]}, ConfigError, "together with a loss"),
        ({"modelBuilder": lambda: keras.Sequential([keras.Input((1,))])}, ModelError, "compile"),
    ],
)
def test_estimators_without_a_usable_model(arguments: Any, kind: Any, text: str) -> None:
    made = {k: v() if k == "model" else v for k, v in arguments.items()}
    with pytest.raises(kind, match=r"(?s)expected: .*received: ") as caught:
        KerasClassifier(**made)._parts.make_model(made.get("builderArgs"), None)
    assert text in str(caught.value)


def test_several_fits_need_several_checkpoint_folders() -> None:
    classifier = quick(checkpointDir="/nowhere")
    grid: list[Any] = [{classifier.epochs: 1}, {classifier.epochs: 2}]
    with pytest.raises(ConfigError, match="one folder"):
        classifier.fitMultiple(None, grid)
    apart = [{classifier.checkpointDir: "/a"}, {classifier.checkpointDir: "/b"}]
    assert classifier.fitMultiple(None, apart)


@pytest.mark.parametrize("together", [1, 2])
def test_several_fits_go_on_from_no_checkpoint(together: int, tmp_path: Any) -> None:
    classifier = quick(resume=True)
    grid: list[Any] = [{classifier.checkpointDir: f"{tmp_path}/{i}"} for i in range(together)]
    with pytest.raises(ConfigError, match=r"(?s)would go on.*expected: resume=False.*hint: "):
        classifier.fitMultiple(None, grid)
    assert classifier.fitMultiple(None, [{classifier.resume: False, **m} for m in grid])


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("model", "setModel"), ("optimizer", "setOptimizer"), ("loss", "setLoss"),
        ("network", "setNetwork"), ("callbacks", "setCallbacks"),
    ],
)  # fmt: skip
def test_a_grid_varies_params_only(name: str, method: str) -> None:
    from pyspark.ml.tuning import ParamGridBuilder

    classifier = quick()
    with pytest.raises(NoParamError, match=r"(?s)no Param.*expected: .*epochs.*received: .*hint: a "
                       rf"grid over builderArgs.*learningRate.*{method}"):  # fmt: skip
        ParamGridBuilder().addGrid(getattr(classifier, name), [None, 3]).build()
    assert not hasattr(classifier, name)
    with pytest.raises(AttributeError, match="no attribute 'networks'"):
        classifier.networks  # noqa: B018
    with pytest.raises(ParamTypeError, match=r"(?s)no Param.*expected: Params.*received: str"):
        classifier.fit(None, {name: 3})


def test_class_weights_and_the_like_are_params() -> None:
    classifier = quick(
        classWeight={0: 1, np.int64(2): np.float32(3)}, stepsPerEpoch=4, validationSteps=2,
        resources={"cpus": np.int64(2)}, pad={"x": np.float32(0)},
    )  # fmt: skip
    assert classifier.getClassWeight() == {0: 1.0, 2: 3.0}
    as_in_a_file = json.loads(json.dumps({p.name: v for p, v in classifier._paramMap.items()}))
    assert KerasClassifier(**as_in_a_file).getClassWeight() == {0: 1.0, 2: 3.0}
    assert KerasClassifier(**as_in_a_file).getResources() == {"cpus": 2}
    assert KerasClassificationModel(pad=0).getPad() == 0


def test_a_stage_without_a_model_says_so() -> None:
    with pytest.raises(ModelError, match="has no model"):
        KerasClassificationModel().numClasses  # noqa: B018
    with pytest.raises(ModelError, match="has no model"):
        KerasTransformer().model  # noqa: B018
