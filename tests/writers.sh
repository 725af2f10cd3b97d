#!/usr/bin/env bash
# Writes small files with DuckDB, fastparquet, datasets and delta-rs, each in its newest version, in an environment of
# its own, and runs the tests of such files on them:
#   bash tests/writers.sh ARGUMENTS-OF-PYTEST...
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${VENV:-.venv}-writers"
if [ ! -e "$folder/.installed" ]; then
  echo "Setting up $folder, once ..."
  [ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet duckdb fastparquet datasets deltalake pandas pyarrow
  touch "$folder/.installed"
fi
written="$(mktemp -d)"
trap 'rm -rf "$written"' EXIT
"$folder/bin/python" tests/spark/files/write_samples.py "$written/files" 2>/dev/null
SPARKDL_WRITTEN="$written/files" "${VENV:-.venv}/bin/python" -m pytest -q tests/spark/files/test_writers.py "$@"
