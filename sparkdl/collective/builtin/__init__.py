"""The built-in communicator: shared memory inside a host, a TCP ring between hosts.

Nothing is compiled: sockets, one memory mapping per host, and NumPy on cache-sized pieces.
"""

from __future__ import annotations

from sparkdl.collective.builtin.communicator import BuiltinCommunicator, BuiltinConnector

__all__ = ["BuiltinCommunicator", "BuiltinConnector"]
