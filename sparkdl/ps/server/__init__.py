"""The parameter server as a thing that runs: in this process, or in one of its own."""

from sparkdl.ps.server.config import ServerConfig
from sparkdl.ps.server.process import ServerProcess
from sparkdl.transport.address import Address, Mode
from sparkdl.transport.server import Server

__all__ = ["Address", "Mode", "Server", "ServerConfig", "ServerProcess"]
