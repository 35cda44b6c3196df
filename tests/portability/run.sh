#!/usr/bin/env bash
# Compiles every CUDA kernel for GPUs that are not here: sets up .portability/ (once), then runs
# `python -m tests.portability` with the environment of `make test`.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.portability
python=$PWD/.venv/bin/python
mkdir -p "$home"
# each version in a folder of its own, but the one that is installed
wanted="import triton; from tests.portability.gpus import WHOLE
print(*{version for _, version in WHOLE} - {triton.__version__})"
for version in $("$python" -c "$wanted"); do
  [ -e "$home/triton-$version/ready" ] && continue
  rm -rf "$home/triton-$version"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --target "$home/triton-$version" "triton==$version"
  touch "$home/triton-$version/ready"
done
OMP_NUM_THREADS=1 exec nice "$python" -m tests.portability "$@"
