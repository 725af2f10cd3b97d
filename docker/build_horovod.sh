#!/bin/sh
# Builds Horovod's wheel from its PyPI source against the installed TensorFlow, keeps it in a cache,
# and installs it. Run again, it installs the cached wheel, or does nothing.
#
# Horovod 0.28.1 is mended, so the wheel's version ends in +sparkdl1: the second connection among the
# ranks took another network interface than HOROVOD_GLOO_IFACE says; over Gloo the check for stalled
# ranks knew no ranks, so that it never ended a wait; and for GPUs it wants what TensorFlow 2.21 no
# longer has.
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
MENDED=$VERSION+sparkdl1

say() { echo "build_horovod: $*" >&2; }

if ! TAG=$("$PYTHON" -c '
import sys, importlib.metadata as m, platform
there = {d.metadata["Name"].replace("_", "-"): d.version for d in m.distributions()}
tensorflow = there.get("tensorflow") or there["tensorflow-cpu"].replace("+", "-") + "-cpu"
print("tf{}-cp{}{}-{}".format(tensorflow, *sys.version_info[:2], platform.machine()))
' 2>/dev/null); then
  say "TensorFlow is not installed for $PYTHON; install it first: Horovod is built against it"
  exit 1
fi
CACHE=${SPARKDL_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/sparkdl/wheels}/$TAG${GPU:+-$GPU}
mkdir -p "$CACHE"

installed() {
  "$PYTHON" - "$MENDED" <<'PY'
import sys, importlib.metadata as m
try:
    sys.exit(m.version("horovod") != sys.argv[1])
except m.PackageNotFoundError:
    sys.exit(1)
PY
}

works() { "$PYTHON" -c 'import horovod.tensorflow' >/dev/null 2>&1; }

if installed && works; then
  say "horovod $MENDED is installed for $TAG and imports"
  exit 0
fi

WHEEL=$(find "$CACHE" -name "horovod-$MENDED-*.whl" | head -n 1)
if [ -z "$WHEEL" ]; then
  missing=""
  for package in libhighwayhash-dev libfarmhash-dev cmake make g++; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
  done
  HEADERS=$("$PYTHON" -c '
import os, sys, sysconfig
there = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print("" if there else "python{}.{}-dev".format(*sys.version_info[:2]))
')
  missing="$missing${HEADERS:+ $HEADERS}" # a Python of one's own build brings its headers along
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

  PYTHONPATH="$WORK/tools" "$PYTHON" -m pip download -q --no-deps --no-build-isolation \
    --no-binary :all: -d "$WORK" "horovod==$VERSION"
  tar xzf "$WORK/horovod-$VERSION.tar.gz" -C "$WORK"
  SOURCE=$WORK/horovod-$VERSION
  sed -i '/^void GlooContext::InitializeForProcessSet/,/^}/ s/device_attr.iface = gloo_iface_;/gloo_iface_ = global_context.gloo_iface_;\n  &/' \
    "$SOURCE/horovod/common/gloo/gloo_context.cc"
  sed -i 's/global_ranks_.reserve(size_);/global_ranks_.resize(size_);/' \
    "$SOURCE/horovod/common/gloo/gloo_controller.cc"
  # assigned to in a template that nobody uses; g++ 14 looks at it all the same
  sed -i 's/^  const size_type count_;/  size_type count_;/' \
    "$SOURCE/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
  # On GPUs two things of TensorFlow are gone: the interface of operations for XLA, which Horovod has
  # only if HOROVOD_ENABLE_XLA_OPS asks for it, and a function that gave the stream's CUDA handle.
  sed -i 's/^#if HAVE_GPU$/#if 0/' "$SOURCE/horovod/tensorflow/xla_mpi_ops.cc"
  cat >"$WORK/include/gpu_stream_value.h" <<'CPP'
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
CPP
  sed -i '0,/^#endif \/\/ HAVE_GPU$/ s//#include "gpu_stream_value.h"\n&/' \
    "$SOURCE/horovod/tensorflow/mpi_ops.cc"
  sed -i "s/__version__ = '$VERSION'/__version__ = '$MENDED'/" "$SOURCE/horovod/__init__.py"
  if ! grep -q 'gloo_iface_ = global_context' "$SOURCE/horovod/common/gloo/gloo_context.cc" ||
    ! grep -q 'resize(size_)' "$SOURCE/horovod/common/gloo/gloo_controller.cc" ||
    ! grep -q '^#if 0$' "$SOURCE/horovod/tensorflow/xla_mpi_ops.cc" ||
    ! grep -q gpu_stream_value.h "$SOURCE/horovod/tensorflow/mpi_ops.cc" ||
    ! grep -q "$MENDED" "$SOURCE/horovod/__init__.py"; then
    say "the source of horovod $VERSION is not what this script mends"
    exit 1
  fi

  # Horovod leaves out some headers of the standard library, which g++ 13 no longer brings along
  INCLUDES="-include cstdint -include stdexcept -include string"
  say "building horovod $MENDED for $TAG (some minutes)"
  CPLUS_INCLUDE_PATH="$WORK/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" \
    PYTHONPATH="$WORK/tools" \
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
    HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    CXXFLAGS="$INCLUDES${CXXFLAGS:+ $CXXFLAGS}" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    MAKEFLAGS="-j$JOBS" CMAKE_BUILD_PARALLEL_LEVEL="$JOBS" \
    "$PYTHON" -m pip wheel --no-deps --no-build-isolation --no-cache-dir \
    -w "$WORK/wheel" "$SOURCE" >"$CACHE/build.log" 2>&1 || {
    say "the build failed; errors in $CACHE/build.log, and its end:"
    grep -n -A 5 -i 'CMake Error\|[^a-z]error:' "$CACHE/build.log" | head -n 30 >&2
    tail -n 10 "$CACHE/build.log" >&2
    exit 1
  }
  # moved last, so that a build that was cut off leaves no wheel in the cache
  mv "$WORK"/wheel/horovod-*.whl "$CACHE/"
  WHEEL=$(find "$CACHE" -name "horovod-$MENDED-*.whl" | head -n 1)
  say "kept $WHEEL"
fi

"$PYTHON" -m pip install -q --no-deps --force-reinstall "$WHEEL"
"$PYTHON" -m pip install -q cloudpickle packaging psutil pyyaml
works || {
  say "installed, but it does not import:"
  "$PYTHON" -c 'import horovod.tensorflow' >&2 || exit 1
}
say "installed horovod $MENDED from $WHEEL"
