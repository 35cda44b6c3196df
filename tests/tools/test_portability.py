# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What tests/portability calls wrong, the page it writes, and whether that is of today."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
import triton
from custom.dispatch import backends
from custom.dispatch.registry import SPECS

from ..portability.__main__ import RESULTS, ROOT, TABLE, against, paths, unknown
from ..portability.cases import cases
from ..portability.gpus import GPUS, TRITONS, WHOLE
from ..portability.offset import OFF, off
from ..portability.pretend import bare, drawn
from ..portability.report import table
from ..portability.sass import late_constants, wrong_descriptors

FITS = dict(kernel="hopper.a.b", unit="wgmma", shared=200 * 1024, tensor=0)
PLAIN = dict(kernel="a.c", unit="mma.sync", shared=1, tensor=0)


def test_what_is_kept_names_kernels_that_there_are():
    """A renamed file keeps its kernels' keys, so a sample alone would seldom tell."""
    kernels = {each["kernel"] for each in json.loads(RESULTS.read_text()).values()}
    files = {ROOT / "cuda_ops" / f"{x.rpartition('.')[0].replace('.', '/')}.py" for x in kernels}
    assert not [str(file) for file in files if not file.exists()]


def case(*launches, refused=None):
    return dict(op="npu_a", label="small", launches=launches, refused=refused)


@pytest.mark.parametrize(
    "capability, change, said",
    [
        (90, {}, None),
        (90, dict(shared=228 * 1024), "needs 228.0 KiB of shared memory, there are 227"),
        (100, dict(unit="tcgen05", tensor=528), "528 columns of tensor memory"),
        (100, {}, "takes wgmma"),
        (90, dict(error="RuntimeError: no"), "hopper.a.b: RuntimeError: no"),
    ],
)
def test_what_does_not_compile_or_fit_is_wrong(capability, change, said):
    found = against(case("x"), capability, {"x": FITS | change})
    assert len(found) == (said is not None) and (said is None or said in found[0])


def test_tensors_move_off_16_bytes_as_far_as_the_op_takes_them():
    pair, index = torch.empty(4, 6, 16).bfloat16(), torch.zeros(4, dtype=torch.int32)
    key, value, scales = pair[:2], pair[2:], torch.empty(4, 16)
    given = dict(key=key, value=[value, None], scales=scales, index=index)

    def refusal(x):
        return None if x["scales"].is_contiguous() else "npu_a: `scales` is not contiguous"

    x = off(given, OFF[", rows off 16 bytes"], refusal)
    assert x["key"].storage_offset() == 1 and x["index"] is index
    assert x["value"][0].storage_offset() == 1 + 2 * 6 * 16 and x["value"][1] is None
    assert x["key"].untyped_storage()._cdata == x["value"][0].untyped_storage()._cdata
    assert x["scales"].storage_offset() == 1 and x["scales"].stride() == (16, 1)
    given["scales"] = torch.empty(4, 1)
    longer = off(given, OFF[", rows 8 numbers longer"], lambda x: None)["scales"]
    assert longer.storage_offset() == 0 and longer.stride() == (9, 1)
    with pytest.raises(ValueError, match="no"):
        off(given, OFF[", rows off 16 bytes"], lambda x: "npu_a: no")


def test_another_path_with_another_triton_is_wrong():
    results = {"x": FITS, "y": PLAIN}
    found = {(90, v): dict(cases=[case(key)]) for v, key in (("3.6.0", "x"), ("3.9.0", "y"))}
    assert "hopper.a.b" in paths(found, results)[0]
    found[90, "3.9.0"]["cases"][0]["refused"] = "a sentence"
    assert not paths(found, results)


def test_the_page_says_path_and_size_and_what_is_refused():
    found = {pair: dict(cases=[case("x" if pair[0] == 90 else "y")]) for pair in WHOLE}
    for version in ("3.6.0", "3.7.1"):
        found[100, version] = dict(cases=[case(refused="not there")])
    page = table(found, {"x": FITS, "y": PLAIN})
    b200 = "refused (3.6.0, 3.7.1) / plain, 1 (3.9.0)"
    assert f"| `npu_a` | plain, 1 | plain, 1 | Hopper, 200 | {b200} | plain, 1 |" in page
    assert "- `npu_a` on sm_100 with Triton 3.6.0 and 3.7.1: not there" in page


