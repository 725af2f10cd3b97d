"""A checkpoint after each epoch, on any file system; training goes on from the newest whole one.

The last two are there, and those that somebody asked to keep. They are of one run: a fit, and those
that went on from its checkpoints. Another run in the same folder takes the place of the one before.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace

from sparkdl.errors import ConfigError, ModelError, ResourceError
from sparkdl.files import storage
from sparkdl.files.file_system import DamagedFileError
from sparkdl.files.model_file import check_whole, run_of, run_state_of, with_parts
from sparkdl.files.run_state import RunState
from sparkdl.process.user_warnings import warn_user

_INDEX = "checkpoint.json"
_MAX_INDEX_BYTES = 1 << 16
_DAY_S = 86_400.0
_NAME = re.compile(r"epoch-([0-9]{5,12})\.keras")


def _new_run() -> str:
    """A name that no other run has, in the order of time."""
    return f"{time.time_ns():020d}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Checkpoint:
    """The state that training goes on from.

    Args:
        model_file: A ``.keras`` file: weights and optimizer state.
        state: What the file does not hold: epochs done, and what the run's rule keeps.
        run: The run that wrote it; empty in files of earlier versions.
    """

    model_file: bytes
    state: RunState
    run: str = ""


@dataclass(frozen=True)
class _Index:
    """The content of ``checkpoint.json``: the newest file, the one before it, those to keep, and
    the run that wrote them; empty in those of earlier versions.
    """

    epoch: int
    file: str
    previous: str | None = None
    kept: tuple[str, ...] = ()
    run: str = ""

    @property
    def files(self) -> list[str]:
        """The checkpoints that training may go on from, the newest first."""
        return [self.file] if self.previous is None else [self.file, self.previous]


@dataclass
class Checkpoints:
    """Writes ``epoch-00003.keras`` and an index that names the newest.

    The last two are kept, and those after the epochs that :meth:`keep` was told. ResourceError says
    what cannot be read or written.

    Args:
        folder: A path or URI.
        run: Whose checkpoints are written: a new run's, or that which :meth:`restore` found.
    """

    folder: str
    run: str = field(default_factory=_new_run)

    @classmethod
    def at(cls, folder: str | None) -> Checkpoints | None:
        """Checkpoints in ``folder``, which must be writable; None for None.

        What killed drivers had begun to write there is deleted a day later.
        """
        if folder is None:
            return None
        storage.check_writable(f"{folder}/{_INDEX}")
        storage.delete_partial(str(folder), _DAY_S)
        return cls(str(folder).rstrip("/"))

    @property
    def exist(self) -> bool:
        """Whether there is one, whole or not.

        Raises:
            ConfigError: The index is malformed.
        """
        return self._index() is not None

    def save(self, model_file: bytes, state: RunState) -> None:
        """Writes the model after ``state.epoch`` epochs; the index is changed after it.

        Those of another run are deleted last.
        """
        name, before = _name_of(state.epoch), self._read_index()
        content = with_parts(model_file, state=state, run=self.run)
        storage.write_bytes(f"{self.folder}/{name}", content)
        index = _Index(state.epoch, name, run=self.run)
        if before is not None and before.run == self.run:
            older = [each for each in before.files if each != name]
            index = replace(index, previous=older[0] if older else None, kept=before.kept)
        self._write_index(index)
        if before is not None:
            self._delete({*before.files, *before.kept} - {*index.files, *index.kept})

    def keep(self, epochs: Collection[int]) -> None:
        """Keeps the checkpoints after these epochs, whatever is written later, and no others.

        One that is not there yet is kept from when it is written. Nothing where there is none.
        """
        index = self._index()
        if index is None:
            return
        kept = tuple(_name_of(epoch) for epoch in sorted({*epochs}))
        if kept != index.kept:
            self._write_index(replace(index, kept=kept))
            self._delete({*index.kept} - {*kept, *index.files})

    def rewind(self, epochs: int) -> bool:
        """Makes the checkpoint after ``epochs`` epochs the newest, if it is there."""
        index, name = self._index(), _name_of(epochs)
        if index is None or not storage.exists(f"{self.folder}/{name}"):
            return False
        if index.file != name:
            self._write_index(_Index(epochs, name, kept=index.kept, run=index.run))
            self._delete({*index.files} - {name, *index.kept})
        return True

    def after(self, epochs: int) -> Checkpoint | None:
        """The checkpoint after ``epochs`` epochs; None if it is not there, or not whole."""
        name = _name_of(epochs)
        if not storage.exists(f"{self.folder}/{name}"):
            return None
        try:
            return self._read(name)
        except ModelError:
            return None

    def restore(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None if there is none at all.

        What is saved from now on is of its run. One that is cut off, damaged or gone is passed over
        with a warning, and the index no longer names it. Without an index, which a driver that is
        killed while it writes one can leave, the files say which is the newest; that is told by a
        warning, too.

        Raises:
            ConfigError: The index is malformed, or neither of the two newest is whole.
            ResourceError: One is there and cannot be read, which may pass: the index stays.
        """
        index, found = self._read_index(), list[str]()
        if index is None:
            index = self._guess_index()
            found.append(f"{_INDEX} is gone")
        if index is None:
            return None
        for name in index.files:
            try:
                checkpoint = self._read(name)
            except ModelError as error:
                told = f"{error.what} ({error.received})" if error.received else error.what
                found.append(f"{name}: {told}")
                continue
            self.run = checkpoint.run
            if found:
                warn_user(
                    f"what is in {self.folder!r} is not whole ({'; '.join(found)}); training "
                    f"goes on from {name}, after {checkpoint.state.epoch} epochs"
                )
                before = index.previous if name == index.file else None
                epoch = checkpoint.state.epoch
                self._write_index(_Index(epoch, name, before, index.kept, self.run))
            return checkpoint
        raise ConfigError(
            f"no checkpoint in {self.folder!r} is whole",
            expected="a whole " + " or ".join(index.files), received="; ".join(found),
            hint=f"another folder, or delete {_INDEX} and the checkpoints to begin from the start",
        )  # fmt: skip

    def newest(self) -> int:
        """Epochs done in the newest checkpoint, as the index has it; 0 without one."""
        index = self._index()
        return 0 if index is None else index.epoch

    def clear(self) -> None:
        """Deletes all checkpoints in the folder: a fit with ``resume`` begins at the start.

        Raises:
            ConfigError: The index is malformed.
        """
        index, names = self._read_index(), self._names()
        if index is not None:  # also where the folder does not show its files
            names += [*index.files, *index.kept]
            storage.delete(f"{self.folder}/{_INDEX}")
        self._delete({*names})

    def _delete(self, names: Collection[str]) -> None:
        for name in names:
            storage.delete(f"{self.folder}/{name}")

    def _read(self, name: str) -> Checkpoint:
        path = f"{self.folder}/{name}"
        try:
            content = storage.read_bytes(path)
        except ResourceError as error:
            if not isinstance(error, DamagedFileError) and storage.exists(path):
                raise
            raise ModelError(
                error.what, expected=error.expected, received=error.received
            ) from error
        check_whole(content)
        state = run_state_of(content)
        if state is None or state.epoch != _epoch_of(name):
            raise ModelError(
                f"{name} is no checkpoint of its epoch", expected=f"epoch {_epoch_of(name)}",
                received="no state of a run" if state is None else f"epoch {state.epoch}",
            )  # fmt: skip
        return Checkpoint(content, state, run_of(content))

    def _write_index(self, index: _Index) -> None:
        told = {name: value for name, value in asdict(index).items() if name != "kept" or value}
        storage.write_bytes(f"{self.folder}/{_INDEX}", json.dumps(told).encode())

    def _index(self) -> _Index | None:
        """Which checkpoints there are; None if there are none."""
        return self._read_index() or self._guess_index()

    def _guess_index(self) -> _Index | None:
        """The index that fits the whole files of the newest run, or of those that are there
        if none is whole; None where none are to be seen.
        """
        names = self._names()
        if not names:
            return None
        runs: dict[str, list[str]] = {}
        for name in names:
            with contextlib.suppress(ModelError):
                runs.setdefault(self._read(name).run, []).append(name)
        run = max(runs, default="")
        newest, *older = runs.get(run, names)
        return _Index(_epoch_of(newest), newest, older[0] if older else None, tuple(older[1:]), run)

    def _names(self) -> list[str]:
        """The checkpoints in the folder, the newest first; Spark Connect shows none."""
        if not storage.exists(self.folder):
            return []
        names = (path.rpartition("/")[2] for path in storage.list_files(self.folder, ".keras"))
        return sorted(filter(_NAME.fullmatch, names), key=_epoch_of, reverse=True)

    def _read_index(self) -> _Index | None:
        path = f"{self.folder}/{_INDEX}"
        if not storage.exists(path):
            return None
        try:
            told = json.loads(storage.read_bytes(path, _MAX_INDEX_BYTES))
            kept = tuple(told.get("kept", ()))
            run = told.get("run", "")
            if not isinstance(run, str):
                raise TypeError(f"run {run!r}")
            index = _Index(told["epoch"], told["file"], told.get("previous"), kept, run)
            epochs = [_epoch_of(name) for name in index.files]
            _ = [_epoch_of(name) for name in kept]
            if epochs[0] != index.epoch or len(set(epochs)) < len(epochs):
                raise ValueError(f"epoch {index.epoch!r} in {index.files!r}")
            return index
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path!r} is no index of checkpoints",
                expected="what fit(checkpoint_dir=...) wrote",
                received=f"{type(error).__name__}: {error}",
                hint="another folder, or delete that file: then the newest of the whole ones "
                "beside it is gone on from",
            ) from error


def _name_of(epochs: int) -> str:
    return f"epoch-{epochs:05d}.keras"


def _epoch_of(name: object) -> int:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"{name!r} is no name of a checkpoint like 'epoch-00003.keras'")
    return int(match[1])
