"""Files where Spark's are: ``find_file_system`` is plugged into :mod:`sparkdl.files.storage`.

``hadoop``: through the JVM of a classic session. ``connect``: Spark itself reads and writes.
"""
