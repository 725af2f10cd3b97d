"""Elephas' ``HyperParamModel``: a search over functions with ``{{uniform(0, 1)}}`` in them, as
Hyperas writes hyper-parameters.

To Python ``{{...}}`` is a set in a set, which is never evaluated here: each one becomes a name
whose value is drawn for each trial.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import FunctionType
from typing import Any

from pyspark.sql import SparkSession

import sparkdl
from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.launch import interrupts
from sparkdl.learner.checks.compiling import model_from_json
from sparkdl.learner.framework import seed_everything
from sparkdl.learner.prediction.ensemble import vote
from sparkdl.process import payload
from sparkdl.settings.values import require_int, require_name
from sparkdl.spark.runs import capacity
from sparkdl.spark.runs.function_stage import check_callable
from sparkdl.tune.journal import Journal
from sparkdl.tune.runner import OnEpoch, SearchRun, SegmentTraining
from sparkdl.tune.searchers import RandomSearch
from sparkdl.tune.searchers.searcher import Goal, Segment
from sparkdl.tune.suggestions import Trial, Value

_DRAWN = "_sparkdl_drawn"
"""What a template is called in the function that runs: name -> the drawn value."""


def _normal(trial: Trial, name: str, mu: float, sigma: float) -> float:
    share = min(max(trial.suggest_float(name, 0.0, 1.0), 1e-12), 1 - 1e-12)
    return NormalDist(mu, sigma).inv_cdf(share)


Draw = Callable[..., float]
DISTRIBUTIONS: dict[str, Draw] = {
    "randint": lambda trial, name, upper: trial.suggest_int(name, 0, upper - 1),
    "uniform": Trial.suggest_float,
    "loguniform": lambda trial, name, low, high: math.exp(trial.suggest_float(name, low, high)),
    "normal": _normal,
    "lognormal": lambda trial, name, mu, sigma: math.exp(_normal(trial, name, mu, sigma)),
}
"""Hyperopt's, each also with a ``q`` before its name (``quniform(low, high, q)``: multiples of q);
the bounds of ``loguniform`` are logarithms. Beside them there is ``choice(options)``."""
_NAMES = ("choice", *DISTRIBUTIONS, *(f"q{n}" for n in DISTRIBUTIONS if n != "randint"))


@dataclass(frozen=True)
class Hole:
    """One hyper-parameter of a function.

    Args:
        name: After the keyword or the call that it is an argument of, as Hyperas names it.
        arguments: Arguments of the distribution, as code.
    """

    name: str
    distribution: str
    arguments: ast.List


class Template:
    """A function with hyper-parameters in it.

    Args:
        function: Python must be able to find its source.

    Raises:
        ConfigError: It has no source, or a hyper-parameter that is not one of Hyperas'.
        UnknownNameError: No such distribution.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType):
            raise ConfigError(
                "this is no function", expected="def model(...): ...", received=repr(function)
            )
        self._function = function
        found = inspect.getclosurevars(function)
        self._names: Mapping[str, Any] = {**function.__globals__, **found.nonlocals}
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError) as error:
            raise ConfigError(
                f"the source of {function.__name__!r} cannot be read",
                expected="a function with def in a file or a notebook's cell",
                received=f"{type(error).__name__}: {error}",
            ) from error
        definition = next((n for n in tree.body if isinstance(n, ast.FunctionDef)), None)
        if definition is None:
            raise ConfigError(
                "the function has no name that it could be compiled by",
                expected="a function with def", received=ast.unparse(tree)[:200],
                hint="def model(...): return ...",
            )  # fmt: skip
        definition.decorator_list = []
        self._definition = definition
        finder = _Finder()
        self._tree = ast.fix_missing_locations(finder.visit(tree))
        self.holes: list[Hole] = finder.holes

    def fill(self, trial: Trial) -> Callable[..., Any]:
        """The function with a trial's values; it can be sent to executors.

        Raises:
            ConfigError: The arguments of a distribution do not fit.
        """
        drawn = {hole.name: self._draw(hole, trial) for hole in self.holes}
        names = {**self._names, _DRAWN: drawn}
        exec(compile(self._tree, f"<{self._definition.name} of a trial>", "exec"), names)
        filled: Callable[..., Any] = names[self._definition.name]
        filled.__module__ = "__main__"  # pickled by value
        return filled

    def _draw(self, hole: Hole, trial: Trial) -> Value:
        code = ast.fix_missing_locations(ast.Expression(hole.arguments))
        try:
            arguments = eval(compile(code, f"<{hole.name}>", "eval"), dict(self._names))
            if hole.distribution == "choice":
                (options,) = arguments
                return trial.suggest_categorical(hole.name, range(len(options)))
            name = hole.distribution
            if name not in DISTRIBUTIONS:
                *arguments, step = arguments
                value = DISTRIBUTIONS[name[1:]](trial, hole.name, *arguments)
                return float(round(value / step) * step)
            return DISTRIBUTIONS[name](trial, hole.name, *arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the hyper-parameter {hole.name!r} cannot be drawn",
                expected="choice(options), uniform(low, high), normal(mu, sigma), ..., of names "
                "that are known outside of the function",
                received=f"{{{{{hole.distribution}({ast.unparse(hole.arguments)[1:-1]})}}}}: "
                f"{type(error).__name__}: {error}",
            ) from error


