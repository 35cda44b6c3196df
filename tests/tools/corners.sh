#!/usr/bin/env bash
# The oldest and the newest Python and torch: a part of the suite on the CPU, in environments below
# .corners/ that are set up once.  A Python that this machine does not have is skipped, and said.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD/.corners
corners="3.10:2.8.0 3.13:2.15.0"
quick="tests/contracts/test_contracts.py tests/ops/prolog/test_nz.py tests/ops/indexer/test_lightning_indexer.py
  tests/ops/attention/test_fused_attention.py tests/ops/indexer/test_indexer_loss.py tests/ops/sparse_attention/test_sparse_attention_pto.py
  tests/graphs/test_compile.py tests/contracts/test_layering.py"
# Transformers of today, whose arguments have other names than 5.17's, with the newest corner
models="tests/models/test_integrations.py tests/models/test_attention_interface.py tests/models/test_dsa_models.py
  tests/models/test_block_sparse_use.py"
newest=transformers==5.24.0
needed="pytest pytest-timeout pytest-xdist hypothesis numpy<2.4 tqdm setuptools>=77,<82"

source tests/tools/environments.sh

for corner in $corners; do
  version=${corner%:*} torch=${corner#*:} folder=$home/py$version
  python=$(interpreter "$version")
  if [ -z "$python" ]; then
    echo "corner Python $version, torch $torch: skipped, there is no python$version here"
    continue
  fi
  files=$quick packages=$needed
  [ "$corner" = "${corners##* }" ] && files="$quick $models" packages="$needed $newest"
  [ -e "$folder/ready" ] || set_up "$python" "$torch" "$folder" $packages
  echo "corner Python $version, torch $torch:"
  OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest --quiet --quick --timeout 900 -p no:cacheprovider -n auto $files
done
