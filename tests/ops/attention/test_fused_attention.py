# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_fused_attention and its backward, against torch's own attention and scalar loops."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from custom.dispatch.common import memory
from custom.dispatch.reference.attention import fused_attention as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.calls import assert_refuses, by_change, runs_once
from ...support.dense import Sizes

OP = "npu_fused_attention"


@dataclass(frozen=True)
class Case(Sizes):
    Dv: int
    causal: bool = False
    window: int | None = None

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(self.B, self.H, self.Nq, self.D, dtype=torch.float64)
        k = torch.randn(self.B, self.Hk, self.Nk, self.D, dtype=torch.float64)
        v = torch.randn(self.B, self.Hk, self.Nk, self.Dv, dtype=torch.float64)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def visible(self) -> Tensor:
        """[Nq, Nk], from the definition."""
        mask = torch.ones(self.Nq, self.Nk, dtype=torch.bool)
        for i in range(self.Nq):
            for j in range(self.Nk):
                position = i + self.Nk - self.Nq
                if self.causal and j > position:
                    mask[i, j] = False
                if self.window is not None and abs(position - j) >= self.window:
                    mask[i, j] = False
        return mask


CASES = [
    Case(B=2, H=2, Hk=2, Nq=33, Nk=33, D=16, Dv=16),
    Case(B=1, H=4, Hk=2, Nq=65, Nk=65, D=64, Dv=64, causal=True),
    Case(B=1, H=3, Hk=1, Nq=1, Nk=130, D=32, Dv=16, causal=True),
    Case(B=2, H=2, Hk=1, Nq=17, Nk=129, D=96, Dv=128, causal=True),
    Case(B=1, H=2, Hk=2, Nq=70, Nk=40, D=64, Dv=32),
    Case(B=1, H=2, Hk=1, Nq=66, Nk=66, D=32, Dv=32, causal=True, window=9),
    Case(B=1, H=2, Hk=2, Nq=40, Nk=90, D=16, Dv=64, window=33),
    Case(B=1, H=1, Hk=1, Nq=20, Nk=24, D=192, Dv=128, causal=True),
    Case(B=1, H=1, Hk=1, Nq=20, Nk=24, D=256, Dv=256),
]


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sm_scale: float | None = None
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=sm_scale, enable_gqa=True
    )


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_attention(case, dtype, device, backend):
    skip_unless_taken(dtype, device, backend)
    inputs = case.inputs(dtype)
    leaves = [x.to(device).requires_grad_() for x in inputs]
    with runs_once(OP, backend), runs_once(f"{OP}_backward", backend):
        o, lse = custom.npu_fused_attention(
            *leaves, causal=case.causal, window=case.window, return_lse=True
        )
        grad_o = torch.randn(o.shape, dtype=torch.float64).to(dtype)
        grads = torch.autograd.grad(o, leaves, grad_o.to(device))

    exact = [x.double().requires_grad_() for x in inputs]
    o_exact = by_torch(*exact, case.visible())
    grads_exact = torch.autograd.grad(o_exact, exact, grad_o.double())
    half = [x.clone().requires_grad_() for x in inputs]
    o_half = by_torch(*half, case.visible())
    grads_half = torch.autograd.grad(o_half, half, grad_o)
    assert_close_to_float64("o", o, o_half, o_exact)
    for name, got, rounded, want in zip("qkv", grads, grads_half, grads_exact, strict=True):
        assert_close_to_float64(f"grad of {name}", got, rounded, want)

    scores = exact[0] @ exact[1].repeat_interleave(case.H // case.Hk, 1).mT / case.D**0.5
    scores = scores.masked_fill(~case.visible(), -torch.inf)
    lse_exact = torch.logsumexp(scores, -1)
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(lse.cpu().double(), lse_exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Nq,Nk", [(7, 3), (3, 0), (0, 3), (64, 17)])
def test_rows_that_see_nothing(Nq, Nk, causal, device, backend):
    case = Case(B=2, H=4, Hk=2, Nq=Nq, Nk=Nk, D=32, Dv=16, causal=causal)
    q, k, v = (x.to(device).requires_grad_() for x in case.inputs(torch.float16))
    o, lse = custom.npu_fused_attention(q, k, v, causal=causal, return_lse=True)
    blind = ~case.visible().any(1).to(device)
    assert (o[:, :, blind] == 0).all() and (lse[:, :, blind] == -math.inf).all()
    assert torch.isfinite(o).all() and torch.isfinite(lse[:, :, ~blind]).all()
    grads = torch.autograd.grad(o.sum(), (q, k, v))
    assert all(torch.isfinite(x).all() for x in grads)
    assert (grads[0][:, :, blind] == 0).all()


@pytest.mark.parametrize("window", [None, 6])
def test_varlen_is_a_sequence_at_a_time(window, device, backend):
    lengths_q, lengths_k, H, Hk = [5, 0, 1, 37, 4], [5, 3, 70, 37, 0], 4, 2
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lengths_q, lengths_k))
    behind = 3  # tokens of no sequence, as a replayed graph has them
    q = torch.randn(int(cu_q[-1]) + behind, H, 32).half()
    k = torch.randn(int(cu_k[-1]) + behind, Hk, 32).half()
    v = torch.randn(int(cu_k[-1]) + behind, Hk, 16).half()
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    o, lse = custom.npu_fused_attention(
        *leaves,
        causal=True,
        window=window,
        cu_seqlens_q=cu_q.to(device),
        cu_seqlens_k=cu_k.to(device),
        return_lse=True,
    )
    grad_o = torch.randn(o.shape).half().to(device)
    grads = torch.autograd.grad(o, leaves, grad_o)
    for i in range(len(lengths_q)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        parts = [
            x[s].detach().transpose(0, 1)[None].requires_grad_()
            for x, s in zip(leaves, (rows, keys, keys), strict=True)
        ]
        one, lse_one = custom.npu_fused_attention(
            *parts, causal=True, window=window, return_lse=True
        )
        torch.testing.assert_close(o[rows], one[0].transpose(0, 1), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse[rows], lse_one[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
        one_grads = torch.autograd.grad(one, parts, grad_o[rows].transpose(0, 1)[None])
        for got, want, s in zip(grads, one_grads, (rows, keys, keys), strict=True):
            torch.testing.assert_close(got[s], want[0].transpose(0, 1), rtol=4e-3, atol=4e-3)
    assert (o[-behind:] == 0).all() and (lse[-behind:] == -math.inf).all()
    assert all((x[-behind:] == 0).all() for x in grads)


def packed(
    tokens: int, sums: tuple[int, ...], kind: torch.dtype, device: torch.device
) -> list[Tensor]:
    """o, lse and the gradients of as many queries as keys, behind the same prefix sums."""
    random = torch.Generator().manual_seed(3)
    q, k, v, grad_o = (torch.randn(tokens, heads, 32, generator=random) for heads in (2, 1, 1, 2))
    leaves = [x.half().to(device).requires_grad_() for x in (q, k, v)]
    ends = torch.tensor(sums, dtype=kind, device=device)
    o, lse = custom.npu_fused_attention(
        *leaves, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends, return_lse=True
    )
    return [o, lse, *torch.autograd.grad(o, leaves, grad_o.half().to(device))]


@pytest.mark.parametrize(
    "kind,beyond",
    [
        (torch.int32, 2**31 - 1),
        (torch.int64, 2**31),
        (torch.int64, 2**32 + 40),
        (torch.int64, 2**62),
    ],
    ids=str,
)
def test_prefix_sums_beyond_the_tensors_end_with_them(kind, beyond, device, backend):
    want = packed(300, (0, 7, 150, 300, 300), kind, device)
    got = packed(300, (0, 7, 150, beyond, beyond), kind, device)
    for x, exact in zip(got, want, strict=True):
        torch.testing.assert_close(x, exact, rtol=2e-3, atol=2e-3)


LATE = [
    ((30, 90, 190), (0, 50, 190)),
    ((0, 96, 0, 96), (0, 32, 64, 96)),
    ((0, 32, 64, 96), (0, 96, 0, 96)),
    ((0, 100, 20, 100, 170), (-9, 50, 100, 20, 150)),
    ((170, 20, -(2**31)), (20, 170, 2**31 - 1)),
]


@pytest.mark.parametrize("sums", LATE, ids=str)
def test_prefix_sums_that_begin_late_or_fall(sums, device, backend, monkeypatch):
    """A sequence begins where all before it have ended; nothing is written outside."""
    fences = []

    def fenced(shape, dtype, device):
        """Between two fences of 64 KiB, made as such: nothing is written while kernels compile."""
        count = math.prod(shape)
        wide = 2**16 // dtype.itemsize
        whole = torch.full((count + 2 * wide,), 7, dtype=dtype, device=device)
        fences.extend((whole[:wide], whole[wide + count :]))
        return whole[wide : wide + count].view(shape)

    monkeypatch.setattr(memory, "empty", fenced)
    T, H, Hk = 190, 4, 2
    q, k, v = torch.randn(T, H, 32).half(), torch.randn(T, Hk, 32).half(), torch.randn(T, Hk, 16)
    leaves = [x.half().to(device).requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in sums)
    o, lse = custom.npu_fused_attention(
        *leaves, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True
    )
    grad_o = torch.randn(o.shape).half().to(device)
    grads = torch.autograd.grad(o, leaves, grad_o)
    assert fences or backend == "reference"
    assert all((x == 7).all() for x in fences)

    want_o, want_lse = torch.zeros_like(o), torch.full_like(lse, -math.inf)
    want = [torch.zeros_like(x) for x in leaves]
    ends = [0, 0]
    for n in range(len(sums[0])):
        pieces = []
        for side, bounds in enumerate(sums):
            end = max(ends[side], min(bounds[n], T))
            pieces.append(slice(ends[side], end))
            ends[side] = end
        if n == 0:
            continue  # before the first sequence
        rows, keys = pieces
        parts = [
            x[s].detach().transpose(0, 1)[None].requires_grad_()
            for x, s in zip(leaves, (rows, keys, keys), strict=True)
        ]
        one, of_one = custom.npu_fused_attention(*parts, causal=True, return_lse=True)
        want_o[rows], want_lse[rows] = one[0].transpose(0, 1), of_one[0].transpose(0, 1)
        given = torch.autograd.grad(one, parts, grad_o[rows].transpose(0, 1)[None])
        for to, x, s in zip(want, given, (rows, keys, keys), strict=True):
            to[s] = x[0].transpose(0, 1)
    torch.testing.assert_close(o, want_o, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    for got, exact in zip(grads, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=4e-3, atol=4e-3)


def test_cuda_refuses_more_rows_than_32_bits_number():
    pytest.importorskip("triton")
    from custom.cuda_ops.attention.fused_attention import unsupported

    x = torch.zeros(1, 1, 1, 16).half()
    many = x.expand(1, 1, 2**30 + 1, 16)
    assert unsupported(q=x, v=many[:, :, 1:]) is None
    packed = many[0].transpose(0, 1), x[0]
    for q, v in ((x, many), (many, x), packed):
        assert "has 1073741825 rows, supported up to 1073741824" in unsupported(q=q, v=v)


def test_strides_of_a_fused_projection(device, backend):
    """q, k, v as slices of one [B, N, 3 H D] product, [B, N, H, D] turned to [B, H, N, D]."""
    B, N, H, D = 2, 19, 3, 32
    whole = torch.randn(B, N, 3 * H * D).half().to(device).requires_grad_()
    q, k, v = (x.view(B, N, H, D).transpose(1, 2) for x in whole.chunk(3, -1))
    o = custom.npu_fused_attention(q, k, v, causal=True)
    want = custom.npu_fused_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(o, want)
    (grad,) = torch.autograd.grad(o.float().square().sum(), whole)
    (grad_want,) = torch.autograd.grad(want.float().square().sum(), whole)
    torch.testing.assert_close(grad, grad_want, rtol=2e-3, atol=2e-3)


def test_halves_merge_by_their_lse(device, backend):
    """What split keys and ring attention do, gradients through lse included."""
    case = Case(B=1, H=2, Hk=2, Nq=9, Nk=40, D=32, Dv=32)
    leaves = [x.to(device).requires_grad_() for x in case.inputs(torch.float16)]
    q, k, v = leaves

    def merged() -> Tensor:
        parts = [
            custom.npu_fused_attention(q, k[:, :, s], v[:, :, s], return_lse=True)
            for s in (slice(0, 13), slice(13, 40))
        ]
        share = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
        return sum(w * o.float() for w, (o, _) in zip(share, parts, strict=True))

    whole = custom.npu_fused_attention(q, k, v)
    got = merged()
    torch.testing.assert_close(got, whole.float(), rtol=2e-3, atol=2e-3)
    grad_o = torch.randn(whole.shape).half().to(device)
    want = torch.autograd.grad(whole, leaves, grad_o)
    for x, y in zip(torch.autograd.grad(got, leaves, grad_o.float()), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_same_bits_when_deterministic(causal, device, backend):
    """Of nine tiles of keys: two addends of a gradient are the same in any order."""
    N = 1100 if device.type != "cpu" or backend == "reference" else 260
    case = Case(B=1, H=4, Hk=1, Nq=N, Nk=N, D=32, Dv=32, causal=causal)
    leaves = [x.to(device).requires_grad_() for x in case.inputs(torch.float16)]
    grad_o = torch.randn(1, 4, N, 32).half().to(device)
    runs = [
        torch.autograd.grad(
            custom.npu_fused_attention(*leaves, causal=causal, deterministic=True), leaves, grad_o
        )
        for _ in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("N", [8, 70])
@pytest.mark.parametrize("causal", [True, False])
def test_a_scale_of_zero_is_the_mean_of_what_is_seen(causal, N, device, backend):
    case = Case(B=1, H=2, Hk=1, Nq=N, Nk=N, D=32, Dv=16, causal=causal)
    leaves = [x.to(device).requires_grad_() for x in case.inputs(torch.float16)]
    o, lse = custom.npu_fused_attention(*leaves, causal, 0.0, return_lse=True)
    grads = torch.autograd.grad(o.sum(), leaves)
    seen = case.visible().double()
    weights = seen / seen.sum(1, keepdim=True)
    want = weights @ leaves[2].detach().cpu().double()
    torch.testing.assert_close(o.cpu().double(), want.expand(o.shape), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.cpu().double(), seen.sum(1).log().expand(lse.shape))
    assert all((x == 0).all() for x in grads[:2])
    of_v = 2 * weights.sum(0)[:, None].expand(N, 16)
    torch.testing.assert_close(grads[2][0, 0].cpu().double(), of_v, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("kind", [torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_float8_values(kind, device, backend):
    if backend == "npu" or (backend == "cuda" and device.type == "cpu"):
        pytest.skip("float8 needs a GPU or the reference")
    case = Case(B=1, H=2, Hk=1, Nq=40, Nk=70, D=64, Dv=64, causal=True)
    q, k, v = (x.to(device) for x in case.inputs(torch.float16))
    v8 = v.to(kind)
    o = custom.npu_fused_attention(q, k, v8, causal=True)
    want = by_torch(q.double(), k.double(), v8.double(), case.visible().to(device))
    # the weights may be rounded to the format of v: half a step of its mantissa each
    step = torch.finfo(kind).eps / 2
    bound = step * by_torch(q.double(), k.double(), v8.double().abs(), case.visible().to(device))
    assert ((o.double() - want).abs() <= bound + 2e-3).all()
    with pytest.raises(custom.NotSupported, match="float8"):
        custom.npu_fused_attention(q.requires_grad_(), k, v8).sum().backward()


def test_attention_of_the_tutorial(device, backend):
    case = Case(B=1, H=2, Hk=2, Nq=128, Nk=128, D=64, Dv=64, causal=True)
    q, k, v = (x.to(device) for x in case.inputs(torch.float16))
    want = custom.npu_fused_attention(q, k, v, True, 0.5)
    for BM, BN in [(32, 64), (64, 32), (128, 16)]:
        assert torch.equal(custom.attention(q, k, v, True, 0.5, BM, BN), want)


@pytest.mark.parametrize("BM,BN", [(16, 128), (128, 16), (64, 64), (1, 300), (300, 7)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_hint_is_right(BM, BN, causal, device, backend):
    """The causal path of the tutorial was wrong whenever BN > BM."""
    case = Case(B=1, H=2, Hk=1, Nq=70, Nk=90, D=32, Dv=32, causal=causal)
    q, k, v = case.inputs(torch.float16)
    got = custom.attention(*(x.to(device) for x in (q, k, v)), causal, 0.3, BM, BN)
    exact = by_torch(q.double(), k.double(), v.double(), case.visible(), 0.3)
    assert_close_to_float64("o", got, by_torch(q, k, v, case.visible(), 0.3), exact)


def test_twice_in_one_compiled_function(device, backend):
    """The second call takes what the first gave, and both share k and v."""
    case = Case(B=1, H=4, Hk=2, Nq=40, Nk=40, D=32, Dv=32, causal=True)
    leaves = [x.to(device).requires_grad_() for x in case.inputs(torch.float16)]

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        once = custom.npu_fused_attention(q, k, v, causal=True)
        again, lse = custom.npu_fused_attention(once, k, v, window=9, return_lse=True)
        return again.float().square().sum() + lse.square().sum()

    want = torch.autograd.grad(twice(*leaves), leaves)
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(*leaves), leaves), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name, value", [("_BLOCK", 2000), ("_CACHED", 8000)])
def test_blocks_of_rows_change_nothing(name, value, monkeypatch):
    """16K tokens fit because the scores are made a block at a time; the result is the same."""
    case = Case(B=2, H=4, Hk=2, Nq=50, Nk=61, D=16, Dv=16, causal=True, window=20)
    leaves = [x.requires_grad_() for x in case.inputs(torch.float64)]

    def run() -> tuple[Tensor, ...]:
        o = custom.npu_fused_attention(*leaves, causal=True, window=20)
        return o, *torch.autograd.grad(o.square().sum(), leaves)

    whole = run()
    monkeypatch.setattr(reference, name, value)
    for x, y in zip(run(), whole, strict=True):
        torch.testing.assert_close(x, y)


def test_sixteen_thousand_tokens_fit():
    q, k, v = (torch.randn(1, 1, 16384, 16) for _ in range(3))
    o, lse = custom.npu_fused_attention(q, k, v, causal=True, return_lse=True)
    rows = torch.tensor([0, 1, 5000, 16383])
    for i in rows.tolist():
        scores = (q[0, 0, i].double() @ k[0, 0, : i + 1].double().T) / 4
        torch.testing.assert_close(lse[0, 0, i].double(), scores.logsumexp(0), rtol=1e-5, atol=1e-5)
        want = scores.softmax(0) @ v[0, 0, : i + 1].double()
        torch.testing.assert_close(o[0, 0, i].double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal,window", [(False, None), (True, None), (True, 3), (False, 2)])
def test_gradcheck(causal, window):
    case = Case(B=1, H=2, Hk=1, Nq=4, Nk=6, D=3, Dv=2)
    leaves = [x.requires_grad_() for x in case.inputs(torch.float64)]

    def both(*inputs: Tensor) -> tuple[Tensor, ...]:
        pair = custom.npu_fused_attention(*inputs, causal=causal, window=window, return_lse=True)
        assert isinstance(pair, tuple)
        return pair

    assert torch.autograd.gradcheck(both, leaves)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scalar_loops(data):
    size = st.integers(1, 5)
    Hk, groups, Nq, Nk = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3), size, size))
    D, Dv, causal = data.draw(st.tuples(size, size, st.booleans()))
    window = data.draw(st.none() | st.integers(1, 6))
    case = Case(1, Hk * groups, Hk, Nq, Nk, D, Dv, causal, window)
    q, k, v = case.inputs(torch.float64)
    o, lse = custom.npu_fused_attention(q, k, v, causal=causal, window=window, return_lse=True)
    for h in range(case.H):
        for i in range(Nq):
            position, seen = i + Nk - Nq, []
            for j in range(Nk):
                near = window is None or abs(position - j) < window
                if near and (j <= position or not causal):
                    dot = sum(float(q[0, h, i, d] * k[0, h // groups, j, d]) for d in range(D))
                    seen.append((j, dot / math.sqrt(D)))
            total = sum(math.exp(s) for _, s in seen)
            want_lse = math.log(total) if seen else -math.inf
            assert float(lse[0, h, i]) == pytest.approx(want_lse, rel=1e-12, abs=1e-12)
            for d in range(Dv):
                want = sum(math.exp(s) / total * float(v[0, h // groups, j, d]) for j, s in seen)
                assert float(o[0, h, i, d]) == pytest.approx(want, rel=1e-11, abs=1e-12)


def _good() -> dict[str, Tensor]:
    q, k, v = Case(B=1, H=4, Hk=2, Nq=3, Nk=5, D=16, Dv=16).inputs(torch.float32)
    return dict(q=q, k=k, v=v)


@pytest.mark.parametrize(
    "change,error,sentence",
    [
        (dict(k=torch.zeros(1, 2, 5, 8)), ValueError, "`k` has shape .* with B=1, .*D=16"),
        (dict(k=torch.zeros(1, 3, 5, 16), v=torch.zeros(1, 3, 5, 16)), ValueError, "4 heads"),
        (dict(v=torch.zeros(1, 2, 4, 16)), ValueError, "`v` has shape"),
        (dict(k=torch.zeros(1, 2, 5, 16).double()), TypeError, "`k` has dtype"),
        (dict(v=torch.zeros(1, 2, 5, 16).half()), TypeError, "`v` has dtype"),
        (dict(q=torch.zeros(1, 4, 3, 16, dtype=torch.int32)), TypeError, "`q` is int32"),
        (dict(cu_seqlens_q=torch.zeros(2, dtype=torch.int32)), ValueError, "expected both"),
        (dict(q=torch.zeros(1, 4, 16, 3).mT), ValueError, "`q` has stride"),
    ],
    ids=by_change,
)
def test_errors(change, error, sentence):
    assert_refuses(OP, _good() | change, error, sentence)


def test_prefix_sums_with_gaps_are_refused():
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in _good().values())
    sums = {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 2, 5])}
    for name, value in sums.items():
        strided = torch.stack([value, value], -1)[:, 0]
        with pytest.raises(ValueError, match=f"npu_fused_attention: `{name}` is not contiguous"):
            custom.npu_fused_attention(q, k, v, **(sums | {name: strided}))


@pytest.mark.parametrize("keys", [9, 700], ids=["whole", "in parts"])
def test_a_nan_stays_one(keys, device, backend):
    """In its row alone, and in the row's statistics: no row that sees nothing."""
    q, k, v = (torch.randn(1, 2, n, 32).half().to(device) for n in (3, keys, keys))
    right, right_lse = getattr(torch.ops.custom, OP)(q=q, k=k, v=v)
    q[0, 1, 2, 5] = torch.nan
    with runs_once(OP, backend):
        o, lse = getattr(torch.ops.custom, OP)(q=q, k=k, v=v)
    wrong = torch.zeros(1, 2, 3, dtype=torch.bool, device=device)
    wrong[0, 1, 2] = True
    assert o[wrong].isnan().all() and torch.equal(lse.isnan(), wrong)
    assert torch.equal(o[~wrong], right[~wrong]) and torch.equal(lse[~wrong], right_lse[~wrong])


@pytest.mark.parametrize("d, v", [(24, 16), (64, 16), (128, 32)])
@pytest.mark.parametrize("rows", [33, 130])
def test_narrow_values_in_rows_off_16_bytes(rows, d, v, device, backend):
    """No copy of 16 bytes reads them, so that products read what loads wrote."""

    def off(*shape: int) -> torch.Tensor:
        return torch.randn(1 + math.prod(shape), device=device).half()[1:].view(shape)

    given = off(1, 2, rows, d), off(1, 2, 140, d), off(1, 2, 140, v)
    q, k, value = (x.cpu().double() for x in given)
    hidden = torch.ones(rows, 140).triu(140 - rows + 1).bool()
    scores = (q @ k.mT * d**-0.5).masked_fill(hidden, float("-inf"))
    exact = scores.softmax(-1) @ value
    got = custom.npu_fused_attention(*given, causal=True)
    torch.testing.assert_close(got.cpu().double(), exact, rtol=5e-3, atol=5e-3)
