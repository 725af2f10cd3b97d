"""The frames of a coordinator: what ranks and driver ask it."""

from sparkdl.transport.frames import Body, FrameKind


class CoordinatorKind(FrameKind):
    """The requests that a coordinator answers."""

    HELLO = 2  # a worker joins
    HEARTBEAT = 3
    REPORT = 4, Body.CHUNK  # metrics of an epoch
    KEEP = 5, Body.CHUNK  # one chunk of a blob that the driver may read
    LOG = 6, Body.CHUNK  # lines that a rank printed
    FAIL = 7
    FINISH = 8
    BYE = 9
    STATUS = 10  # driver
    CONTROL = 11  # driver: stop, learning_rate, release, changes
    KEPT = 12  # driver: one chunk of the blob that a worker kept there
    TAKE_LINES = 13  # driver: the lines that came since the last look
    CHANGES = 14, Body.CHUNK  # driver: one chunk of what its callbacks wrote; see CONTROL
    TAKE_CHANGES = 15  # one chunk of that, for a worker
