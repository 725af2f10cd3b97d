"""The coordinator of a run: who takes part, and what ranks and driver tell each other.

``machine``
    :class:`~sparkdl.coordinator.machine.Coordinator`, the state machine that transports serve:
    message in, replies out; how ranks join.
``group``, ``worker``, ``reporting``, ``telemetry``, ``blobs``, ``lines``
    Its parts: membership and deferred replies; one rank over its attempts; what they report and
    the driver orders; metrics; kept states; log lines; stop and learning rate.
``store``
    What a store is that plugs into a coordinator (the parameter server is one).
``settings``, ``status``, ``kinds``
    The limits of a run; what the driver is told of it; the frames of both.
``session``, ``driver_client``
    A rank's connection; the driver's, and a coordinator in threads of the driver.
"""
