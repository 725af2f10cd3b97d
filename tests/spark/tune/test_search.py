"""Hyper-parameter search on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from sparkdl import tune
from sparkdl.errors import ConfigError
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.ml import KerasClassifier
from sparkdl.progress.events import Event, SearchBegan, SearchEnded, TrialEpochEnded
from sparkdl.tracking.notebook import NotebookTrials
from sparkdl.tracking.sinks import add_standing, remove_standing
from sparkdl.tune import spark_search as search_module
from sparkdl.tune.spark_search import StageStudy


def build(trial: tune.Trial) -> Any:
    rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
    units = trial.suggest_int("units", 4, 32, log=True)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def test_asha_finds_a_good_model(digits_df: Any, digits: Any, capsys: Any) -> None:
    searcher = tune.Asha(max_trials=6, max_epochs=9, divisor=3)
    events, standing = list[Event](), list[Event]()

    def stand() -> Any:
        return standing.append

    add_standing(stand)
    with tune.search(
        build, digits_df, metric="val_accuracy", validation_split=0.2, searcher=searcher,
        max_concurrent=2, verbose=1, seed=3, sinks=events.append,
    ) as study:  # fmt: skip
        remove_standing(stand)
        assert standing == events  # nothing of the trials' fits
        assert isinstance(events[0], SearchBegan)
        assert events[-1] == SearchEnded(study.best_trial.number, study.best_value)
        epochs = [(e.trial, e.epoch) for e in events if isinstance(e, TrialEpochEnded)]
        assert sorted(epochs) == [(r.number, e) for r in study.records for e in range(r.epochs)]
        x, y = digits
        assert len(study.records) == 6
        reached = sorted(r.epochs for r in study.records)
        assert reached[-1] == 9
        assert reached[:3] == [3, 3, 3]
        assert study.best_value == max(r.metrics[r.epochs]["val_accuracy"] for r in study.records)
        assert study.best_value > 0.8
        model = study.best_model
        accuracy = float(np.mean(model.predict(x, verbose=0).argmax(1) == y))
        assert accuracy == pytest.approx(study.best_value, abs=0.06)
        assert int(model.optimizer.iterations) > 9 * 20  # it has trained nine epochs, not three
        assert model.layers[0].units == study.best_params["units"]
        members = study.best_models(2)
        mean = (members[0].predict(x[:50], verbose=0) + members[1].predict(x[:50], verbose=0)) / 2
        together = study.ensemble(2)
        np.testing.assert_allclose(together.predict(x[:50], verbose=0), mean, atol=1e-6)
        assert together.evaluate(x, y, verbose=0)[1] > 0.8
        hard = study.ensemble(2, "hard").predict(x[:50], verbose=0)
        assert set(np.unique(hard)) <= {0.0, 0.5, 1.0}
        table = study.trials
        assert table["val_accuracy"].iloc[0] == study.best_value
        assert {"param_rate", "param_units", "epochs", "state"} <= set(table.columns)
        assert len(study.plot().lines) == 6
        assert (Path(study._journal.folder) / "in-use").exists()  # a lock: of no killed process
        import matplotlib.pyplot as plt

        plt.close("all")
    assert not Path(study._journal.folder).exists()
    assert "val_accuracy" in capsys.readouterr().out


def network(units: int = 8) -> Any:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def params_of(trial: tune.Trial) -> dict[str, Any]:
    return {
        "builderArgs": {"units": trial.suggest_categorical("units", [4, 32])},
        "learningRate": trial.suggest_float("rate", 1e-3, 1e-1, log=True),
        "batchSize": 64,
    }


def test_an_estimator_is_searched_and_its_best_stage_transforms(digits_df: Any) -> None:
    from pyspark.ml.functions import array_to_vector

    rows = digits_df.selectExpr("cast(features as array<double>) as f", "cast(label as double) l")
    frame = rows.select(array_to_vector("f").alias("pixels"), rows.l.alias("digit")).cache()
    classifier = KerasClassifier(
        modelBuilder=network, featuresCol="pixels", labelCol="digit", validationSplit=0.2
    )
    found = tune.search(
        classifier, frame, params=params_of, metric="val_accuracy", slots_per_trial=1,
        searcher=tune.Asha(4, 6, 3), sampler=tune.OptunaSampler(), max_concurrent=2,
    )  # fmt: skip
    with found as study:
        assert isinstance(study, StageStudy)
        stage = study.best_stage
        assert stage.getOrDefault("featuresCol") == "pixels"
        scored = stage.transform(frame)
        accuracy = scored.where("prediction = digit").count() / frame.count()
        assert accuracy == pytest.approx(study.best_value, abs=0.06)
        assert accuracy > 0.8
        model = study.best_model
        assert model.layers[0].units == study.best_params["units"]
        estimator = study.best_estimator
        assert estimator.getOrDefault("batchSize") == 64
        assert estimator.getOrDefault("builderArgs") == {"units": study.best_params["units"]}
    for wrong, named in (
        ({"searcher": tune.Single(1)}, "params=None"),
        ({"params": params_of, "features": "pixels"}, "features"),
        ({"params": lambda trial: {"epochs": 3}, "searcher": tune.Single(1)}, "epochs"),
    ):
        with pytest.raises(ConfigError, match=named):
            tune.search(classifier, frame, metric="loss", **wrong)
    with pytest.raises(ConfigError, match="only with an estimator"):
        tune.search(build, frame, params=params_of)
    with pytest.raises(ConfigError, match="the searcher decides epochs"):
        tune.search(KerasClassifier(modelBuilder=network, epochs=2), frame, params=params_of)


def rate_of(model: Any) -> float:
    return float(np.asarray(model.optimizer.learning_rate))


def test_a_copy_trains_with_the_learning_rate_of_its_own_values(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    """Before, it was its parent's, which Keras saves with the optimizer's state."""
    x, y = (part[:128] for part in digits)

    def rates(trial: tune.Trial) -> Any:
        model = network()
        rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy")
        return model

    searcher = tune.PopulationBasedTraining(2, 4, 2, 0.5, resample_probability=0.0)
    study = tune.search(
        rates, (x, y), metric="loss", searcher=searcher, max_concurrent=1, verbose=0,
        settings={"batch_size": 64}, checkpoint_dir=str(tmp_path),
    )  # fmt: skip
    copy = study.records[2]
    assert sorted(copy.metrics) == [4]
    parent = next(r for r in study.records if r.number != 2 and 4 in r.metrics)
    assert copy.params["rate"] != parent.params["rate"]
    for record in study.records:
        model = study._load(record)
        assert rate_of(model) == pytest.approx(record.params["rate"], rel=1e-6)
        assert int(model.optimizer.iterations) == 2 * record.epochs  # the copy's go on from two
    assert rate_of(study.best_model) == pytest.approx(study.best_params["rate"], rel=1e-6)


def test_a_metric_that_is_no_number_is_scored_worst_and_replaced(
    spark: Any, digits: Any, capsys: Any
) -> None:
    """Before, the search ended with an error: the first trial was compared with no other."""
    x, y = (part[:64] for part in digits)

    def sometimes(trial: tune.Trial) -> Any:
        factor = float("nan") if trial.number == 0 else 1.0

        def share(y_true: Any, y_pred: Any) -> Any:
            return keras.ops.max(y_pred, axis=-1) * factor

        model = network()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=[share])
        return model

    with pytest.warns(RuntimeWarning, match="trial 0 failed: share is NaN"):
        study = tune.search(
            sometimes, (x, y), metric="share", mode="max", searcher=tune.RandomSearch(1, 1),
            max_concurrent=1,
        )  # fmt: skip
    with study:
        assert [r.state for r in study.records] == ["failed", "waiting"]
        assert study.best_trial.number == 1
    assert "trial 1: epoch 1" in capsys.readouterr().out


class Chain(tune.Searcher):
    """One trial in three segments."""

    max_epochs = 4

    def __init__(self) -> None:
        self._left = [tune.Segment(0, 0, 1), tune.Segment(0, 1, 2), tune.Segment(0, 2, 4)]

    def ask(self) -> tune.Segment | None:
        return self._left.pop(0) if self._left else None

    def tell(self, trial: int, epochs: int, score: float) -> None:
        pass


class Slow(keras.callbacks.Callback):
    """Later epochs take long."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch >= 3:
            time.sleep(0.5)


