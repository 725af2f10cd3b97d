"""The parameter server as a state machine without I/O: message in, replies out."""

from sparkdl.ps.state.machine import Replies, ServerState
from sparkdl.ps.state.records import Settings

__all__ = ["Replies", "ServerState", "Settings"]
