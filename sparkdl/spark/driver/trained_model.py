"""``TrainedModel``: the driver's Keras model, and what the rule of its runs keeps beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.files.checkpoints import Checkpoint, Checkpoints
from sparkdl.learner.archive import load_state, model_bytes
from sparkdl.learner.carried_state import load_carried_state, untrusted_state
from sparkdl.learner.model_weights import constrained, model_layout, write_model
from sparkdl.learner.optimizer_state import (
    innermost_optimizer,
    learning_rate_of,
    learning_rate_set,
    load_optimizer_state,
)
from sparkdl.run_state import RunState


@dataclass
class TrainedModel:
    """The driver's model; each part is as of the last state that was taken over.

    Args:
        model: A compiled Keras model.
        rule_state: What the rule keeps that no Keras optimizer has room for (an outer momentum).
        keeps_rate: The driver's callbacks may set the learning rate: then the model's own holds,
            and not that of a state, which is a worker's of some time before.
        constrains: Weights come from several workers' steps, and need not hold the constraints that
            each of these held.
        has_optimizer: Whether a state with the optimizer's was taken over since that was unset.
    """

    model: Any
    rule_state: bytes = field(default=b"", repr=False)
    keeps_rate: bool = False
    constrains: bool = False
    has_optimizer: bool = False

    def take(self, state: RunState) -> None:
        """Takes over variables, optimizer state and the rule's state, each if ``state`` has it."""
        load_carried_state(self.model, state.carried)
        if state.weights.size:
            layout = model_layout(self.model)
            weights = state.weights
            if self.constrains:
                weights = constrained(self.model.trainable_variables, layout, weights)
            write_model(self.model, layout, weights)
        if state.optimizer:
            load_optimizer_state(self.model, state.optimizer, keep_rate=self.keeps_rate)
            self.has_optimizer = True
        if state.rule:
            self.rule_state = state.rule

    def save(self, checkpoints: Checkpoints, epoch: int, rate: float | None = None) -> None:
        """Writes a checkpoint after ``epoch`` epochs.

        Args:
            checkpoints: Where to.
            epoch: Epochs that are done.
            rate: Learning rate to be saved; None for the model's present one.
        """
        with learning_rate_set(self.model, rate):
            content = model_bytes(self.model)
            beside = replace(self.beside(epoch), carried=untrusted_state(self.model))
        checkpoints.save(content, beside)

    def restore(self, checkpoints: Checkpoints) -> int:
        """Loads the newest checkpoint; returns its epochs done, 0 if there is none.

        Raises:
            ConfigError: It is of another model, or no checkpoint is whole.
        """
        checkpoint = checkpoints.restore()
        if checkpoint is None:
            self.rule_state = b""
            return 0
        self.load(checkpoint, checkpoints.folder)
        return checkpoint.state.epoch

    def load(self, checkpoint: Checkpoint, folder: str, *, keep_rate: bool = False) -> None:
        """Loads one checkpoint.

        Args:
            checkpoint: Of an equal model.
            folder: Where it is from, for the message.
            keep_rate: The model's learning rate stays as it is; Keras saves it with the optimizer.

        Raises:
            ConfigError: It is of another model.
        """
        rate = learning_rate_of(self.model) if keep_rate else None
        load_state(self.model, checkpoint.model_file, folder)
        load_carried_state(self.model, checkpoint.state.carried)
        if rate is not None:
            innermost_optimizer(self.model).learning_rate = rate
        self.rule_state = checkpoint.state.rule

    def beside(self, epoch: int) -> RunState:
        """The state that a ``.keras`` file of the model does not hold, after ``epoch`` epochs."""
        return RunState(epoch, rule=self.rule_state)
