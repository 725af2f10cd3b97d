"""``python -m sparkdl``; also what ``spark-submit $(sparkdl path)`` runs."""

from __future__ import annotations

import os
import sys

if not __package__:  # spark-submit runs this file by its path, whose folder hides other modules
    _here = os.path.dirname(os.path.abspath(__file__))
    if os.path.exists(os.path.join(_here, "py.typed")):
        sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]

from sparkdl.cli import main

if __name__ == "__main__":
    code = main()
    if code:
        sys.exit(code)
