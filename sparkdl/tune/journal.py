"""``Journal``: what a search has decided and heard, from which a lost driver goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from sparkdl.errors import ConfigError
from sparkdl.files import storage
from sparkdl.settings.values import is_number
from sparkdl.tune.searchers.searcher import Searcher, Segment
from sparkdl.tune.suggestions import Space, Value

_FILE = "study.json"
_MAX_BYTES = 64 << 20
_STATES = frozenset({"running", "waiting", "failed", "stopped"})
VERSION = 1


@dataclass
class TrialRecord:
    """The facts about one trial.

    Args:
        metrics: Epochs done -> the values of all metrics then.
        epochs: Epochs done.
        state: ``'running'``, ``'waiting'`` (its last segment ended), ``'failed'`` or ``'stopped'``.
        kept: Whether its checkpoints are there, if it has written any.
        kept_epoch: Epochs done by the model that the trial stands for: that of its last comparison,
            or of its best epoch where the search keeps that; 0 before the first comparison.
        kept_metrics: The values of all metrics then.
    """

    number: int
    params: dict[str, Value] = field(default_factory=dict)
    spaces: dict[str, Space] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    epochs: int = 0
    state: str = "running"
    error: str = ""
    kept: bool = True
    kept_epoch: int = 0
    kept_metrics: dict[str, float] = field(default_factory=dict)

    @property
    def model_epoch(self) -> int:
        """``kept_epoch``, also of a journal that an earlier version wrote."""
        return self.kept_epoch or max(self.metrics, default=0)

    @property
    def model_metrics(self) -> Mapping[str, float]:
        """``kept_metrics``, also of a journal that an earlier version wrote."""
        return self.kept_metrics or self.metrics.get(self.model_epoch, {})


@dataclass
class Journal:
    """Every call of the searcher, in order, and the trials' records; written after each call."""

    folder: str
    settings: Mapping[str, Value]
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    _calls: list[list[int | float | None]] = field(default_factory=list)

    def asked(self, segment: Segment) -> None:
        """The searcher gave a segment."""
        self._calls.append([segment.trial, segment.begin, segment.end, segment.parent])

    def built(self, trial: int, spaces: Mapping[str, Space], params: Mapping[str, Value]) -> None:
        """``build`` asked for these hyper-parameters."""
        record = self.trials.setdefault(trial, TrialRecord(trial))
        record.spaces, record.params, record.state = dict(spaces), dict(params), "running"

    def told(self, segment: Segment, score: float, metrics: Mapping[str, float]) -> None:
        """The searcher heard a score."""
        self._calls.append([segment.trial, segment.end, score])
        record = self.trials.setdefault(segment.trial, TrialRecord(segment.trial))
        record.epochs, record.state = segment.end, "waiting"
        record.metrics[segment.end] = dict(metrics)

    def write(self) -> None:
        """Writes ``study.json``, whole or not at all."""
        content = {
            "version": VERSION,
            "settings": dict(self.settings),
            "calls": self._calls,
            "trials": [asdict(record) for record in self.trials.values()],
        }
        storage.write_bytes(f"{self.folder}/{_FILE}", json.dumps(content).encode())

    @classmethod
    def at(cls, folder: str, settings: Mapping[str, Value], *, resume: bool) -> Journal:
        """The journal of a folder, or a new one."""
        path = f"{folder}/{_FILE}"
        if not storage.exists(path):
            storage.check_writable(path)
            return cls(folder, settings)
        if not resume:
            raise ConfigError(
                f"{folder!r} holds a search already", expected="an empty folder", received=path,
                hint="resume=True goes on with it",
            )  # fmt: skip
        try:
            told = json.loads(storage.read_bytes(path, _MAX_BYTES))
            if told["version"] > VERSION:
                raise ValueError(f"version {told['version']}, this is {VERSION}")
            _require(isinstance(told["settings"], dict), "settings", told["settings"])
            trials = {t["number"]: _record(t) for t in told["trials"]}
            journal = cls(folder, told["settings"], trials, [_call(c) for c in told["calls"]])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path!r} is no journal of a search",
                expected=f"what tune.search wrote, of version {VERSION} or older",
                received=f"{type(error).__name__}: {error}",
            ) from error
        for name, value in settings.items():
            if journal.settings.get(name) != value:
                raise ConfigError(
                    f"{folder!r} holds another search",
                    expected=f"{name}={journal.settings.get(name)!r}, as before",
                    received=f"{name}={value!r}",
                )
        return journal

    def replay(self, searcher: Searcher) -> list[Segment]:
        """Makes the calls again; returns the segments whose score the searcher has not heard."""
        open_segments: dict[int, Segment] = {}
        for call in self._calls:
            if len(call) == 4:
                trial, begin, end, parent = (None if c is None else int(c) for c in call)
                segment = searcher.ask()
                wanted = Segment(trial or 0, begin or 0, end or 0, parent)
                if segment != wanted:
                    raise ConfigError(
                        f"the searcher is not the one whose search {self.folder!r} holds",
                        expected=f"the same searcher with the same arguments, which gave {wanted}",
                        received=str(segment),
                    )
                open_segments[segment.trial] = segment
                record = self.trials.get(segment.trial)
                if record is not None:
                    searcher.built(segment.trial, record.spaces, record.params)
            else:
                number, epochs, score = call
                trial = int(number or 0)
                if trial not in open_segments or open_segments[trial].end != epochs:
                    raise ConfigError(
                        f"{self.folder}/{_FILE} is no journal of a search",
                        expected="scores of segments that the searcher gave before",
                        received=f"a score of trial {trial} after {epochs} epochs",
                    )
                searcher.tell(trial, int(epochs or 0), float(score or 0))
                del open_segments[trial]
        return list(open_segments.values())


def _record(told: Mapping[str, object]) -> TrialRecord:
    record = TrialRecord(**told)  # type: ignore[arg-type]
    spaces = {n: Space(**s) for n, s in record.spaces.items()}  # type: ignore[arg-type]
    spaces = {n: replace(s, choices=tuple(s.choices)) for n, s in spaces.items()}
    metrics = {int(epochs): dict(values) for epochs, values in record.metrics.items()}
    for name in ("number", "epochs", "kept_epoch"):
        _require(_is_count(getattr(record, name)), name, getattr(record, name))
    _require(record.state in _STATES, "state", record.state)
    _require(isinstance(record.error, str), "error", record.error)
    _require(isinstance(record.kept, bool), "kept", record.kept)
    for value in record.params.values():
        _require(value is None or isinstance(value, (str, int, float)), "params", value)
    for values in (record.kept_metrics, *metrics.values()):
        for value in values.values():
            _require(is_number(value), "metrics", value)
    for space in spaces.values():
        known = space.kind in ("float", "int", "categorical") and isinstance(space.log, bool)
        step = (0.0,) if space.step is None else (space.step,)
        _require(known and all(map(is_number, (space.low, space.high, *step))), "spaces", space)
    return replace(record, spaces=spaces, metrics=metrics)


def _call(told: list[int | float | None]) -> list[int | float | None]:
    """A call of the searcher as it was written: a segment that it gave, or a score it heard."""
    if isinstance(told, list) and len(told) == 4:
        *counts, parent = told
        whole = all(map(_is_count, counts)) and (parent is None or _is_count(parent))
    else:
        listed = isinstance(told, list) and len(told) == 3
        whole = listed and all(map(_is_count, told[:2])) and is_number(told[2])
    _require(whole, "calls", told)
    return told


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(right: bool, name: str, value: object) -> None:
    if not right:
        raise ValueError(f"{name}: {str(value)[:200]}")
