"""A worker's, and the driver's, end of the parameter server.

    client = connect(address, token, mode='auto', rank=0, attempt=0, layout=layout)
    welcome = client.hello(batches_per_epoch=100)
    client.pull()                       # client.buffer holds the center
    client.buffer[...] = delta
    client.push_pull(Progress(epoch=0, batch=8, batches=8, rows=512))

Every commit carries a sequence number; after a broken connection it is sent again under the same
number, so it counts exactly once.
"""

from sparkdl.ps.client.driver import DriverClient
from sparkdl.ps.client.records import Progress, Welcome
from sparkdl.ps.client.worker import Client, connect
from sparkdl.transport.connection import Opener, Timeouts

__all__ = ["Client", "DriverClient", "Opener", "Progress", "Timeouts", "Welcome", "connect"]
