"""A checkpoint after each epoch, on any file system; the newest whole one is resumed from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.files import storage

_INDEX = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoints:
    """Writes ``epoch-00003.keras`` and an index that names the newest; keeps the last two.

    Args:
        folder: A path or URI.
    """

    folder: str

    @classmethod
    def at(cls, folder: str | None) -> Checkpoints | None:
        """Checkpoints in ``folder``, which must be writable; None for None."""
        if folder is None:
            return None
        storage.check_writable(f"{folder}/{_INDEX}")
        return cls(str(folder).rstrip("/"))

    def save(self, model: Any, epoch: int, rule_state: bytes = b"") -> None:
        """Writes the model after ``epoch`` epochs; the index is changed last.

        Args:
            model: Its weights and optimizer state.
            epoch: Epochs done.
            rule_state: What the run's rule keeps beside them.
        """
        name = f"epoch-{epoch:05d}.keras"
        content = storage.with_rule_state(storage.model_bytes(model), rule_state)
        storage.write_bytes(f"{self.folder}/{name}", content)
        before = self._index() or {}
        previous = before.get("file") if before.get("file") != name else before.get("previous")
        index = json.dumps({"epoch": epoch, "file": name, "previous": previous})
        storage.write_bytes(f"{self.folder}/{_INDEX}", index.encode())
        oldest = before.get("previous")
        if oldest is not None and oldest not in (name, previous):
            storage.delete(f"{self.folder}/{oldest}")

    def restore(self, model: Any) -> tuple[int, bytes]:
        """Loads the newest checkpoint into ``model``.

        Returns:
            Its epoch and the rule's state; 0 and nothing if there is no checkpoint.
        """
        index = self._index()
        if index is None:
            return 0, b""
        if not model.optimizer.built:  # else Keras would leave its state out
            model.optimizer.build(model.trainable_variables)
        content = storage.read_bytes(f"{self.folder}/{index['file']}")
        with storage.local_copy(content) as local:
            try:
                model.load_weights(local)
            except ValueError as error:
                raise ConfigError(
                    f"the checkpoint in {self.folder!r} is of another model",
                    expected="the model that wrote it",
                    received=str(error).splitlines()[0],
                ) from error
        return int(index["epoch"]), storage.rule_state_of(content)

    def _index(self) -> dict[str, Any] | None:
        path = f"{self.folder}/{_INDEX}"
        if not storage.exists(path):
            return None
        try:
            index = json.loads(storage.read_bytes(path))
            return {"epoch": int(index["epoch"]), "file": str(index["file"]), **index}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path!r} is no index of checkpoints",
                expected="what fit(checkpoint_dir=...) wrote",
                received=f"{type(error).__name__}: {error}",
                hint="another folder, or delete that file",
            ) from error
