"""Frames between ranks, driver and servers, and the ways they take. No pickle, no Spark.

``frames``: what a frame holds, errors on their way, and the limits of its receiver.
``service``, ``server``: what is served, by which threads, behind which sockets.
``socket``, ``shm``, ``http``: the three transports.
``address``, ``openers``, ``connection``: a client's way there, and back after a break.
"""
