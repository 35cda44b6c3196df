#!/usr/bin/env bash
# Sets up .torchair/ (torch_npu, without its dependencies: no NPU is needed), then runs the checks.
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
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
exec nice "$home/bin/python" -m pytest --quiet tests/torchair/ge_checks.py "$@"
