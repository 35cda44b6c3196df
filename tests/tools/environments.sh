# Environments with one Python and one torch, for the CPU: sourced by corners.sh and dist.sh.

# the interpreter of a version: pyenv's (whose shims on the path may refuse), or the path's
interpreter() {
  local found
  for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python "python$1"; do
    if "$found" -c "import venv" 2> /dev/null; then
      echo "$found"
      return
    fi
  done
}

# Libraries that torch's CUDA half is linked with and nothing calls without a GPU: gigabytes, in
# whose place are functions of the same names that do nothing.
stand_ins() {
  local lib=$1 name wanted version prefix
  wanted=$(nm -D -u "$lib"/*.so | awk 'NF == 2 { print $2 }' | sort -u)
  for name in $(readelf -d "$lib"/*.so | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | sort -u); do
    case $name in
      libcudart.* | libcuda.*) continue ;;
      libcu* | libnv* | libnccl*) ;;
      *) continue ;;
    esac
    version=$name prefix=${name#lib}
    case $name in libnvshmem*) version=NVSHMEM ;; esac
    {
      sed -n "s/@$version\$//p" <<< "$wanted"
      grep -i "^${prefix%%.*}[^@]*\$" <<< "$wanted" || true
    } | sed 's/.*/void &(void) {}/' |
      cc -shared -x c - -w -Wl,-soname,"$name" \
        -Wl,--version-script=<(echo "$version { global: *; };") -o "$lib/$name"
  done
}

set_up() { # interpreter, torch's version, folder, packages
  "$1" -m venv "$3"
  local pip="$3/bin/python -m pip --quiet --quiet --disable-pip-version-check"
  $pip install --no-deps "torch==$2"
  # what torch requires, without CUDA's libraries (its runtime is small, and is called) and Triton
  $3/bin/python - > "$3/requirements" << 'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, requires("torch")):
    if each.marker and not each.marker.evaluate({"extra": ""}):
        continue
    if each.name == "cuda-toolkit":
        print(f"cuda-toolkit[cudart]{each.specifier}")
    elif "runtime" in each.name or not each.name.startswith(("nvidia", "cuda", "triton")):
        print(f"{each.name}{each.specifier}")
PYTHON
  $pip install --requirement "$3/requirements" "${@:4}"
  stand_ins "$(echo "$3"/lib/python*/site-packages/torch/lib)"
  touch "$3/ready"
}
