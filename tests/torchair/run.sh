#!/usr/bin/env bash
# Sets up .torchair/ (torch_npu, without its dependencies: no NPU is needed), then runs the checks.
#   tests/torchair/run.sh [--record FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.torchair
versions="torch==2.13.0 torch_npu==2.13.0 numpy pyyaml protobuf packaging pytest==9.2.0"
if [ "$(cat "$home/ready" 2> /dev/null)" != "$versions" ]; then
  [ -x "$home/bin/python" ] || "${PYTHON:-python3}" -m venv "$home"
  pip="$home/bin/python -m pip --quiet --disable-pip-version-check"
  $pip install torch==2.13.0 numpy pyyaml protobuf packaging pytest==9.2.0
  $pip install --no-deps torch_npu==2.13.0
  echo "$versions" > "$home/ready"
fi
# torch must not load the NPU extension by itself: there is no CANN
export TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1
check() {
  local name=$1 file=$2
  [ -z "${record:-}" ] || set -- "$@" --record-graph "$record/$name.json"
  shift 2
  nice "$home/bin/python" -m pytest --quiet "tests/torchair/$file" "$@"
}
record=
if [ "${1:-}" = --record ]; then record=$2; fi
check ge ge_checks.py
# these import torch_npu itself, over stand-ins for CANN's libraries
"$home/bin/python" tests/torchair/cann.py "$home/cann"
export LD_LIBRARY_PATH="$home/cann${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
GRAPH_BACKEND=npugraph_ex check npugraph_ex graph_checks.py
GRAPH_BACKEND=reduce-overhead check reduce-overhead graph_checks.py
record= check schemas schema_checks.py
