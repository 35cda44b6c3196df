#!/usr/bin/env bash
# A second model of time (second.py) beside ours: sets up .msop/ (once), and what run.sh sets up.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.msop
versions="msopmodeling==1.0.9"

if [ "$(cat "$home/ready" 2> /dev/null)" != "$versions" ]; then
  mkdir -p "$home"
  [ -x "$home/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$home/venv"
  "$home/venv/bin/python" -m pip --quiet --disable-pip-version-check install "$versions"
  echo "$versions" > "$home/ready"
fi
exec tests/ascend/run.sh --second "$@"
