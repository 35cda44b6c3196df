# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""FRACTAL_NZ against its definition, element by element."""

from __future__ import annotations

import pytest
import torch
from custom.dispatch import log
from custom.dispatch.common import nz
from hypothesis import given, settings
from hypothesis import strategies as st

import custom

TILE = {
    torch.bfloat16: 16,
    torch.float16: 16,
    torch.float32: 8,
    torch.float64: 4,
    torch.int8: 32,
    torch.float8_e4m3fn: 32,
}


def numbered(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * columns) % 113).view(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", TILE, ids=str)
@pytest.mark.parametrize("shape", [(16, 32), (48, 64), (17, 33), (1, 1), (5, 70)], ids=str)
def test_every_element_lies_where_the_definition_says(shape, dtype):
    (K, N), c0 = shape, TILE[dtype]
    w = numbered(K, N, dtype)
    z = custom.to_nz(w)
    assert z.shape == (-(-N // c0), -(-K // 16), 16, c0) and z.is_contiguous()
    seen = torch.zeros(z.shape, dtype=torch.bool)
    for k in range(K):
        for n in range(N):
            at = n // c0, k // 16, k % 16, n % c0
            assert z[at].float() == w[k, n].float()
            seen[at] = True
    assert (z.float()[~seen] == 0).all()


@settings(max_examples=40, deadline=None)
@given(K=st.integers(1, 70), N=st.integers(1, 70), batch=st.integers(0, 2), bits=st.integers(0, 5))
def test_round_trip_is_exact(K, N, batch, bits):
    dtype = list(TILE)[bits]
    w = numbered(max(batch, 1) * K, N, dtype).view(*[batch] * bool(batch), K, N)
    back = custom.from_nz(custom.to_nz(w), (K, N))
    assert back.dtype is dtype and back.is_contiguous()
    assert torch.equal(back.float(), w.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_flat_form_has_the_same_bytes_under_the_row_major_shape(dtype):
    w = numbered(32, 48, dtype)
    flat = custom.to_nz(w, flat=True)
    assert flat.shape == w.shape
    assert torch.equal(flat.flatten(), custom.to_nz(w).flatten())
    assert torch.equal(custom.from_nz(flat), w)


def test_noncontiguous_weights_convert():
    w = numbered(48, 32, torch.bfloat16).t()
    assert torch.equal(custom.from_nz(custom.to_nz(w)), w)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: custom.to_nz(torch.zeros(3)), r"^to_nz: `w` has shape \[3\]"),
        (lambda: custom.to_nz(torch.zeros(17, 16), flat=True), "^to_nz: .* padding changes"),
        (lambda: custom.from_nz(torch.zeros(2, 2, 16, 16)), "^from_nz: `z` has shape"),
        (lambda: custom.from_nz(torch.zeros(17, 16)), "^from_nz: `z` has shape"),
        (lambda: custom.from_nz(torch.zeros(2, 2, 16, 8), (40, 16)), "^from_nz: `shape` is"),
        (lambda: custom.from_nz(torch.zeros(2, 2, 16, 8), (32,)), r"^from_nz: `shape` is \(32,\)"),
        (lambda: custom.from_nz(torch.zeros(2, 2, 16, 8), 32), "^from_nz: `shape` is 32, expected"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("convert", [custom.to_nz, custom.from_nz])
def test_something_that_is_no_tensor(convert):
    with pytest.raises(TypeError, match=rf"^{convert.__name__}: `.` is of type list, expected Ten"):
        convert([[1.0]])


def test_how_a_weight_argument_is_read(capsys, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    w = numbered(32, 48, torch.bfloat16)
    assert nz.to_nd(w, "nd") is w
    assert torch.equal(nz.to_nd(custom.to_nz(w), "nd"), w)
    assert torch.equal(nz.to_nd(custom.to_nz(w), "nz"), w)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert torch.equal(nz.to_nd(custom.to_nz(w, flat=True), "nz"), w)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "FRACTAL_NZ" in lines[0] and 'weight_format="nd"' in lines[0]
