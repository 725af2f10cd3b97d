"""The parameter server's process: what it runs on, and the driver's handle of it.

``config``
    :class:`ServerConfig`: layout, rule, where to listen, limits.
``process``, ``__main__``
    :class:`ServerProcess`, which the driver holds, and the process that it starts.
"""

from sparkdl.ps.server.config import ServerConfig
from sparkdl.ps.server.process import ServerProcess

__all__ = ["ServerConfig", "ServerProcess"]
