"""Rows for the functions of ranks: those of a table, and those of a stream.

- ``feeding``: a rank's share of rows, kept, read again from files, or asked for one by one.
- ``stream_feed``: rows that keep coming, who takes them in on a rank, and what driver and ranks
  tell each other about them.
"""
