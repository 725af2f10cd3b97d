"""dist-keras' trainers under dist-keras' module name."""

from sparkdl.compat.distkeras.distributed import (
    ADAG,
    AEASGD,
    DOWNPOUR,
    EAMSGD,
    AsynchronousDistributedTrainer,
    DistributedTrainer,
    DynSGD,
    Experimental,
)
from sparkdl.compat.distkeras.single import (
    AveragingTrainer,
    EnsembleTrainer,
    SingleTrainer,
    Trainer,
)
from sparkdl.compat.distkeras.utils import deserialize_keras_model, serialize_keras_model

__all__ = [
    "ADAG",
    "AEASGD",
    "DOWNPOUR",
    "EAMSGD",
    "AsynchronousDistributedTrainer",
    "AveragingTrainer",
    "DistributedTrainer",
    "DynSGD",
    "EnsembleTrainer",
    "Experimental",
    "SingleTrainer",
    "Trainer",
    "deserialize_keras_model",
    "serialize_keras_model",
]
