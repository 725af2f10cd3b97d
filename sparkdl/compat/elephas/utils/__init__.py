"""RDDs and types of models."""

from sparkdl.compat.elephas.utils.model_utils import LossModelTypeMapper, ModelType
from sparkdl.compat.elephas.utils.rdd_utils import (
    encode_label,
    from_labeled_point,
    lp_to_simple_rdd,
    to_labeled_point,
    to_simple_rdd,
)

__all__ = [
    "LossModelTypeMapper",
    "ModelType",
    "encode_label",
    "from_labeled_point",
    "lp_to_simple_rdd",
    "to_labeled_point",
    "to_simple_rdd",
]
