# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""python cann.py FOLDER: empty shared libraries in the place of CANN's.

With FOLDER in LD_LIBRARY_PATH, `import torch_npu` works on a machine without CANN, and finds no
device.  Every function that torch_npu's own libraries lack is there, and returns 0.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = Path(sysconfig.get_paths()["platlib"])
# these are called while torch_npu is imported, and 0 alone would not do
SPECIAL = """
#include <stdarg.h>
#include <stdio.h>
int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910_9392"; }
int vsnprintf_s(char *to, unsigned long size, unsigned long count, const char *f, va_list list) {
  (void)count;
  return vsnprintf(to, size, f, list);
}
int snprintf_s(char *to, unsigned long size, unsigned long count, const char *f, ...) {
  (void)count;
  va_list list;
  va_start(list, f);
  int written = vsnprintf(to, size, f, list);
  va_end(list);
  return written;
}
"""


def lines(*command: str | Path) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.splitlines()


def symbols(library: Path, which: str) -> set[str]:
    return {line.split()[-1].partition("@")[0] for line in lines("nm", "-D", which, library)}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    npu = PACKAGES / "torch_npu"
    ours = [*npu.glob("*.so"), *npu.glob("lib/*.so"), *npu.glob("dynamo/torchair/core/*.so")]
    ours += (PACKAGES / "torch_npu.libs").glob("*")
    missing, found = set(), {*ours, *(PACKAGES / "torch" / "lib").glob("*.so*")}
    for library in ours:
        for line in lines("ldd", library):
            name, _, path = line.strip().partition(" => ")
            if path == "not found":
                missing.add(name)
            elif path.startswith("/"):
                found.add(Path(path.split()[0]))
    defined = set().union(*(symbols(library, "--defined-only") for library in found))
    undefined = set().union(*(symbols(library, "--undefined-only") for library in ours)) - defined
    special = [name for name in undefined if f"{name}(" in SPECIAL]
    plain = [n for n in undefined if n not in special and not n.startswith(("Py", "_Py"))]
    source = folder / "stand_in.c"
    functions = (f"long {name}(void) {{ return 0; }}\n" for name in sorted(plain))
    source.write_text(SPECIAL + "".join(functions))
    library = folder / "libstand_in.so"
    # -w: some names are the compiler's own, with other parameters
    command = ["cc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", library, source]
    subprocess.run(command, check=True)
    in_torch = {path.name for path in found}
    for name in missing - in_torch:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
