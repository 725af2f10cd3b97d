"""Files where Spark's are: ``find_file_system`` is plugged into :mod:`sparkdl.files.storage`.

``worker_paths``: which file system a path belongs to. ``hadoop``: through the JVM of a classic
session, or by Spark itself over Spark Connect.
"""
