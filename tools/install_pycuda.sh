#!/bin/sh
# Builds PyCUDA and installs it. Needs g++ and Python's headers, but neither the CUDA toolkit nor a driver nor a GPU.
#
#   tools/install_pycuda.sh [python]     into the environment of that Python, where torch is already (.venv/bin/python)
#
# PyCUDA includes two headers of CUDA and links one library, the driver's. The headers come out of NVIDIA's wheels, of the
# CUDA that torch is built for, and are needed only here. So is the library: an empty one with the driver's name.
set -eu
python=$(command -v "${1:-$(dirname "$0")/../.venv/bin/python}")
version=$(sed -n 's/^cuda = \["\(.*\)"\]$/\1/p' "$(dirname "$0")/../pyproject.toml")
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "13.0")')
case $cuda in 12.*) suffix=-cu12 ;; *) suffix= ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

install() { "$python" -m pip install --disable-pip-version-check --quiet "$@"; }
option() { echo "--config-settings=--build-option=--conf:$1"; }

echo "$version: with headers of CUDA $cuda; compiling takes a minute or two"
install --no-deps --target "$work/cuda" "nvidia-cuda-runtime$suffix==$cuda.*" "nvidia-cuda-profiler-api$suffix==$cuda.*"
headers=$(find "$work/cuda" \( -name cuda.h -o -name cudaProfiler.h \) -printf '"%h", ')
g++ -shared -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so" -x c /dev/null
# Nothing is taken from the empty library, but PyCUDA is to load the driver, which has its name.
export LDFLAGS="${LDFLAGS:-} -Wl,--no-as-needed"
install --no-cache-dir --no-binary pycuda "$version" "$(option CUDA_ENABLE_CURAND=False)" \
    "$(option "CUDA_INC_DIR=[$headers]")" "$(option "CUDADRV_LIB_DIR=[\"$work\"]")"
echo "$version is installed for $python"