class _Finder(ast.NodeTransformer):
    """Replaces ``{{...}}`` and notes what was there."""

    def __init__(self) -> None:
        self.holes: list[Hole] = []
        self._owner = "value"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        before, self._owner = self._owner, _last_name(node.func)
        result = self.generic_visit(node)
        self._owner = before
        return result

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        before, self._owner = self._owner, node.arg or self._owner
        result = self.generic_visit(node)
        self._owner = before
        return result

    def visit_Set(self, node: ast.Set) -> ast.AST:
        inner = node.elts[0]
        if len(node.elts) != 1 or not isinstance(inner, ast.Set):
            return self.generic_visit(node)
        call = inner.elts[0]
        if len(inner.elts) != 1 or not isinstance(call, ast.Call) or call.keywords:
            raise ConfigError(
                "this is no hyper-parameter",
                expected="{{choice([...])}}, {{uniform(low, high)}}, ... without names of "
                "arguments",
                received=ast.unparse(node),
            )
        distribution = _last_name(call.func)
        if distribution not in _NAMES:
            raise UnknownNameError("distribution", distribution, _NAMES)
        name = self._free_name()
        read = ast.Load()
        self.holes.append(Hole(name, distribution, ast.List(call.args, read)))
        value: ast.expr = ast.Subscript(ast.Name(_DRAWN, read), ast.Constant(name), read)
        if distribution == "choice":  # the options may be any objects: only their number is drawn
            value = ast.Subscript(call.args[0], value, read)
        return value

    def _free_name(self) -> str:
        taken = {hole.name for hole in self.holes}
        names = (self._owner, *(f"{self._owner}_{n}" for n in range(1, len(taken) + 2)))
        return next(name for name in names if name not in taken)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "value")


TrialResult = dict[str, Any]
"""A trial: ``tid``, ``params``, and ``result``, which the model function returned."""
_EXAMPLE = (
    "{'loss': -accuracy, 'status': 'ok', 'model': model.to_json(), "
    "'weights': pickle.dumps(model.get_weights())}"
)


class HyperParamModel:
    """Random search; each trial is a task of Spark that calls ``model(*data())``.

    ::

        def model(x_train, y_train, x_test, y_test):
            network = keras.Sequential([keras.Input((784,)),
                                        keras.layers.Dense({{choice([64, 256])}}, 'relu'),
                                        keras.layers.Dropout({{uniform(0, 1)}}), ...])
            network.compile(...)
            network.fit(x_train, y_train, batch_size={{choice([64, 128])}})
            loss, accuracy = network.evaluate(x_test, y_test)
            return {'loss': -accuracy, 'status': 'ok', 'model': network.to_json(),
                    'weights': pickle.dumps(network.get_weights())}

        best = HyperParamModel(sc).minimize(model=model, data=data, max_evals=5)

    ``'model'`` may also be the Keras model itself, without ``'weights'``. Hyperas and Hyperopt
    need not be installed. What the functions name outside of themselves travels with them.

    Args:
        sc: The SparkContext.
        num_workers: Tasks side by side, each with ``max_evals`` trials, as in Elephas.
        seed: Seed of the hyper-parameters, the initial weights and the order of the rows.
    """

    def __init__(self, sc: object, num_workers: int = 4, *, seed: int = 0) -> None:
        self.spark_context = sc
        self.num_workers = require_int("num_workers", num_workers, 1)
        self.seed = seed

    def minimize(self, model: Callable[..., Any], data: Callable[[], Any], max_evals: int) -> Any:
        """The Keras model of the trial with the smallest ``'loss'``.

        Args:
            model: Builds, trains and evaluates a model; see the class.
            data: Returns the arguments of ``model``; called in each trial.
            max_evals: Trials for each of ``num_workers``.

        Raises:
            ConfigError: A hyper-parameter that cannot be drawn; a result without a loss.
            WorkerError: The first trials failed; the error of the first.
        """
        return self.best_models(1, model, data, max_evals)[0]

    def best_models(
        self, nb_models: int, model: Callable[..., Any], data: Callable[[], Any], max_evals: int
    ) -> list[Any]:
        """The Keras models of the trials with the smallest losses, best first."""
        (trials,) = self.compute_trials(model, data, max_evals)
        ranked = sorted(trials, key=lambda trial: trial["result"]["loss"])
        return [_model_of(trial["result"]) for trial in ranked[:nb_models]]

    def best_ensemble(
        self,
        nb_ensemble_models: int,
        model: Callable[..., Any],
        data: Callable[[], Any],
        max_evals: int,
        voting: str = "hard",
        weights: Sequence[float] | None = None,
    ) -> Any:
        """One Keras model of the best: ``'soft'`` predicts the mean of their predictions,
        ``'hard'`` the share of them that prefers each class.

        Raises:
            ConfigError: Another voting; weights, which sparkdl's ensembles do not have.
        """
        require_name("voting", voting, ("hard", "soft"))
        if weights is not None:
            raise ConfigError(
                "all members of an ensemble count the same", expected="weights=None",
                received=repr(weights), hint="best_models(...) returns the members",
            )  # fmt: skip
        return vote(self.best_models(nb_ensemble_models, model, data, max_evals), voting)

    @interrupts.heard()
    def compute_trials(
        self, model: Callable[..., Any], data: Callable[[], Any], max_evals: int
    ) -> list[list[TrialResult]]:
        """All trials that ended well, in one list, as Elephas has a list per worker."""
        count = self.num_workers * require_int("max_evals", max_evals, 1)
        check_callable(data)
        sc = self.spark_context
        spark = sc if hasattr(sc, "createDataFrame") else SparkSession.builder.getOrCreate()
        trainer = _FunctionTrainer(spark, Template(model), data, self.seed)
        with TemporaryFolder() as folder:
            journal = Journal.at(folder.path, {"seed": self.seed}, resume=False)
            SearchRun(
                RandomSearch(count, max_epochs=1), trainer,
                journal, Goal("loss", False), seed=self.seed, timeout_s=None,
                max_concurrent=min(self.num_workers, capacity.count_slots(spark) or 1),
            ).run()  # fmt: skip
        if not trainer.trials:
            errors = sorted({record.error or record.state for record in journal.trials.values()})
            raise ConfigError(
                "no trial has ended with a loss", expected=_EXAMPLE,
                received=f"{len(journal.trials)} trials: {'; '.join(errors)}",
            )  # fmt: skip
        return [[trainer.trials[number] for number in sorted(trainer.trials)]]


