#!/usr/bin/env bash
# Compiles every CUDA kernel for GPUs that are not here: sets up .portability/ (once), then runs
# `python -m tests.portability` with the environment of `make test`.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.portability
python=$PWD/.venv/bin/python
mkdir -p "$home"
# each version in a folder of its own
for version in $("$python" -c "from tests.portability.gpus import TRITONS; print(*TRITONS)"); do
  [ -e "$home/triton-$version/ready" ] && continue
  rm -rf "$home/triton-$version"
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --target "$home/triton-$version" "triton==$version"
  touch "$home/triton-$version/ready"
done
if [ ! -e "$home/guard.so" ]; then
  torch=$("$python" -c "import torch; print(torch.__path__[0])")
  c++ -shared -fPIC -std=c++17 -I"$torch/include" tests/portability/guard.cpp -L"$torch/lib" -lc10 \
    -o "$home/guard.so"
fi
OMP_NUM_THREADS=1 exec nice "$python" -m tests.portability "$@"