def test_every_op_with_kernels_has_a_row():
    ours = {spec.name for spec in SPECS if backends.has_kernel(backends.CUDA, spec)}
    assert {op for op, _, _ in cases()} == ours
    assert set(re.findall(r"^\| `(\w+)` \|", TABLE.read_text(), re.M)) == ours


def test_the_triton_that_make_test_installs_is_in_the_matrix():
    found = re.search(r"^TRITON := triton==(\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None and found[1] in TRITONS


@pytest.mark.skipif(triton.__version__ not in TRITONS, reason="this Triton is not in the matrix")
@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are pretended where there is none")
@pytest.mark.parametrize("capability", GPUS)
def test_the_matrix_is_of_today(capability):
    """Every launch of this Triton is known, and one of every op compiles to what is kept of it."""
    command = [sys.executable, "-m", "tests.portability", "--check", "--jobs", "1"]
    done = subprocess.run(
        [*command, "--gpu", str(capability), "--triton", triton.__version__],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_not_known_is_named_with_the_command():
    names = {"x": "a.c", "y": "a.d", "z": "a.d"}
    assert unknown(names, dict.fromkeys(names, PLAIN)) is None
    said = unknown(names, {"x": PLAIN})
    assert said == "results.json is not of today's a.d: run `make portability`"


def test_a_sample_has_launches_of_every_op_that_are_known():
    found = [dict(op="a", launches=["u", "v", "w"]), dict(op="b", launches=["x"])]
    assert set(drawn(found, dict.fromkeys("vwx"), 9)) == {"v", "w", "x"}
    assert len(drawn(found, dict.fromkeys("vwx"), 1)) == 2


TOLD = '''\
def a(x):  # of nothing
    """What it does,

    at length."""

    # why
    if x:
        'briefly'
        return b(x, '# none')  # told
    return c'''


def test_words_about_a_kernel_are_not_what_it_compiles_to():
    plain = "def a(x):\n    if x:\n        return b(x, '# none')\n    return c"
    assert bare(TOLD) == bare(plain) == plain
    assert bare(TOLD.replace("b(x", "b(-x")) != plain


def test_the_layout_of_a_kernel_is_not_what_it_compiles_to():
    wide = "def a(x, y):\n    return b(x, y)"
    tall = "def a(\n    x,\n    y,\n):\n    return b(\n        x,\n        y,\n    )"
    assert bare(wide) == bare(tall)


@pytest.mark.parametrize(
    "base, wrong",
    [("UMOV UR6, URZ", False), ("ULDC.64 UR6, c[0x0][0x260]", True), ("UMOV UR6, 0x400", True)],
)
@pytest.mark.parametrize("word", ["0x40000040", "-0x7fffffe0", "-0x3ffffff0"])
def test_a_descriptor_with_another_base_is_wrong(base, wrong, word):
    """What ptxas 12.8 made of two products of chunk KDA, and what it should have."""
    lines = (base, "UIADD3 UR8, UP0, UR6, 0x20, URZ", f"UIADD3.X UR9, UR6, {word}, URZ, UP0, !UPT")
    sass = "\n".join(f"        /*{16 * i:04x}*/    {x} ;" for i, x in enumerate(lines))
    assert wrong_descriptors(sass) == ([lines[2]] if wrong else [])


def test_sums_of_addresses_are_no_descriptors():
    lines = ("ULDC.64 UR6, c[0x0][0x260]", "UIADD3.X UR9, UR7, -0x1, URZ, UP0, !UPT")
    assert not wrong_descriptors("\n".join(f"        /*0000*/    {x} ;" for x in lines))


@pytest.mark.parametrize("constant", ["MOV R129, 0x3c003c00", "IMAD.MOV.U32 R131, RZ, RZ, RZ"])
def test_a_constant_comes_too_late_behind_the_product_that_reads_it(constant):
    """What ptxas 12.8 made of two products of KDA's gradient with one left operand."""
    product = "HGMMA.64x32x16.F32 R40, R128, gdesc[UR8], R40"
    waited = "WARPGROUP.DEPBAR.LE gsb0, 0x0"

    def late(*lines):
        return late_constants("\n".join(f"        /*0000*/    {x} ;" for x in lines))

    assert late(product, constant, product) == [constant]
    assert not late(constant, product, product)
    assert not late(product, waited, constant, product)
    assert not late(product, constant.replace("R1", "R2"), product)
    assert not late(product, constant, product.replace("R128", "R64"))
