#!/bin/sh
# Takes from an image's Python packages what no program of the image needs: about a quarter.
#
#   PYTHON=python sh docker/trim_packages.sh
set -eu

PYTHON=${PYTHON:-python3}
FOLDER=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
before=$(du -sm "$FOLDER" | cut -f1)

rm -rf "$FOLDER"/tensorflow/include "$FOLDER"/pyarrow/include "$FOLDER"/clang
# Spark Connect's shell for Scala, and Arrow's remote procedure calls
rm -rf "$FOLDER"/pyspark/jars/connect-repl
rm -f "$FOLDER"/pyarrow/libarrow_flight.* "$FOLDER"/pyarrow/libarrow_python_flight.* \
  "$FOLDER"/pyarrow/_flight.*
# RocksDB's library of this system, out of those of fourteen
"$PYTHON" - "$FOLDER"/pyspark/jars/rocksdbjni-*.jar <<'EOF'
import os, platform, sys, zipfile

own = "librocksdbjni-linux" + {"x86_64": "64", "aarch64": "-aarch64"}.get(platform.machine(), "?") + ".so"
for jar in filter(os.path.exists, sys.argv[1:]):
    with zipfile.ZipFile(jar) as whole:
        if own not in whole.namelist():
            continue  # another system: all stay
        with zipfile.ZipFile(jar + ".part", "w", zipfile.ZIP_DEFLATED) as part:
            for entry in whole.infolist():
                if entry.filename == own or not entry.filename.startswith("librocksdbjni-"):
                    part.writestr(entry, whole.read(entry))
    os.replace(jar + ".part", jar)
EOF
for package in h5py joblib numba numpy pandas pyarrow pyspark scipy sklearn tensorflow; do
  [ ! -d "$FOLDER/$package" ] ||
    find "$FOLDER/$package" -type d -name tests -prune -exec rm -rf {} +
done
# Only libraries as their linker wrote them: a wheel's repaired ones do not survive strip.
for library in "$FOLDER"/tensorflow/libtensorflow_*.so* "$FOLDER"/horovod/*/mpi_lib*.so; do
  [ ! -f "$library" ] || ! command -v strip >/dev/null || strip --strip-unneeded "$library"
done
echo "trim_packages: $FOLDER: $before MB before, $(du -sm "$FOLDER" | cut -f1) MB after" >&2
