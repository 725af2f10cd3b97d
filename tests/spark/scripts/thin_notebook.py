"""Run by test_thin_client.py in an environment with ``pyspark-client``: a notebook, cell by cell.

SPARK_REMOTE=sc://HOST:PORT python thin_notebook.py NOTEBOOK RESULT
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import nbformat
    import pyspark
    from nbclient import NotebookClient

    assert not (Path(pyspark.__file__).parent / "jars").exists(), "a client without a server"
    notebook = nbformat.read(sys.argv[1], as_version=4)
    # the kernel runs this interpreter, and so without Spark's server
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    nbformat.write(notebook, sys.argv[2])


if __name__ == "__main__":
    main()
