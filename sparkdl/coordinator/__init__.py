"""The coordinator of a run: who takes part, and what ranks and driver tell each other.

``machine``
    :class:`~sparkdl.coordinator.machine.Coordinator`, the state machine that transports serve:
    message in, replies out; how ranks join, what they report and the driver orders.
``group``, ``telemetry``, ``blobs``
    Its parts: members, attempts and deferred replies; metrics, log lines and what the driver is
    told of a run; kept states. In ``group`` also: what a store is that plugs into a coordinator
    (the parameter server is one).
``settings``, ``kinds``
    The limits of a run; the frames.
``session``, ``driver_client``
    A rank's connection; the driver's, and a coordinator in threads of the driver.
"""
