"""The parameter server as a state machine without I/O: message in, replies out."""

from sparkdl.ps.state.machine import ServerState
from sparkdl.ps.state.records import Settings
from sparkdl.ps.state.roster import Replies

__all__ = ["Replies", "ServerState", "Settings"]
