"""The command ``sparkdl`` on a real session: the same as the API, and exit codes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow.feather
import pyarrow.parquet
import pytest

import sparkdl
from sparkdl import SparkModel, cli, load_spark_model
from sparkdl.spark.session.versions import table_of_frame

SCRIPTS = Path(__file__).parents[1] / "scripts"
WRITTEN = Path(__file__).parents[1] / "files" / "written"


@pytest.fixture(scope="module")
def data(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """``y = a - 2 b + 3 c``, as a folder of Parquet files."""
    rng = np.random.default_rng(0)
    rows = [[float(v) for v in row] for row in rng.normal(size=(256, 3))]
    frame = spark.createDataFrame([(*r, r[0] - 2 * r[1] + 3 * r[2]) for r in rows],
                                  "a double, b double, c double, y double")  # fmt: skip
    path = str(tmp_path_factory.mktemp("cli") / "rows.parquet")
    frame.repartition(2).write.parquet(path)
    return path


def _make_model() -> Any:
    spec = importlib.util.spec_from_file_location("cli_model", SCRIPTS / "cli_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


def _main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main([*arguments, "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out.splitlines()[-1]) if shown.out else shown.err


def test_train_evaluate_predict(
    spark: Any, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every step takes all rows: the order in which a shuffle delivers them changes nothing.
    path = str(tmp_path / "line.keras")
    rows = ("--data", data, "--features", "a,b,c")
    code, trained = _main(
        capsys, "train", f"{SCRIPTS / 'cli_model.py'}:make", *rows, "--label", "y",
        "--epochs", "20", "--mode", "synchronous", "--num-workers", "2", "--batch-size", "128",
        "--output", path,
    )  # fmt: skip
    assert code == cli.OK
    assert trained["history"]["loss"][-1] < 0.2 * trained["history"]["loss"][0]

    by_api = SparkModel(_make_model(), mode="synchronous", num_workers=2, batch_size=128)
    frame = spark.read.parquet(data)
    by_api.fit(frame, epochs=20, features=["a", "b", "c"], label="y", verbose=0)
    saved = load_spark_model(path).model.get_weights()
    for one, two in zip(saved, by_api.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)

    code, metrics = _main(capsys, "evaluate", path, "--data", data)  # the columns of the fit
    assert code == cli.OK
    assert metrics["loss"] == pytest.approx(by_api.evaluate(frame)["loss"], rel=1e-4)

    written = str(tmp_path / "predictions.parquet")
    assert _main(capsys, "predict", path, "--data", data, "--output", written)[0] == cli.OK
    ours = {row.a: row.prediction for row in spark.read.parquet(written).collect()}
    theirs = {row.a: row.prediction for row in by_api.predict(frame).collect()}
    assert len(ours) == 256
    code, refused = _main(capsys, "predict", "/no/model.keras", "--data", data, "--output", written)
    assert (code, refused["error"]["what"]) == (cli.USAGE, "--output exists")  # before the model
    assert ours == pytest.approx(theirs, abs=1e-5)

    code, shown = _main(capsys, "predict", path, "--data", data, "--limit", "2")
    assert len(shown["rows"]) == 2
    assert spark.range(1).count() == 1, "a session that ran before is left running"


def test_predict_of_models_that_are_not_compiled(
    spark: Any, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = _make_model()
    model = keras.models.clone_model(compiled)
    model.set_weights(compiled.get_weights())
    compiled.save(tmp_path / "compiled.keras")
    model.save(tmp_path / "plain.keras")
    model.save(tmp_path / "plain.h5")
    model.export(tmp_path / "saved_model", verbose=False)
    frame = spark.read.parquet(data)
    known = sparkdl.predict(model, frame, features=["a", "b", "c"])
    wanted = {row.a: row.prediction for row in known.collect()}
    for name in ("compiled.keras", "plain.keras", "plain.h5", "saved_model"):
        place = f"file:{tmp_path}/{name}"
        unsafe = ["--unsafe"] if name == "plain.h5" else []  # this test's own, on any Keras
        code, shown = _main(
            capsys, "predict", place, "--data", data, "--features", "a,b,c", "--limit", "3", *unsafe
        )
        assert code == cli.OK, shown
        for row in shown["rows"]:
            assert row["prediction"] == pytest.approx(wanted[row["a"]], abs=1e-5), name


def test_every_format_has_the_same_rows(
    spark: Any, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--data`` by its ending; one that is not known would be read as Parquet."""
    model = str(tmp_path / "line.keras")
    _make_model().save(model)
    frame = spark.read.parquet(data)
    paths = [data]
    for kind in ("csv", "json"):
        paths.append(str(tmp_path / f"rows.{kind}"))
        frame.write.option("header", "true").format(kind).save(paths[-1])
    paths.append(str(tmp_path / "rows.tfrecord"))
    sparkdl.write_tfrecords(frame, paths[-1])
    paths.append(str(tmp_path / "rows.arrow"))
    pyarrow.feather.write_feather(table_of_frame(frame), paths[-1], compression="uncompressed")
    losses = []
    for path in paths:
        code, metrics = _main(
            capsys, "evaluate", model, "--data", path, "--features", "a,b,c", "--label", "y"
        )
        assert code == cli.OK, (path, metrics)
        losses.append(metrics["loss"])
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-5)


