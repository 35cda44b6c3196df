# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Whether every CUDA kernel is still compiled to the PTX that it was at another revision.

    python -m tests.support.same_ptx REV [--gpu 90 80] [--only PART ...]

The launchers run all cases of tests/portability (or those with PART in `op | label`) on a GPU that
is pretended, there and here; what they launch is compared launch by launch, without names of
kernels and lines of source.  Needs no GPU, but .portability/ (tests/portability/run.sh sets it up).
What REV compiles to is kept there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from difflib import unified_diff
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".portability"

Found = dict[str, Any]  # cases: label -> keys of what is launched; kernels: key -> name, PTX


def plain(name: str, ptx: str) -> str:
    """PTX without the kernel's name, comments and where its lines come from."""
    lines = (line.partition("//")[0].rstrip() for line in ptx.splitlines())
    dropped = (".file", ".loc")
    kept = [line for line in lines if line and not line.lstrip().startswith(dropped)]
    return re.sub(rf"\b{re.escape(name)}(?=\b|_param_)", "kernel", "\n".join(kept))


def collect(capability: int, out: str, parts: list[str]) -> None:
    """In the tree that is at the head of sys.path, which has its own cases and launchers."""
    import torch
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    from tests.portability import pretend

    torch.set_num_threads(1)
    # PTX is what is compared: ptxas has nothing to say
    CUDABackend.make_cubin = lambda *_: b""
    pretend.facts = lambda binary: dict(name=binary.metadata.name, ptx=binary.asm["ptx"])
    pretend.pretend(capability)
    recorder = pretend.Recorder()
    cases = pretend.gather(recorder, parts)
    kernels: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TRITON_CACHE_DIR"] = scratch
        for i, (key, (name, compile)) in enumerate(recorder.of.items(), 1):
            found = pretend.in_child(compile)
            ptx = plain(found["name"], found["ptx"]) if "ptx" in found else found["error"]
            kernels[key] = dict(name=name, ptx=ptx)
            print(f"  sm_{capability}, {triton.__version__}: {i} of {len(recorder.of)}, {name}")
    labels = {f"{case['op']} | {case['label']}": case["launches"] for case in cases}
    Path(out).write_text(json.dumps(dict(cases=labels, kernels=kernels)))


def found_in(tree: Path, capability: int, parts: list[str], out: Path) -> Found:
    command = [sys.executable, str(Path(__file__)), "--collect", str(capability), str(out), *parts]
    added = dict(PYTHONPATH=str(tree), TRITON_DISABLE_LINE_INFO="1", OMP_NUM_THREADS="1")
    subprocess.run(command, cwd=tree, env=os.environ | added, check=True)
    return json.loads(out.read_text())


def found_at(commit: str, capability: int, parts: list[str]) -> Found:
    """What the revision compiles to, kept for the next time; of a kept whole, its parts."""
    kept, whole = (
        HOME / "ptx" / f"{commit}-{capability}{''.join('-' + part for part in of)}.json"
        for of in (parts, ())
    )
    if whole.exists():
        found = json.loads(whole.read_text())
        every = found["cases"].items()
        chosen = {k: v for k, v in every if not parts or any(part in k for part in parts)}
        return found | dict(cases=chosen)
    if kept.exists():
        return json.loads(kept.read_text())
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            (tree / ".portability").symlink_to(HOME)
            found_in(tree, capability, parts, Path(scratch) / "found.json")
            (Path(scratch) / "found.json").replace(kept)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return json.loads(kept.read_text())


def differences(before: Found, now: Found) -> list[str]:
    """One text for every pair of launches that differ, and every case that launches others."""
    said: dict[str, None] = {}
    for label in sorted(before["cases"].keys() | now["cases"].keys()):
        keys = [x["cases"].get(label) for x in (before, now)]
        if None in keys:
            said[f"{label}: only {'now' if keys[0] is None else 'before'}"] = None
            continue
        there, here = (
            [x["kernels"][key] for key in of] for x, of in zip((before, now), keys, strict=True)
        )
        if len(there) != len(here):
            names = ([x["name"] for x in of] for of in (there, here))
            said["{}: launched {}, now {}".format(label, *map(", ".join, names))] = None
            continue
        for old, new in zip(there, here, strict=True):
            if old["ptx"] != new["ptx"]:
                lines = list(unified_diff(*(x["ptx"].splitlines() for x in (old, new)), n=1))
                first = "\n    ".join(line.rstrip() for line in lines[2:12])
                said[f"{old['name']}, now {new['name']}: {len(lines)} lines\n    {first}"] = None
    return list(said)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.same_ptx")
    parser.add_argument("revision")
    parser.add_argument("--gpu", type=int, nargs="*", default=[90, 80])
    parser.add_argument("--only", nargs="*", default=[], help="cases with this in `op | label`")
    options = parser.parse_args()
    command = ["git", "-C", str(ROOT), "rev-parse", f"{options.revision}^{{commit}}"]
    commit = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
    wrong = []
    for capability in options.gpu:
        before = found_at(commit, capability, options.only)
        with tempfile.TemporaryDirectory() as scratch:
            now = found_in(ROOT, capability, options.only, Path(scratch) / "found.json")
        different = differences(before, now)
        wrong += [f"sm_{capability}: {x}" for x in different]
        print(
            f"sm_{capability}: {len(now['cases'])} cases, {len(now['kernels'])} kernels, "
            f"{len(different)} differences"
        )
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--collect"]:
        collect(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
