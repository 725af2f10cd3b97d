"""The walks of :mod:`sparkdl.optimizers`, under the name that the rules use."""

from sparkdl.optimizers.blocks import BLOCK, add_scaled, blocks, each_block
from sparkdl.optimizers.compiled import run_compiled

__all__ = ["BLOCK", "add_scaled", "blocks", "each_block", "run_compiled"]
