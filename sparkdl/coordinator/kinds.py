"""The frames of a coordinator: what ranks and driver ask it."""

import enum


class CoordinatorKind(enum.IntEnum):
    """The requests that a coordinator answers."""

    HELLO = 2  # a worker joins
    HEARTBEAT = 3
    REPORT = 4  # metrics of an epoch
    KEEP = 5  # one chunk of a blob that the driver may read
    LOG = 6  # lines that a rank printed
    FAIL = 7
    FINISH = 8
    BYE = 9
    STATUS = 10  # driver
    CONTROL = 11  # driver: stop, learning_rate, release, changes
    KEPT = 12  # driver: one chunk of the blob that a worker kept there
    TAKE_LINES = 13  # driver: the lines that came since the last look
    CHANGES = 14  # driver: one chunk of what its callbacks wrote to the model; see CONTROL
    TAKE_CHANGES = 15  # one chunk of that, for a worker