class _FunctionTrainer:
    """Calls the user's function in a task; see :class:`sparkdl.tune.runner.TrialTrainer`."""

    def __init__(
        self, spark: object, template: Template, data: Callable[[], Any], seed: int
    ) -> None:
        self._spark, self._template, self._data, self._seed = spark, template, data, seed
        self._tag = f"sparkdl-hyperparam-{uuid.uuid4().hex[:12]}"
        self.trials: dict[int, TrialResult] = {}

    def prepare(self, trial: Trial, segment: Segment, on_epoch: OnEpoch) -> SegmentTraining:
        call = payload.dump((self._template.fill(trial), self._data))

        def train() -> Mapping[str, float]:
            capacity.tag_jobs(self._spark, self._tag)
            given = call, self._seed + trial.number
            (content,) = sparkdl.run(
                _call, given, num_workers=1, communicator="builtin", spark=self._spark
            )
            result = _checked(payload.load(content))
            if not math.isnan(result["loss"]):
                self.trials[trial.number] = {
                    "tid": trial.number, "params": dict(trial.params), "result": result,
                }  # fmt: skip
            return {"loss": result["loss"]}

        return train

    def cancel(self) -> None:
        capacity.cancel_tagged(self._spark, self._tag)

    def delete(self, trial: int) -> None:
        """There is nothing to delete: these trials write no checkpoints."""

    def keep(self, trial: int, epochs: Collection[int]) -> None:
        """Nor is there anything to keep."""


def _call(call: bytes, seed: int) -> bytes:
    """Runs a trial on an executor; the same seed trains the same model."""
    seed_everything(seed)
    function, data = payload.load(call)
    arguments = data()
    result = function(*(arguments if isinstance(arguments, tuple) else (arguments,)))
    if isinstance(result, dict) and hasattr(result.get("model"), "get_weights"):
        network = result["model"]
        result = {**result, "model": network.to_json(), "weights": network.get_weights()}
    return payload.dump(result)


def _checked(result: Any) -> TrialResult:
    """The result with its loss as a number; NaN for a trial that says that it failed."""
    try:
        number = float(result["loss"]) if result.get("status", "ok") == "ok" else math.nan
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "the model function returns what its trial is compared by", expected=_EXAMPLE,
            received=repr(result)[:200],
        ) from error  # fmt: skip
    return {**result, "loss": number}


def _model_of(result: TrialResult) -> Any:
    """The trained model of a trial, compiled if the trial says with what."""
    text, weights = result.get("model"), result.get("weights")
    if not isinstance(text, str) or weights is None:
        raise ModelError(
            "the trial's result has no model", expected=_EXAMPLE, received=", ".join(sorted(result))
        )
    model = model_from_json(text, {})
    model.set_weights(payload.load(weights) if isinstance(weights, bytes) else weights)
    return model
