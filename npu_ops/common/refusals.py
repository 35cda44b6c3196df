# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which tiles the installed Ascend compiler refused, remembered over processes.

    <CUSTOM_CACHE_DIR>/refused/<digest of the compiler's version>/<digest of the entry>.json

An entry is a file of its own and comes by a rename: processes that learn the same at once do not
disturb each other.  What cannot be read is as if it were not there; that costs one compilation.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from threading import Lock

from ...dispatch import log, versions
from ...dispatch.env import config

_COMPILERS = ("bishengir-compile", "npuc")
_ADAPTER = "triton-adapter-opt"
_MEMORIES = {"ub": "UB", "cbuf": "L1", "l1": "L1", "cc": "L0C", "l0c": "L0C"}
_OVERFLOW = r"(\w+) overflow, requires (\d+) bits while (\d+) bits"
_STOPPED = (-2, -9, -15)  # interrupted, out of the host's memory, ended: the compiler said nothing


def _failed(error: BaseException | None) -> tuple[str, subprocess.CalledProcessError] | None:
    """(the tool, how it failed) of the process behind `error`: triton-ascend raises its own."""
    while error is not None:
        if isinstance(error, subprocess.CalledProcessError):
            command = error.cmd if isinstance(error.cmd, list | tuple) else str(error.cmd).split()
            return os.path.basename(command[0]), error
        error = error.__cause__ or error.__context__
    return None


def crashed(error: BaseException | None) -> bool:
    """Whether triton-ascend's adapter ended by a signal of its own.  That of 3.2.0 does at random,
    about once in two thousand times."""
    tool, failed = _failed(error) or ("", None)
    if failed is None or tool != _ADAPTER or failed.returncode in _STOPPED:
        return False
    return failed.returncode < 0


def said(error: BaseException | None) -> tuple[str, bool] | None:
    """(what the compiler said, whether it says so of these tiles every time), or None where `error`
    is not its refusal."""
    tool, failed = _failed(error) or ("", None)
    if failed is None or tool not in _COMPILERS or failed.returncode in _STOPPED:
        return None
    text = "\n".join(_text(x) for x in (failed.stderr, failed.stdout))
    overflow = re.search(_OVERFLOW, text)
    if overflow:
        memory = _MEMORIES.get(overflow[1].lower(), overflow[1])
        wanted, there = (-(-int(overflow[i]) // 8192) for i in (2, 3))
        return f"{memory} overflow, {wanted} KiB of {there}", True
    lines = [line.strip() for line in text.splitlines() if re.search("error|Assert|fail", line)]
    return (lines[0][:200] if lines else f"it ended with {failed.returncode}"), False


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _version() -> str | None:
    """What the installed compiler says of itself, or None where it cannot be asked."""
    try:
        build = versions.compiler()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return build.said if build is not None else None


def compiler() -> str:
    """The installed compiler, in words."""
    return _version() or "the Ascend compiler"


def _root() -> Path | None:
    if config.cache_dir:
        return Path(config.cache_dir).expanduser() / "refused"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "npu-custom-ops/refused" if os.path.isabs(caches) else None


def _folder() -> Path | None:
    """Of the installed compiler; one that does not say its version has none."""
    root, version = _root(), _version()
    if root is None or version is None:
        return None
    both = f"{version} triton-ascend {versions.installed('triton-ascend')}"
    return root / hashlib.sha256(both.encode()).hexdigest()[:16]


_known: set[str] = set()
_looked_in: set[str] = set()
_looking = Lock()


def known() -> set[str]:
    """Every refusal that is remembered where `config.cache_dir` is, and those of this process."""
    if config.cache_dir not in _looked_in:
        with _looking:  # who comes second waits for what the first one finds
            _known.update(_remembered())
            _looked_in.add(config.cache_dir)
    return _known


def forget() -> None:
    """As a new process (tests)."""
    with _looking:
        _known.clear()
        _looked_in.clear()


def _remembered() -> set[str]:
    try:
        root = _root()
        # mostly there is none, and no compiler is asked for its version
        folder = _folder() if root is not None and root.is_dir() else None
        if folder is None or folder.stat().st_uid != os.getuid():
            return set()
        return {_read(path) for path in folder.glob("*.json")} - {""}
    except OSError:
        return set()


def _read(path: Path) -> str:
    try:
        entry = json.loads(path.read_text())
        return str(entry["refused"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def add(refused: str, why: str, always: bool) -> None:
    """Remember for this process; for all where the compiler says so `always`."""
    known().add(refused)
    folder = _folder() if always else None
    if folder is None:
        return
    entry = {"refused": refused, "compiler": compiler(), "said": why}
    name = f"{hashlib.sha256(refused.encode()).hexdigest()[:16]}.json"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, suffix=".new") as scratch:
            (Path(scratch) / name).write_text(json.dumps(entry))
            os.replace(Path(scratch) / name, folder / name)
    except OSError as error:
        log.once(("refusals",), f"what the compiler refuses cannot be remembered: {error}")
