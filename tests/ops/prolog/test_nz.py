# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""FRACTAL_NZ against its definition, element by element."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from custom.dispatch import backends, log
from custom.dispatch.common import nz
from custom.dispatch.errors import NotSupported
from custom.dispatch.registry import BY_NAME
from hypothesis import given, settings
from hypothesis import strategies as st

import custom

from ...support.samples import sample

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


# -------------------------------------------------- what torch_npu formats, by a stand-in for it


class OnNpu(torch.Tensor):
    """A CPU tensor that says it is on an NPU; `get_npu_format` of the stand-in knows it."""

    @property
    def device(self):
        return SimpleNamespace(type="npu", index=0)


def on_npu(tensor: torch.Tensor, number: int = 2) -> torch.Tensor:
    moved = tensor.as_subclass(OnNpu)
    moved.npu_format = number
    return moved


@pytest.fixture
def torch_npu(monkeypatch):
    stand_in = SimpleNamespace(get_npu_format=lambda tensor: tensor.npu_format)
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    monkeypatch.setattr(log, "_said", set())


def test_a_weight_in_format_29_is_nz_whatever_is_said(torch_npu, capsys):
    w = on_npu(numbered(32, 48, torch.bfloat16), 29)
    assert nz.is_nz(w, "nd") and nz.is_nz(w, "nz")
    # the reference reads it through PyTorch, which knows the format
    assert nz.to_nd(w, "nd") is w and nz.to_nd(w, "nz") is w
    assert capsys.readouterr().err == ""


def test_a_plain_weight_read_as_nz_on_an_npu_is_said_once(torch_npu, capsys):
    w = on_npu(numbered(32, 48, torch.bfloat16))
    assert not nz.is_nz(w, "nd") and capsys.readouterr().err == ""
    for _ in range(2):
        assert nz.is_nz(w, "nz")
    (line,) = capsys.readouterr().err.splitlines()
    assert "a 2-D weight on npu is read as FRACTAL_NZ bytes" in line


def layer(**formats: int) -> dict:
    """The arguments of the layer on an NPU, some in these formats."""
    arguments = sample("npu_sparse_attention_pto", torch.device("cpu"), torch.bfloat16)
    return {
        name: on_npu(value, formats.get(name, 2)) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    } | {"weight_format": "nz"}


def test_what_lies_as_its_shape_says_is_read(torch_npu):
    assert nz.unreadable(layer()) is None
    # NCHW and NCDHW are names of row-major bytes
    assert nz.unreadable(layer(w_uk=0, kv_cache=30)) is None


OPERANDS = [name for name, value in layer().items() if isinstance(value, torch.Tensor)]
WEIGHTS = {"w_dq", "w_uq_qr", "w_dkv_kr", "w_idx_qb", "w_idx_k", "w_idx_proj"}


@pytest.mark.parametrize("name", sorted(set(OPERANDS) - WEIGHTS))
def test_any_other_operand_in_format_29_is_refused_by_name(name, torch_npu):
    reason = nz.unreadable(layer(**{name: 29}))
    assert reason is not None and reason.startswith(f"`{name}` is in torch_npu's format 29 (FRA")
    assert f"torch_npu.npu_format_cast({name}, 2)" in reason


@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_two_dimensional_weights_in_format_29_are_read(name, torch_npu):
    arguments = layer()
    arguments[name] = on_npu(numbered(32, 48, torch.bfloat16), 29)
    assert nz.unreadable(arguments) is None
    # a whole tile is a tile of another: its format cannot be 29 once more
    arguments[name] = on_npu(custom.to_nz(numbered(32, 48, torch.bfloat16)), 29)
    assert f"`{name}` is in torch_npu's format 29" in (nz.unreadable(arguments) or "")
    # torch_npu pads, and the kernel does not know where
    arguments[name] = on_npu(numbered(40, 48, torch.bfloat16), 29)
    assert f"`{name}` is in torch_npu's format 29" in (nz.unreadable(arguments) or "")


@pytest.mark.parametrize("number", [3, 4, 12, 32, 33, 50, 54])
def test_other_tiled_formats_are_refused(number, torch_npu):
    assert f"format {number} (" in (nz.unreadable(layer(w_dq=number)) or "")


def test_ops_without_weights_refuse_2d_operands_too(torch_npu):
    beta = on_npu(torch.zeros(32, 16), 29)
    assert "`beta` is in torch_npu's format 29" in (nz.unreadable({"beta": beta}) or "")


def test_every_op_asks_before_it_runs_on_an_npu(torch_npu, monkeypatch):
    monkeypatch.setattr(backends, "cannot_run", lambda *_: None)
    found = backends.Launcher(lambda **_: "ran", lambda **_: None, lambda _: None)
    monkeypatch.setattr(backends, "launcher", lambda *_: found)
    monkeypatch.setattr(backends, "choose", lambda key: backends.NPU)
    monkeypatch.setattr(backends, "made_current", lambda device: nullcontext())
    spec = BY_NAME["npu_sparse_attention_pto"]
    arguments = layer()
    assert backends.runner(spec, "PrivateUse1", arguments).function(**arguments) == "ran"
    with pytest.raises(NotSupported, match=r"npu +`w_uk` is in torch_npu's format 29"):
        backends.runner(spec, "PrivateUse1", layer(w_uk=29))
