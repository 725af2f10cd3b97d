#!/bin/sh
# Builds Horovod's wheel from its PyPI source against the installed TensorFlow, keeps it in a cache,
# and installs it. Run again, it installs the cached wheel, or does nothing.
#
#   PYTHON=/path/to/venv/bin/python sh docker/build_horovod.sh
#
# Variables: PYTHON; HOROVOD_VERSION; SPARKDL_WHEELS (the cache); JOBS (compilers at once);
# HOROVOD_GPU_OPERATIONS=NCCL for the CUDA images. Needs a Debian system: as root it installs the
# packages that are missing, else it says which.
set -eu

PYTHON=${PYTHON:-python3}
VERSION=${HOROVOD_VERSION:-0.28.1}
JOBS=${JOBS:-$(nproc)}
GPU=${HOROVOD_GPU_OPERATIONS:-}

say() { echo "build_horovod: $*" >&2; }

if ! TAG=$("$PYTHON" -c '
import sys, importlib.metadata as m, platform
print("tf{}-cp{}{}-{}".format(m.version("tensorflow"), *sys.version_info[:2], platform.machine()))
' 2>/dev/null); then
  say "TensorFlow is not installed for $PYTHON; install it first: Horovod is built against it"
  exit 1
fi
CACHE=${SPARKDL_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/sparkdl/wheels}/$TAG${GPU:+-$GPU}
mkdir -p "$CACHE"

installed() {
  "$PYTHON" - "$VERSION" <<'PY'
import sys, importlib.metadata as m
try:
    sys.exit(m.version("horovod") != sys.argv[1])
except m.PackageNotFoundError:
    sys.exit(1)
PY
}

works() { "$PYTHON" -c 'import horovod.tensorflow' >/dev/null 2>&1; }

if installed && works; then
  say "horovod $VERSION is installed for $TAG and imports"
  exit 0
fi

WHEEL=$(find "$CACHE" -name "horovod-$VERSION-*.whl" | head -n 1)
if [ -z "$WHEEL" ]; then
  missing=""
  for package in libhighwayhash-dev libfarmhash-dev cmake g++; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
  done
  if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ]; then
      say "missing Debian packages; as root: apt-get install -y$missing"
      exit 1
    fi
    say "installing$missing"
    apt-get update -q >&2
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >&2
  fi

  WORK=$(mktemp -d "${TMPDIR:-/tmp}/build-horovod.XXXXXX")
  trap 'rm -rf "$WORK"' EXIT
  # TensorFlow moved this header; Horovod asks for it at its old place
  mkdir -p "$WORK/include/tensorflow/compiler/xla/client"
  echo '#include "tensorflow/compiler/xla/hlo/builder/xla_builder.h"' \
    >"$WORK/include/tensorflow/compiler/xla/client/xla_builder.h"

  # Horovod's setup.py needs pkg_resources, which newer setuptools no longer have: a copy of its
  # own, before the environment's, which stays as it is
  "$PYTHON" -m pip install -q --target "$WORK/tools" 'setuptools<81' wheel psutil cloudpickle packaging

  say "building horovod $VERSION for $TAG (some minutes)"
  CPLUS_INCLUDE_PATH="$WORK/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" \
    PYTHONPATH="$WORK/tools" \
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
    HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    MAKEFLAGS="-j$JOBS" CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" \
    "$PYTHON" -m pip wheel --no-deps --no-build-isolation --no-cache-dir \
    -w "$WORK/wheel" "horovod==$VERSION" >"$CACHE/build.log" 2>&1 || {
    say "the build failed; the end of $CACHE/build.log:"
    tail -n 30 "$CACHE/build.log" >&2
    exit 1
  }
  # moved last, so that a build that was cut off leaves no wheel in the cache
  mv "$WORK"/wheel/horovod-*.whl "$CACHE/"
  WHEEL=$(find "$CACHE" -name "horovod-$VERSION-*.whl" | head -n 1)
  say "kept $WHEEL"
fi

"$PYTHON" -m pip install -q --no-deps --force-reinstall "$WHEEL"
"$PYTHON" -m pip install -q cloudpickle packaging psutil pyyaml
works || {
  say "installed, but it does not import:"
  "$PYTHON" -c 'import horovod.tensorflow' >&2 || exit 1
}
say "installed horovod $VERSION from $WHEEL"
