# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What tests/portability calls wrong, and the page it writes."""

from __future__ import annotations

import pytest

from .portability.__main__ import against, paths
from .portability.gpus import WHOLE
from .portability.report import table
from .portability.sass import wrong_descriptors

FITS = dict(kernel="hopper.a.b", unit="wgmma", shared=200 * 1024, tensor=0)
PLAIN = dict(kernel="a.c", unit="mma.sync", shared=1, tensor=0)


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


def test_another_path_with_another_triton_is_wrong():
    results = {"x": FITS, "y": PLAIN}
    found = {(90, v): dict(cases=[case(key)]) for v, key in (("3.6.0", "x"), ("3.9.0", "y"))}
    assert "hopper.a.b" in paths(found, results)[0]
    found[90, "3.9.0"]["cases"][0]["refused"] = "a sentence"
    assert not paths(found, results)


def test_the_page_says_path_and_size_and_what_is_refused():
    found = {pair: dict(cases=[case("x" if pair[0] == 90 else "y")]) for pair in WHOLE}
    found[100, "3.6.0"] = dict(cases=[case(refused="not there")])
    page = table(found, {"x": FITS, "y": PLAIN})
    assert "| `npu_a` | plain, 1 | plain, 1 | Hopper, 200 | refused / plain, 1 | plain, 1 |" in page
    assert "- `npu_a` on sm_100 with 3.6.0: not there" in page


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