def test_paths_mean_the_rows_that_the_api_reads(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders of other writers, and what Spark's own reader refuses or reads too much of."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.save(tmp_path / "pairs.keras")
    rows = pyarrow.table({"id": [7, 8], "x": [[7.0, 8.0], [8.0, 9.0]]})
    hive = tmp_path / "hive"
    (hive / "old").mkdir(parents=True)
    for name in ("000000_0", "000001_0", ".hidden", "_temporary", "old/000000_0"):
        pyarrow.parquet.write_table(rows, hive / name)
    paths = [f"{WRITTEN}/{name}" for name in ("datasets", "duckdb_brotli.parquet", "duckdb_parts")]
    counts = []
    for path in (*paths, f"{WRITTEN}/datasets/*", str(hive), f"{hive}/00000[^1]*"):
        command = ("--data", path, "--features", "x")
        code, metrics = _main(
            capsys, "evaluate", f"{tmp_path}/pairs.keras", *command, "--label", "id"
        )
        assert code == cli.OK, metrics
        wanted = SparkModel(model, num_workers=1).evaluate(path, features="x", label="id")
        assert metrics["loss"] == pytest.approx(wanted["loss"], rel=1e-5), path
        code, shown = _main(capsys, "predict", f"{tmp_path}/pairs.keras", *command)
        assert code == cli.OK, shown
        counts.append(len(shown["rows"]))
    assert counts == [6, 6, 6, 6, 4, 2]
    for path in (f"{WRITTEN}/delta", f"{WRITTEN}/delta/*.parquet"):
        code, refused = _main(
            capsys, "evaluate", f"{tmp_path}/pairs.keras", "--data", path, "--features", "x",
            "--label", "id",
        )  # fmt: skip
        assert code == cli.USAGE
        assert "'delta'" in refused["error"]["what"]


def test_inspect_and_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{SCRIPTS / 'cli_model.py'}:make"
    code, described = _main(capsys, "inspect", model)
    assert code == cli.OK
    assert described["parameters"] == 4
    assert described["exchange_bytes"] == 16
    assert [layer[1:] for layer in described["layers"]] == [["Dense", 4]]
    code, costs = _main(capsys, "estimate", model, "--num-workers", "4")
    assert _main(capsys, "estimate", model, "--workers", "4") == (code, costs)  # its name before
    assert costs["allreduce_bytes_per_worker"] == 24


def test_run_a_script_on_ranks(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import sys\nimport sparkdl\ncommunicator = sparkdl.communicator()\n"
        "total = float(communicator.all_reduce(float(communicator.rank + 1)))\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--to', '3']\n"
        "print('total', total)\nsys.exit(0)\n"
    )
    command = ["run", "-np", "2", "--communicator", "builtin", str(script)]
    assert cli.main([*command, "--to", "3"]) == cli.OK
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("total 3.0") == 2
    script.write_text("import sys\nsys.exit(4)\n")
    assert cli.main(command) == cli.FAILED
    assert "exit status 4" in capsys.readouterr().err


def test_doctor_ends_with_3_for_an_error(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = _main(capsys, "doctor", "--timeout", "60", "--checkpoint-dir", str(tmp_path))
    assert (code, report["status"]) in ((cli.OK, "ok"), (cli.OK, "warning")), report
    code, report = _main(capsys, "doctor", "--num-workers", "99", "--timeout", "5")
    assert (code, report["status"]) == (cli.DOCTOR, "error")


def test_missing_data_is_a_failure(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{SCRIPTS / 'cli_model.py'}:make"
    code = cli.main(["train", model, "--data", "/no/such.parquet", "--output", "/tmp/x.keras"])
    assert code == cli.FAILED
    assert "no/such.parquet" in capsys.readouterr().err
