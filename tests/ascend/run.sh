#!/usr/bin/env bash
# Proves the Ascend kernels without an NPU: sets up .ascend/ (once), then runs `python -m tests.ascend`;
# with --estimate OP, tests.ascend.estimate; with --second, tests.ascend.second (second.sh sets it up);
# with --onboard, tests.ascend.onboard, for which the newest compiler is the machine's.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.ascend
# the compilers of January, April and July 2026, side by side
builds="1.0.0 1.1.0 1.2.0"
versions="torch==2.13.0 numpy==2.2.6 pybind11 triton-ascend==3.2.0 ascendnpu-ir: $builds llvm-19"

root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

set_up() {
  mkdir -p "$home"
  command -v cc > /dev/null || { root apt-get update -qq; root apt-get install -y -qq gcc libc6-dev; }
  [ -x "$home/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$home/venv"
  local pip="$home/venv/bin/python -m pip --quiet --disable-pip-version-check"
  $pip install torch==2.13.0 numpy==2.2.6 pybind11
  # without dependencies: it must never share an environment with upstream's triton
  $pip install --no-deps triton-ascend==3.2.0
  local scratch
  scratch=$(mktemp -d)
  # the open part of the Ascend compiler, one wheel of executables a build
  local build
  for build in $builds; do
    $pip download --no-deps --dest "$scratch" "ascendnpu-ir==$build"
    rm -rf "$home/bishengir-$build"
    "$home/venv/bin/python" -m zipfile -e "$scratch/ascendnpu_ir-$build"-*.whl "$home/bishengir-$build"
    # the first release has its files a level deeper
    [ -d "$home/bishengir-$build/ascendnpuir" ] ||
      mv "$home/bishengir-$build"/*.data/purelib/ascendnpuir "$home/bishengir-$build/"
    chmod +x "$home/bishengir-$build"/ascendnpuir/bin/*
  done
  # Debian's MLIR tools, unpacked: nothing is installed system-wide
  local packages="mlir-19-tools libmlir-19 libllvm19 llvm-19"
  (cd "$scratch" && { apt-get download -qq $packages || { root apt-get update -qq; apt-get download -qq $packages; }; })
  rm -rf "$home/mlir"
  for package in "$scratch"/*.deb; do dpkg -x "$package" "$home/mlir"; done
  rm -rf "$scratch"
  echo "$versions" > "$home/ready"
}

[ "$(cat "$home/ready" 2> /dev/null)" = "$versions" ] || set_up
export TRITON_ASCEND_ARCH=Ascend910_9392 CUSTOM_BACKEND=npu OMP_NUM_THREADS=1
# the reference's last bits are those of any x86 machine
export ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2
# nothing that this machine remembers decides about tiles
CUSTOM_CACHE_DIR=$(mktemp -d)
export CUSTOM_CACHE_DIR
trap 'rm -rf "$CUSTOM_CACHE_DIR"' EXIT
main=tests.ascend
case "${1:-}" in
  --estimate)
    main=tests.ascend.estimate
    shift
    ;;
  --second)
    main=tests.ascend.second
    shift
    ;;
  --onboard)
    main=tests.ascend.onboard
    PATH=$home/bishengir-${builds##* }/ascendnpuir/bin:$PATH
    shift
    ;;
esac
nice "$home/venv/bin/python" -m "$main" "$@"
