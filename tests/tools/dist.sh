#!/usr/bin/env bash
# Builds wheel and sdist into dist/, installs the wheel where nothing of this repository is (the
# environments are below .dist/, set up once), runs a smoke test in each, and the sdist's own tests in
# one.  Of another that has the wheel and what it requires a bill of materials (CycloneDX) is written
# into sbom/.  A Python that this machine does not have is skipped, and said.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/tools/environments.sh
home=$PWD/.dist
# Python:torch:what of Triton is beside it
corners="3.10:2.7.1: 3.11:2.9.0:triton-ascend==3.2.0 3.12:2.13.0:triton==3.7.1 3.13:2.15.0:"
unpacked=3.12 # where the sdist's tests run
billed=3.13   # what the bill of materials is of
bill_of_materials=cyclonedx-bom==7.5.0

python=${PYTHON:-.venv/bin/python}
rm -rf dist sbom build ./*.egg-info
"$python" -m build --outdir dist . > /dev/null
wheel=$(echo dist/*.whl) sdist=$(echo dist/*.tar.gz)
echo "built $wheel and $sdist"

failed=
for corner in $corners; do
  IFS=: read -r version torch triton <<< "$corner"
  title="Python $version, torch $torch, ${triton:-no Triton}" folder=$home/py$version
  interpreter=$(interpreter "$version")
  if [ -z "$interpreter" ]; then
    echo "$title: skipped, there is no python$version here"
    continue
  fi
  tests=
  [ "$version" != "$unpacked" ] || tests="pytest pytest-xdist hypothesis numpy<2.4 tqdm matplotlib build setuptools>=77,<82"
  if [ ! -e "$folder/ready" ]; then
    set_up "$interpreter" "$torch" "$folder" $tests
    [ -z "$triton" ] || "$folder/bin/python" -m pip install --quiet --no-deps "$triton"
  fi
  "$folder/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall "$wheel"
  if (cd "$home" && "$folder/bin/python" -I "$OLDPWD/tests/tools/smoke.py"); then
    echo "$title: passed"
  else
    echo "$title: FAILED"
    failed=1
  fi
  if [ "$version" = "$billed" ]; then
    if [ ! -e "$home/bill/ready" ]; then
      "$interpreter" -m venv "$home/bill"
      "$home/bill/bin/python" -m pip install --quiet --disable-pip-version-check "$bill_of_materials"
      touch "$home/bill/ready"
    fi
    mkdir sbom
    bill=sbom/$(basename "${sdist%.tar.gz}").cdx.json
    "$home/bill/bin/cyclonedx-py" environment --output-reproducible -o "$bill" "$folder/bin/python"
    "$python" tests/tools/bill.py "$bill" || failed=1
  fi
  if [ -n "$tests" ]; then
    rm -rf "$home/sdist" && mkdir "$home/sdist" && tar -xzf "$sdist" -C "$home/sdist"
    (cd "$home"/sdist/* && OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest --quiet --quick \
      -p no:cacheprovider -n auto --ignore tests/ascend ${DIST_TESTS:-tests}) || failed=1
  fi
done
[ -z "$failed" ]
