#!/bin/sh
# Takes from an image's Python packages what no program of the image needs: about a fifth.
#
#   PYTHON=python sh docker/trim_packages.sh
set -eu

PYTHON=${PYTHON:-python3}
FOLDER=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
before=$(du -sm "$FOLDER" | cut -f1)

rm -rf "$FOLDER"/tensorflow/include "$FOLDER"/pyarrow/include "$FOLDER"/clang
for package in h5py joblib numba numpy pandas pyarrow pyspark scipy sklearn tensorflow; do
  [ ! -d "$FOLDER/$package" ] ||
    find "$FOLDER/$package" -type d -name tests -prune -exec rm -rf {} +
done
# Only libraries as their linker wrote them: a wheel's repaired ones do not survive strip.
for library in "$FOLDER"/tensorflow/libtensorflow_*.so* "$FOLDER"/horovod/*/mpi_lib*.so; do
  [ ! -f "$library" ] || ! command -v strip >/dev/null || strip --strip-unneeded "$library"
done
echo "trim_packages: $FOLDER: $before MB before, $(du -sm "$FOLDER" | cut -f1) MB after" >&2
