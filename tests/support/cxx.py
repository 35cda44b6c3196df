# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A C++ compiler for packages of AOTInductor: one that links libstdc++ as a shared library.

Where a compiler finds the archive only, a package brings a libstdc++ of its own.  The two mix up
their locales, and the process dies in std::regex, with which a package reads its device's name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """#!/bin/sh
case " $* " in *" -shared "*) set -- "$@" -Wl,{library} ;; esac
exec {compiler} "$@"
"""


@pytest.fixture(scope="session")
def cxx(tmp_path_factory) -> str:
    """The usual compiler; if it links the archive, a script that names the loaded library first."""
    usual, folder = os.environ.get("CXX", "g++"), tmp_path_factory.mktemp("cxx")
    if sys.platform != "linux" or shutil.which(usual) is None or links_shared(usual, folder):
        return usual
    script = folder / "g++"
    script.write_text(SCRIPT.format(compiler=usual, library=loaded()))
    script.chmod(0o755)
    return str(script)


def links_shared(compiler: str, folder: Path) -> bool:
    made = folder / "probe.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", made]
    subprocess.run(command, input=b"int *f() { return new int; }", check=True)
    return b"libstdc++.so" in made.read_bytes()


def loaded() -> str:
    """The libstdc++ of this process, which imported torch."""
    maps = Path("/proc/self/maps").read_text().split()
    return next(word for word in maps if "/libstdc++.so" in word)
