"""The blocks of :mod:`sparkdl.optimizers.blocks`, under the name that the rules use."""

from sparkdl.optimizers.blocks import BLOCK, add_scaled, blocks, each_block

__all__ = ["BLOCK", "add_scaled", "blocks", "each_block"]
