#!/usr/bin/env bash
# Runs tests with the oldest packages that pyproject.toml promises, in an environment of their own:
#   bash tests/oldest.sh ARGUMENTS-OF-PYTEST...
# The environment is made once, and again when its packages change. CPU only, without PyTorch and JAX.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${VENV:-.venv}-oldest"
pins=tests/constraints-oldest.txt
tools=(setuptools pytest pytest-timeout pytest-xdist hypothesis psutil
       pillow optuna polars fsspec tensorboard scikit-learn scipy matplotlib)
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'

if [ "$(uname -sm)" = "Linux x86_64" ]; then tools+=(tensorflow-cpu); else tools+=(tensorflow); fi
if [ ! -e "$folder/.installed" ] || [ "$pins" -nt "$folder/.installed" ] || [ pyproject.toml -nt "$folder/.installed" ]; then
  found=
  for python in "${PYTHON:-python3}" python3.11 python3.12; do
    if "$python" -c "$fits" 2>/dev/null; then found=$python; break; fi
  done
  if [ -z "$found" ]; then
    echo "The oldest packages are not tested: TensorFlow 2.18 is there for Python 3.11 and 3.12, and this is" \
         "$("${PYTHON:-python3}" --version)."
    exit 0
  fi
  echo "Setting up $folder, once: $(grep -c == "$pins") packages at most, some minutes ..."
  [ -x "$folder/bin/python" ] || "$found" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet -c "$pins" -e . "${tools[@]}"
  touch "$folder/.installed"
fi
exec "$folder/bin/python" -m pytest -q "$@"