class Long(Chain):
    """A second segment that does not end within the test."""

    max_epochs = 2000

    def __init__(self) -> None:
        self._left = [tune.Segment(0, 0, 2), tune.Segment(0, 2, 2000)]


def test_a_search_ends_when_its_time_is_over(
    spark: Any, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is that of the score, and not of an epoch after it; the search can go on."""
    x, y = (part[:64] for part in digits)
    folder, real, until = Checkpoints(str(tmp_path / "trial-00000")), time.monotonic, 4

    class Clock:
        """An hour later as soon as the second segment has a checkpoint."""

        @staticmethod
        def monotonic() -> float:
            return real() + 3600.0 * (folder.newest() >= until)

    monkeypatch.setattr("sparkdl.tune.runner.time", Clock)

    def search(resume: bool) -> Any:
        return tune.search(
            build, (x, y), metric="loss", searcher=Long(), timeout_s=1800.0, verbose=0,
            max_concurrent=1, settings={"batch_size": 64}, checkpoint_dir=str(tmp_path),
            resume=resume, callbacks=lambda: [Slow()],
        )  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no restart of what was cancelled
        study = search(False)
    record = study.best_trial
    assert (record.state, record.epochs, sorted(record.metrics)) == ("stopped", 2, [2])
    assert folder.newest() >= 4
    model = study.best_model
    assert int(model.optimizer.iterations) == 2  # a batch an epoch
    until = folder.newest() + 2
    again = search(True)
    assert again.best_trial.metrics == record.metrics
    assert folder.newest() >= until


def test_a_trial_stands_for_its_best_epoch_if_asked(spark: Any, digits: Any) -> None:
    x, y = (part[:256] for part in digits)

    def worse(trial: tune.Trial) -> Any:
        """The rate is good in the first epochs, and much too large in later ones."""
        model = network(32)
        steps = keras.optimizers.schedules.PiecewiseConstantDecay([5], [0.1, 100.0])
        loss = "sparse_categorical_crossentropy"
        model.compile(keras.optimizers.SGD(steps), loss, metrics=["accuracy"])
        return model

    study = tune.search(
        worse, (x, y), validation_data=(x, y), metric="val_loss", searcher=tune.Single(6),
        max_concurrent=1, verbose=0, settings={"batch_size": 128}, keep_epoch="best",
    )  # fmt: skip
    with study:
        record = study.best_trial
        assert (record.epochs, record.kept_epoch) == (6, 3)
        assert study.best_value < record.metrics[6]["val_loss"]
        found = study.best_model.evaluate(x, y, verbose=0)[0]
        assert found == pytest.approx(study.best_value, rel=1e-4)
    with pytest.raises(ConfigError, match="keep_epoch"):
        tune.search(build, (x, y), keep_epoch="first")


def test_a_chain_of_segments_is_plain_keras(spark: Any, digits: Any) -> None:
    """With one slot per trial: also the optimizer goes on where it was."""
    x, y = (part[:256] for part in digits)
    with tune.search(
        build, (x, y), metric="loss", searcher=Chain(), max_concurrent=1, verbose=0,
        settings={"batch_size": 256},  # all rows: their order is Spark's
    ) as study:  # fmt: skip
        assert sorted(study.best_trial.metrics) == [1, 2, 4]
        found = study.best_model.get_weights()
    keras.utils.set_random_seed(0)
    model = build(tune.Trial(0, given=study.best_params))
    history = model.fit(x, y, epochs=4, batch_size=256, verbose=0)
    for ours, theirs in zip(found, model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert study.best_value == pytest.approx(history.history["loss"][-1], rel=1e-4)


def test_a_segment_whose_score_was_lost_with_the_driver(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    """The driver died after the last checkpoint and before the journal was written."""
    x, y = (part[:64] for part in digits)
    options = {"metric": "loss", "checkpoint_dir": str(tmp_path), "settings": {"batch_size": 64},
               "max_concurrent": 1}  # fmt: skip
    whole = tune.search(build, (x, y), searcher=Chain(), **options)
    journal = tmp_path / "study.json"
    told = json.loads(journal.read_text())
    assert len(told["calls"][-1]) == 3
    del told["calls"][-1], told["trials"][0]["metrics"]["4"]
    journal.write_text(json.dumps(told))
    again = tune.search(build, (x, y), searcher=Chain(), resume=True, **options)
    assert again.best_trial.metrics.keys() == {1, 2, 4}
    assert again.best_value == pytest.approx(whole.best_value, rel=1e-5)


def test_failed_trials_are_replaced_and_named(
    spark: Any, digits: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: the trials are drawn, and no line is printed for each."""
    x, y = (part[:64] for part in digits)

    def sometimes(trial: tune.Trial) -> Any:
        if trial.number == 1:
            raise ValueError("no such network")
        return build(trial)

    drawn: list[str] = []
    monkeypatch.setattr(search_module, "curves_take_the_bars_place", lambda verbose: True)
    curves = partial(NotebookTrials, show=lambda picture, text: drawn.append(text))
    monkeypatch.setattr(search_module, "NotebookTrials", curves)

    with pytest.warns(RuntimeWarning, match="trial 1 failed: ValueError: no such network"):
        study = tune.search(
            sometimes, (x, y), metric="loss", searcher=tune.RandomSearch(2, 1), max_concurrent=1
        )
    with study:
        assert [r.state for r in study.records] == ["waiting", "failed", "waiting"]
        assert study.best_trial.number != 1
    assert drawn[-1].startswith("3 trials, 1 failed, best loss ")
    assert drawn[-1].endswith(", done")
    assert "trial" not in capsys.readouterr().out


def test_mistakes_end_the_search_with_one_error(spark: Any, digits: Any, digits_df: Any) -> None:
    x, y = (part[:64] for part in digits)
    with pytest.raises(ConfigError, match="no metric 'val_accuracy'"):
        tune.search(build, (x, y), metric="val_accuracy", searcher=tune.Single(1))
    with pytest.raises(ValueError, match="broken build"):
        tune.search(_broken, (x, y), metric="loss", searcher=tune.RandomSearch(9, 1))
    with pytest.raises(Exception, match="no_column"):
        tune.search(build, digits_df, metric="loss", features="no_column")
    with pytest.raises(ConfigError, match="epochs"):
        tune.search(build, (x, y), metric="loss", epochs=3)
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        tune.search(build, (x, y), metric="loss", resume=True)
    with pytest.raises(ConfigError, match="catch"):
        tune.search(build, (x, y), metric="loss", catch=(3,))
    with pytest.raises(ConfigError, match="cannot share callbacks"):
        tune.search(build, (x, y), metric="loss", callbacks=[keras.callbacks.TerminateOnNaN()])


def _broken(trial: tune.Trial) -> Any:
    raise ValueError("broken build")


SEARCH = """
import json, sys
import numpy as np
sys.path.insert(0, {tests!r})
from pyspark.sql import SparkSession
from spark.tune.test_search import build
from sparkdl import tune
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rng = np.random.default_rng(0)
x = rng.normal(size=(512, 64)).astype("float32")
y = x[:, :10].argmax(1)
print("begun", flush=True)
study = tune.search(build, (x, y), metric="loss", searcher=tune.Asha(6, 9, 3), max_concurrent=1,
                    checkpoint_dir={folder!r}, resume={resume}, verbose=1)
print(json.dumps([[r.number, r.state, r.epochs, r.params, r.metrics] for r in study.records]))
"""


@pytest.mark.slow
def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[2])

    def start(folder: str, resume: bool) -> Any:
        code = SEARCH.format(tests=tests, folder=str(tmp_path / folder), resume=resume)
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    whole = start("whole", False)
    expected = whole.communicate(timeout=580)[0].splitlines()
    compared = [line for line in expected if line.startswith("trial")]
    killed = start("killed", False)
    assert killed.stdout is not None
    seen = []
    for line in killed.stdout:
        if line.startswith("trial"):
            seen.append(line.strip())
        if len(seen) == 4:
            break
    killed.kill()
    killed.wait()
    time.sleep(1)
    resumed = start("killed", True).communicate(timeout=580)[0].splitlines()
    lines = [line for line in resumed if line.startswith("trial")]
    assert seen == compared[:4]
    assert lines in (compared[4:], compared[5:])  # none twice, and at most one was not printed
    records, known = json.loads(resumed[-1]), json.loads(expected[-1])
    assert [r[:4] for r in records] == [r[:4] for r in known]
    for found, whole_one in zip(records, known, strict=True):
        assert found[4].keys() == whole_one[4].keys()
        for epochs, values in found[4].items():
            assert values == pytest.approx(whole_one[4][epochs], rel=1e-5)
