# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Both prologs with weights and caches of 8 bits, against formulas of this file's own."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
import torch
from custom.dispatch import backends
from custom.dispatch.common import mla_v3
from custom.dispatch.register import bind, overload
from custom.dispatch.registry import BY_NAME
from torch import Tensor

import custom

from ...support import interpreted, quantization
from ...support.accuracy import assert_close_to_float64
from ...support.calls import CPU
from ...support.golden import Golden, Layer, rms_norm, rope
from ...support.kernels import INTERPRETED, gpu
from ...support.prologs import refuse
from ...support.quantized_layer import FORMS, INDEXER, KINDS, MLA, SIZES, WEIGHTS, B, Call, P, S
from ...support.ragged import run
from ...support.samples import sample


class Quantizing(Golden):
    """The golden layer with activations of 8 bits: `mode` as the op's."""

    def __init__(self, layer: Layer, dtype: torch.dtype, mode: int, scale_format: str) -> None:
        super().__init__(layer, dtype)
        self.mode, self.scale_format = mode, scale_format
        for field in fields(Layer):  # not rounded to the working dtype
            setattr(self.w, field.name, getattr(layer, field.name))
        self.wide = torch.float64

    def eight(self, x: Tensor, first: bool, smooth: Tensor | None = None) -> Tensor:
        """What x [K] stands for once it is quantized; the input of the layer is `first`."""
        if self.mode == 0 or (self.mode == 1 and first):
            return x
        x = x.float() if smooth is None else x.float() * smooth
        made = quantization.activations(x[None], KINDS[self.mode], self.scale_format)
        return quantization.stands_for(*made)[0]

    def rnd(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()

    def mla(self, x, sin, cos, smooth=None):
        w, rnd = self.w, self.rnd
        x, sin, cos = (each.double() for each in (x, sin, cos))
        heads, plain, rank = w.w_uk.shape
        x8 = self.eight(x, True)
        c = rnd(rms_norm(rnd(x8 @ w.w_dq), w.gamma_cq, 1e-6))
        q = rnd(self.eight(c, False, smooth) @ w.w_uq_qr).view(heads, -1)
        query = torch.stack([rnd(q[h, :plain] @ w.w_uk[h]) for h in range(heads)])
        query_rope = torch.stack([rnd(rope(each, sin, cos, True)) for each in q[:, plain:]])
        kv = rnd(x8 @ w.w_dkv_kr)
        key = rnd(rms_norm(kv[:rank], w.gamma_ckv, 1e-6))
        return query, query_rope, c, key, rnd(rope(kv[rank:], sin, cos, True))

    def indexer(self, x, c, sin, cos, smooth=None):
        w, rnd = self.w, self.rnd
        x, c, sin, cos = (each.double() for each in (x, c, sin, cos))
        size, rotary = len(w.in_gamma_k), len(sin)

        def turn(u: Tensor) -> Tensor:
            return torch.cat([rnd(rope(u[:rotary], sin, cos, False)), u[rotary:]])

        query = rnd(self.eight(c, False, smooth) @ w.w_idx_qb).view(-1, size)
        key = self.eight(x, True) @ w.w_idx_k
        centred = key - key.mean()
        key = w.in_gamma_k * centred / torch.sqrt((centred * centred).mean() + 1e-6) + w.in_beta_k
        return torch.stack([turn(q) for q in query]), rnd(x @ w.w_idx_proj), turn(rnd(key))


def by_token(function, *tensors: Tensor) -> list[Tensor]:
    """Each output of `function` for every token, stacked."""
    each = [function(*(x[b, s] for x in tensors)) for b in range(B) for s in range(S)]
    return [torch.stack(list(outs)) for outs in zip(*each, strict=True)]


def compare(names, got, plain, exact) -> None:
    for name, *each in zip(names, got, plain, exact, strict=True):
        assert_close_to_float64(name, *each)


SHAPES = [(form, SIZES["Dr"]) for form in FORMS] + [("row-major", 0)]


@pytest.mark.parametrize(("form", "rotary"), SHAPES)
@pytest.mark.parametrize("mode", [1, 2, 4])
def test_mla(device, backend, mode, form, rotary):
    call = Call(device, mode, form, Dr=rotary)
    smooth = None if mode == 4 else 0.5 + torch.rand(1, SIZES["Rq"])
    given = call.mla(smooth_scales_cq=None if smooth is None else smooth.to(device))
    outs = run(MLA, backend, **given)
    inputs = call.x, call.sin, call.cos
    by = None if smooth is None else smooth[0]
    w = call.layer
    if smooth is not None:  # the checkpoint's weights have them out again
        w = replace(w, w_uq_qr=w.w_uq_qr * smooth[0, :, None].double())
    plain = by_token(
        lambda *token: Quantizing(call.layer, call.dtype, mode, "ue8m0").mla(*token, by), *inputs
    )
    exact = by_token(lambda *token: Quantizing(w, torch.float64, 0, "ue8m0").mla(*token), *inputs)
    for out in outs:
        assert out.dtype is call.dtype and out.is_contiguous()
    got = [out.flatten(0, 1) for out in outs]
    got += [call.at(given[name]) for name in ("kv_cache", "kr_cache")]
    names = "query", "query_rope", "query_norm", "kv_cache", "kr_cache"
    there = call.written()
    plain[3:], exact[3:] = ([x[there] for x in each[3:]] for each in (plain, exact))
    compare(names, got, plain, exact)


@pytest.mark.parametrize(("form", "rotary"), SHAPES)
@pytest.mark.parametrize("mode", [1, 2, 4])
def test_indexer(device, backend, mode, form, rotary):
    call = Call(device, mode, form, Dr=rotary)
    given = call.indexer()
    outs = run(INDEXER, backend, **given)
    inputs = call.x, call.norm, call.sin, call.cos
    plain = by_token(Quantizing(call.layer, call.dtype, mode, "ue8m0").indexer, *inputs)
    exact = by_token(Quantizing(call.layer, torch.float64, 0, "ue8m0").indexer, *inputs)
    got = [*(out.flatten(0, 1) for out in outs), call.at(given["index_k_cache"])]
    there = call.written()
    plain[2:], exact[2:] = ([x[there] for x in each[2:]] for each in (plain, exact))
    compare(("query_index", "weights", "index_k_cache"), got, plain, exact)


@cache
def of_a_model() -> Call:
    """Heads for nearly every multiprocessor, and a width that no block of 128 divides."""
    sizes = dict(H=1168, Rq=1152, N=96, Dn=128, R=128, Ni=64)
    return Call(torch.device("cuda"), 4, "linear", torch.bfloat16, **sizes)


@gpu
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 20, 33, 65, 130, 300])
def test_fp8_weights_of_a_model(tokens, interleaved):
    """Every tile of tokens, against the reference on the same bytes and on what they stand for."""
    call = copy(of_a_model())
    draw = torch.Generator().manual_seed(tokens)
    for name in ("x", "sin", "cos", "norm"):
        shape = tokens, 1, getattr(call, name).shape[-1]
        setattr(call, name, torch.randn(*shape, generator=draw).to(call.dtype))
    call.slots = torch.randperm(tokens, generator=draw).to(torch.int32)[:, None]
    call.slots[::3] = -1
    for op, given, caches in (
        (MLA, call.mla(rope_interleaved=interleaved), ("kv_cache", "kr_cache")),
        (INDEXER, call.indexer(rope_interleaved=interleaved), ("index_k_cache",)),
    ):
        here = {n: x.cpu() if isinstance(x, Tensor) else x for n, x in given.items()}
        wide = {
            n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for n, x in here.items()
        }
        for name, (argument, scale, _) in WEIGHTS[op].items():
            wide[argument] = getattr(call.layer, name)
            wide.pop(scale, None)
        got = run(op, "cuda", **given)
        plain, exact = of_reference(op, here), of_reference(op, wide | dict(weight_quant_mode=0))
        for i, parts in enumerate(zip(got, plain, exact, strict=True)):
            assert_close_to_float64(f"{op} {i}", *parts)
        for name in caches:
            assert_close_to_float64(name, *(x[name].cpu() for x in (given, here, wide)))


def of_reference(op: str, arguments: dict) -> tuple[Tensor, ...]:
    spec = BY_NAME[op]
    function = backends.launcher(backends.REFERENCE, spec).function
    return function(**bind(overload(spec)._schema, (), arguments))


@pytest.mark.parametrize("given_in_8_bits", [True, False])
@pytest.mark.parametrize("mode, scale_format", [(2, "ue8m0"), (4, "ue8m0"), (4, "fp32")])
def test_a_product_is_its_formula(device, backend, mode, scale_format, given_in_8_bits):
    """The rotary key of an angle of zero is the product itself, rounded once."""
    call = Call(device, mode)
    call.sin, call.cos = torch.zeros_like(call.sin), torch.ones_like(call.cos)
    values, scale = quantization.activations(call.x.flatten(0, 1), KINDS[mode], scale_format)
    given = call.mla(rope_interleaved=False, scale_format=scale_format)
    if given_in_8_bits:
        given["token_x"] = values.view(B, S, -1).to(device)
        given["dequant_scale_x"] = scale.to(device)
    run(MLA, backend, **given)
    x, w = quantization.stands_for(values, scale), call.layer.w_dkv_kr[:, SIZES["R"] :]
    exact, there = (x @ w)[call.written()], call.written()
    got = call.at(given["kr_cache"]).double()
    # float32's sums, and the 13 bits in which Hopper adds up 8-bit floats
    step = 2.0**-12 if mode == 4 and device.type == "cuda" else 2.0**-20
    sums = (x.abs() @ w.abs())[there]
    allowed = exact.abs() * torch.finfo(call.dtype).eps / 2 + step * sums + 1e-7
    assert ((got - exact).abs() <= allowed).all(), ((got - exact).abs() / allowed).max()


def torch_npu_s_golden(call: Call, smooth: Tensor) -> tuple[Tensor, ...]:
    """The words of its test of npu_mla_prolog_v3, mode 2: int32 sums, float32 times both scales,
    nothing rounded between the product and the next quantization; q_nope to the dtype before W_uk.
    (query, query_rope)"""
    a, w = call.given[MLA], call.layer
    heads, plain, _rank = w.w_uk.shape
    x, scale_x = quantization.activations(call.x.flatten(0, 1), "int8")

    def product(values, by, name):
        weight, scale = custom.from_nz(a[f"weight_{name}"].cpu()), a[f"dequant_scale_w_{name}"]
        sums = values.numpy().astype(np.int64) @ weight.numpy().astype(np.int64)
        return torch.from_numpy(sums).float() * by * scale.cpu()

    down = product(x, scale_x, "dq")
    norm = down / torch.sqrt((down**2).mean(-1, keepdim=True) + 1e-6) * w.gamma_cq.float()
    c, scale_c = quantization.activations(norm * smooth, "int8")
    q = product(c, scale_c, "uq_qr").view(-1, heads, plain + SIZES["Dr"])
    nope = q[..., :plain].to(call.dtype).double()
    query = torch.einsum("tnd,ndr->tnr", nope, w.w_uk).to(call.dtype)
    sin, cos = (each.flatten(0, 1).double() for each in (call.sin, call.cos))
    turned = [
        torch.stack([rope(u.double(), sin[t], cos[t], True) for u in q[t, :, plain:]])
        for t in range(len(q))
    ]
    return query, torch.stack(turned).to(call.dtype)


def test_as_near_as_torch_npu_s_golden(device, backend):
    """Which rounds less often than we do: our error against no quantization at all is within twice
    that of theirs."""
    call = Call(device, 2)
    smooth = 0.5 + torch.rand(1, SIZES["Rq"])
    outs = run(MLA, backend, **call.mla(smooth_scales_cq=smooth.to(device)))
    w = replace(call.layer, w_uq_qr=call.layer.w_uq_qr * smooth[0, :, None].double())
    exact = by_token(Quantizing(w, torch.float64, 0, "").mla, call.x, call.sin, call.cos)
    golden = torch_npu_s_golden(call, smooth)
    compare(("query", "query_rope"), [out.flatten(0, 1) for out in outs[:2]], golden, exact[:2])


def test_scales_lie_as_hugging_face_s():
    """Its weights are [N, K] with weight_scale_inv [N / 128, K / 128]: both transposed are ours."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, scale = quantization.weight(torch.randn(256, 384).double(), "fp8")
    given = {"weight$": [values.t().contiguous()], "weight_scale_inv": [scale.t().contiguous()]}
    (theirs,) = finegrained.Fp8Dequantize(None).convert(given).values()
    theirs = theirs[0] if isinstance(theirs, list) else theirs
    want = quantization.dequantized(values, scale).t()
    assert (theirs.double() - want).abs().max() <= 2.0**-8 * want.abs().max()


@pytest.mark.parametrize("row_layout", ["nope_rope_scale", "nope_scale_rope"])
@pytest.mark.parametrize("kind, scale_format", [("fp8", "ue8m0"), ("fp8", "fp32"), ("int8", "")])
@pytest.mark.parametrize(("mode", "rotary"), [(0, 64), (2, 64), (4, 64), (0, 0), (2, 0)])
def test_rows_have_the_writer_s_bytes(
    device, backend, mode, rotary, kind, scale_format, row_layout
):
    """Of what the prolog itself gives without them."""
    call, scale_format = Call(device, mode, Dr=rotary), scale_format or "ue8m0"
    alpha = torch.tensor([0.75], device=device) if mode == 2 else None
    plain = call.mla(scale_format=scale_format)
    want_outs = run(MLA, backend, **plain)
    want = call.rows(kind)["kv_cache"]
    where = torch.arange(4 * P, dtype=torch.int32, device=device)
    slots = torch.where(torch.isin(where, call.slots.flatten().to(device)), where, -1)
    custom.npu_latent_cache_write(
        plain["kv_cache"].flatten(0, 2),
        plain["kr_cache"].flatten(0, -2),
        want,
        slots,
        kind=kind,
        row_layout=row_layout,
        scale_format=scale_format,
        k_nope_clip_alpha=alpha,
        rope_head_dim=rotary,
    )
    given = call.mla(
        **call.rows(kind, uint8=mode == 4),
        row_layout=row_layout,
        scale_format=scale_format,
        k_nope_clip_alpha=alpha,
    )
    outs = run(MLA, backend, **given)
    for got, out in zip(outs, want_outs, strict=True):
        assert torch.equal(got, out)
    assert torch.equal(given["kv_cache"].view(torch.uint8), want.view(torch.uint8))
    assert given["kv_cache"].view(torch.uint8).any()


@pytest.mark.parametrize("transform", [False, "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("mode", [0, 1, 2, 4])
def test_index_keys_and_queries_have_the_writers_bytes(device, backend, mode, kind, transform):
    call = Call(device, mode)
    turned = dict(index_hadamard=bool(transform), hadamard_round=transform or "bf16")
    plain = call.indexer()
    query, weights = run(INDEXER, backend, **plain)

    def cache() -> tuple[Tensor, Tensor]:
        if kind == "fp8":
            pages = torch.zeros(4, P, 132, dtype=torch.uint8, device=device)
            return custom.index_cache_views(pages, kind)
        values = torch.zeros(4, P, 1, 128, dtype=torch.int8, device=device)
        return values, torch.zeros(4, P, 1, dtype=torch.float16, device=device)

    want = cache()
    where = torch.arange(4 * P, dtype=torch.int32, device=device)
    slots = torch.where(torch.isin(where, call.slots.flatten().to(device)), where, -1)
    keys = plain["index_k_cache"].flatten(0, 2)
    custom.npu_index_cache_write(keys, *want, slots, kind=kind, **turned)
    values, folded, _ = custom.quantize_index_query(query, weights, kind=kind, **turned)
    got = cache()
    given = call.indexer(
        index_k_cache=got[0], index_k_scale_cache=got[1], kv_cache_quant_mode=3, **turned
    )
    outs = run(INDEXER, backend, **given)
    assert outs[0].dtype is values.dtype and outs[1].dtype is torch.float32
    assert torch.equal(outs[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(outs[1], folded)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1]) and got[1].any()


V3 = "npu_mla_prolog_v3"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("mode", "rotary"), [(0, 0), (0, 64), (1, 0), (1, 64), (2, 64), (4, 64)])
def test_under_torch_npu_s_words(device, backend, mode, rotary, flag, packed):
    """The same numbers, and the query norm as its product takes it."""
    call = Call(device, mode, Dr=rotary)
    rows = call.rows("int8") if mode == 2 else {}
    eps = dict(rmsnorm_epsilon_cq=1e-5, rmsnorm_epsilon_ckv=1e-5)
    given = call.mla(**rows, **eps)
    query, query_rope, norm = run(MLA, backend, **given)
    theirs = {n: x for n, x in call.mla(**rows).items() if n != "weight_format"}
    if packed:
        names = "token_x", "rope_sin", "rope_cos", "cache_index"
        theirs |= {name: theirs[name].flatten(0, 1) for name in names}
    outs = run(V3, backend, **theirs, query_norm_flag=flag)
    on_meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in theirs.items()}
    fakes = overload(BY_NAME[V3])(**on_meta, query_norm_flag=flag)
    for got, fake in zip(outs, fakes, strict=True):
        assert (got.shape, got.dtype) == (fake.shape, fake.dtype)
    for got, want in zip(outs[:2], (query, query_rope), strict=True):
        assert torch.equal(got, want.flatten(0, 1) if packed else want)
    assert outs[2].shape == (0,) and outs[2].dtype is torch.float32
    for name in ("kv_cache", "kr_cache"):
        assert torch.equal(theirs[name], given[name])
    assert outs[3].dtype is call.given[MLA]["weight_uq_qr"].dtype
    if not flag:
        assert outs[3].shape == outs[4].shape == (0,)
        return
    assert outs[3].shape == (norm.flatten(0, 1) if packed else norm).shape
    if mode == 0:
        assert torch.equal(outs[3].flatten(), norm.flatten()) and outs[4].shape == (0,)
        return
    values, scale = quantization.activations(norm.cpu().flatten(0, 1), KINDS[mode])
    assert torch.equal(
        outs[3].cpu().view(torch.uint8).flatten(), values.view(torch.uint8).flatten()
    )
    assert torch.equal(outs[4].cpu(), scale)


def test_tokens_are_one_request():
    """Kernels take [B, S, H], the reference any shape."""
    given = Call(CPU, 0).mla()
    batched = mla_v3.as_pto(given)
    assert all(batched[name] is given[name] for name in ("token_x", "cache_index"))
    names = "token_x", "rope_sin", "rope_cos", "cache_index"
    packed = mla_v3.as_pto(given | {name: given[name].flatten(0, 1) for name in names})
    for name in names:
        assert packed[name].shape == (1, B * S, *given[name].shape[2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cache_index=None), "`cache_index` is missing"),
        (dict(cache_mode="PA_NZ"), "`cache_mode` is 'PA_NZ', expected one of 'PA_BSND'"),
        (dict(qc_qr_scale=2.0), "`qc_qr_scale` is 2.0, expected 1"),
        (dict(kc_scale=0.5), "`kc_scale` is 0.5, expected 1"),
        (dict(quant_scale_ckv=torch.ones(1)), "`quant_scale_ckv` is given, expected None"),
        (dict(actual_seq_len=torch.ones(1)), "`actual_seq_len` is given"),
        (dict(weight_dq_dtype=290), "`weight_dq_dtype` is given"),
        (dict(token_x=torch.ones(288)), "`token_x` has shape"),
        (dict(weight_quant_mode=3), r"`weight_quant_mode` is 3 \(mxfp8"),
    ],
)
def test_errors_under_torch_npu_s_words(change, message):
    given = {n: x for n, x in Call(CPU, 0).mla().items() if n != "weight_format"}
    with pytest.raises(ValueError, match=f"^{V3}: {message}"):
        custom.npu_mla_prolog_v3(**given | change)
    assert not given["kv_cache"].any()


@pytest.mark.parametrize("mode", [1, 4])
def test_a_quantized_query_norm_is_taken_as_it_is(device, backend, mode):
    call = Call(device, mode)
    wanted = run(INDEXER, backend, **call.indexer())
    values, scale = quantization.activations(call.norm.flatten(0, 1), KINDS[mode])
    given = dict(query_norm=values.view(B, S, -1).to(device), dequant_scale_q_norm=scale.to(device))
    for got, want in zip(run(INDEXER, backend, **call.indexer(**given)), wanted, strict=True):
        assert torch.equal(got, want)


def test_tokens_of_zeros_and_no_tokens(device, backend):
    for mode in (2, 4):
        call = Call(device, mode)
        call.x, call.norm = torch.zeros_like(call.x), torch.zeros_like(call.norm)
        for op, given in ((MLA, call.mla(**call.rows("int8"))), (INDEXER, call.indexer())):
            for out in run(op, backend, **given):
                assert out.isfinite().all()
        none = Call(device, mode)
        none.slots = none.slots[:0]
        none.x, none.norm, none.sin, none.cos = (
            each[:0] for each in (none.x, none.norm, none.sin, none.cos)
        )
        for op, given in ((MLA, none.mla(**none.rows("fp8"))), (INDEXER, none.indexer())):
            for out in run(op, backend, **given):
                assert out.shape[:2] == (0, S)


@pytest.mark.parametrize("kind, mode", [("int8", 2), ("fp8", 4)])
def test_traced(kind, mode):
    """Optional caches that are written, also where two are views of one tensor."""
    call = Call(CPU, mode)
    cache = torch.zeros(4, P, 1, 128, dtype=torch.int8), torch.zeros(4, P, 1).half()
    if kind == "fp8":
        cache = custom.index_cache_views(torch.zeros(4, P, 132, dtype=torch.uint8), kind)
    index = dict(index_k_cache=cache[0], index_k_scale_cache=cache[1], kv_cache_quant_mode=3)
    given = {MLA: call.mla(**call.rows(kind)), INDEXER: call.indexer(**index)}
    for op, arguments in given.items():
        # its test of the schema multiplies the tensors, which torch cannot in float8
        for test in ("test_faketensor", "test_aot_dispatch_dynamic"):
            torch.library.opcheck(getattr(torch.ops.custom, op), (), arguments, test_utils=test)


def test_quantized_nz_has_32_columns_a_tile():
    for dtype in (torch.int8, torch.float8_e4m3fn):
        w = torch.randn(48, 96).mul(40).to(dtype)
        z = custom.to_nz(w)
        assert z.shape == (3, 3, 16, 32)
        assert torch.equal(z[2, 1, 5].view(torch.uint8), w[21, 64:].view(torch.uint8))
        for back in (custom.from_nz(z), custom.from_nz(custom.to_nz(w, flat=True))):
            assert torch.equal(back.view(torch.uint8), w.view(torch.uint8))
        assert custom.to_nz(w[:40, :70]).shape == (3, 3, 16, 32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(weight_quant_mode=3), ValueError, r"`weight_quant_mode` is 3 \(mxfp8"),
        (dict(weight_quant_mode=5), ValueError, r"`weight_quant_mode` is 5 \(hif8"),
        (dict(weight_quant_mode=2), TypeError, "`weight_dq` is float32, expected int8"),
        (dict(weight_quant_mode=1), TypeError, "`weight_uq_qr` is float32, expected int8"),
        (dict(dequant_scale_w_dq=torch.ones(1, 32)), ValueError, "`dequant_scale_w_dq` is given"),
        (dict(dequant_scale_x=torch.ones(4, 1)), ValueError, "`dequant_scale_x` is given"),
        (dict(smooth_scales_cq=torch.ones(1, 32)), ValueError, "`smooth_scales_cq` is given"),
        (dict(k_nope_clip_alpha=torch.ones(1)), ValueError, "`k_nope_clip_alpha` is given"),
        (dict(kv_cache_quant_mode=1), ValueError, "`kv_cache_quant_mode` is 1, expected 0"),
        (dict(kv_cache_quant_mode=3), ValueError, "`ckvkr_repo_mode` is 0, expected 1"),
        (dict(ckvkr_repo_mode=1), ValueError, "`ckvkr_repo_mode` is 1, expected 0"),
        (dict(query_quant_mode=1), ValueError, "`query_quant_mode` is 1, expected 0"),
        (dict(tile_size=64), ValueError, "`tile_size` is 64, expected 128"),
    ],
)
def test_errors(change, error, message):
    refuse(MLA, change, error, message)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(), ValueError, "`dequant_scale_w_dq` is missing, expected float32 .1, 288."),
        (
            dict(dequant_scale_w_dq=torch.ones(288)),
            ValueError,
            r"`dequant_scale_w_dq` has shape \[288\], expected \[1, 288\]",
        ),
        (dict(dequant_scale_w_dq=torch.ones(1, 288).half()), TypeError, "is float16, expected"),
        (dict(token_x=torch.ones(B, S, 288).to(torch.float8_e4m3fn)), TypeError, "expected int8"),
        (dict(token_x=torch.ones(B, S, 288).char()), ValueError, "`dequant_scale_x` is missing"),
        (dict(weight_dq=torch.zeros(288, 288).char().t()), ValueError, "not contiguous"),
    ],
)
def test_errors_of_scales(change, error, message):
    call = Call(CPU, 2, "2-D NZ", Rq=288)
    given = call.mla()
    if not {"weight_dq", "token_x"} & set(change):
        del given["dequant_scale_w_dq"]
    with pytest.raises(error, match=message):
        custom.npu_mla_prolog_pto(**given | change)
    assert not given["kv_cache"].any()


def test_errors_of_rows():
    call = Call(CPU, 0)
    for change, message in (
        (dict(kr_cache=torch.zeros(4, P, 1, 64)), "`kr_cache` has shape .* size of 0"),
        (dict(kv_cache=torch.zeros(4, P, 1, 656).byte()), "`kv_cache` is uint8"),
        (dict(kv_cache=torch.zeros(4, P, 1, 512).char()), "`kv_cache` has shape"),
        (dict(kv_cache=torch.zeros(4, P, 1, 528).char()), r"`kv_cache` has shape .*656"),
        (dict(kv_cache_dtype=23), "`kv_cache_dtype` is float8_e5m2"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            custom.npu_mla_prolog_pto(**call.mla(**call.rows("int8") | change))
    for rotary, message in ((0, r"`kv_cache` has shape .*528"), (32, "Dr is 32, expected 64 or 0")):
        other = Call(CPU, 0, Dr=rotary)
        with pytest.raises(ValueError, match=message):
            custom.npu_mla_prolog_pto(**other.mla(**call.rows("int8")))
    short = Call(CPU, 0, R=256)
    with pytest.raises(ValueError, match="R is 256, expected 512"):
        custom.npu_mla_prolog_pto(**short.mla(**short.rows("int8")))


def test_errors_of_an_index_cache():
    call = Call(CPU, 0)
    values, scales = torch.zeros(4, P, 1, 128).char(), torch.zeros(4, P, 1).half()
    good = dict(index_k_cache=values, index_k_scale_cache=scales, kv_cache_quant_mode=3)
    for change, message in (
        (dict(kv_cache_quant_mode=0), "`index_k_cache` has dtype"),
        (dict(kv_cache_quant_mode=1), "`kv_cache_quant_mode` is 1"),
        (dict(index_k_scale_cache=None), "`index_k_scale_cache` is missing"),
        (dict(index_k_scale_cache=scales.bfloat16()), "`index_k_scale_cache` is bfloat16"),
        (dict(index_k_cache=values.byte()), "`index_k_cache` is uint8.*index_cache_views"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            custom.npu_indexer_prolog_pto(**call.indexer(**good | change))
    plain = dict(index_hadamard=True)
    with pytest.raises(ValueError, match="`index_hadamard` is True, expected False"):
        custom.npu_indexer_prolog_pto(**call.indexer(**plain))


LIGHTNING = "npu_lightning_indexer_prolog_pto"


def int8_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """By the words of its sample, and of zeros zeros: (values, scale [.., 1])."""
    amax = x.float().abs().amax(-1, keepdim=True)
    return torch.round(x.float() * (127 / amax)).nan_to_num(0).to(torch.int8), amax / 127


@pytest.mark.parametrize(
    ("of_scales", "rotary"), [((B * S, 1), 64), ((B * S,), 64), ((B * S,), 0)], ids=str
)
@pytest.mark.parametrize("matrices", [False, True])
def test_the_int8_prolog_as_its_sample_has_it(device, backend, matrices, of_scales, rotary):
    """Values within one of the sample's, which multiplies by 127 / amax; the sums are exact."""
    call = Call(device, 1, Dr=rotary)
    tokens, heads = B * S, 16
    given = call.indexer()
    values, scale = quantization.activations(call.norm.flatten(0, 1), "int8")
    sign = [[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]
    matrix = (torch.tensor(sign) * 128**-0.5).to(call.dtype).to(device) if matrices else None
    cache = torch.zeros(4, P, 1, 128, dtype=torch.int8, device=device)
    scales = torch.zeros(4, P, 1, 1, dtype=torch.float16, device=device)
    query, query_scale, weights = run(
        LIGHTNING,
        backend,
        token_x=given["token_x"].flatten(0, 1),
        q_norm=values.to(device),
        q_norm_scale=scale.view(of_scales).to(device),
        wq_b=given["weight_qb"],
        wq_b_scale=given["dequant_scale_w_qb"].view(-1, 1),
        wk=given["weight_k"],
        weights_proj=given["weight_proj"],
        ln_gamma_k=given["ln_gamma_k"],
        ln_beta_k=given["ln_beta_k"],
        cos_idx_rope=given["rope_cos"].flatten(0, 1),
        sin_idx_rope=given["rope_sin"].flatten(0, 1),
        hadamard_q=matrix,
        hadamard_k=matrix,
        idx_k_cache=cache,
        idx_k_scale_cache=scales,
        idx_k_cache_index=given["cache_index"].flatten(),
        layernorm_epsilon_k=1e-6,
    )
    plain_q, plain_weights = run(INDEXER, backend, **given | dict(rope_interleaved=True))
    plain_k = call.at(given["index_k_cache"])

    def turned(x: Tensor) -> Tensor:
        return x if matrix is None else (x.cpu().float() @ matrix.cpu().float()).to(x.dtype)

    assert query.shape == (tokens, heads, 128) and query_scale.shape == (tokens, heads, 1)
    want, by = int8_of(turned(plain_q.cpu().flatten(0, 1)))
    assert (query.cpu().int() - want.int()).abs().max() <= 1
    torch.testing.assert_close(query_scale.cpu(), by.half(), rtol=2**-8, atol=0)
    want, by = int8_of(turned(plain_k))
    assert (call.at(cache).int() - want.int()).abs().max() <= 1
    torch.testing.assert_close(call.at(scales), by.half(), rtol=2**-8, atol=0)
    want = plain_weights.cpu().flatten(0, 1).float() * heads**-0.5 * 128**-0.5
    torch.testing.assert_close(weights.cpu(), want.half(), rtol=2**-10, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(layout_query="BSND"), ValueError, "`layout_query` is 'BSND'"),
        (dict(wq_b_scale=torch.ones(7)), ValueError, "`wq_b_scale` has shape"),
        (dict(q_norm=torch.zeros(4, 32)), TypeError, "`q_norm` is float32, expected int8"),
        (dict(idx_k_scale_cache=torch.zeros(4, 16, 2).half()), ValueError, "has shape"),
        (dict(hadamard_q=torch.zeros(64, 64)), ValueError, "`hadamard_q` has shape"),
    ],
)
def test_errors_of_the_int8_prolog(change, error, message):
    arguments = sample(LIGHTNING, CPU, torch.float32) | change
    with pytest.raises(error, match=f"^{LIGHTNING}: .*{message}"):
        custom.npu_lightning_indexer_prolog_pto(**arguments)


@pytest.mark.skipif(INTERPRETED, reason="runs the interpreter itself")
def test_under_the_interpreter():
    """The kernels on CPU tensors, on a machine without a GPU."""
    chosen = "test_mla or test_indexer or words and (1-0-True or 2-64-True or 4-64-True)"
    chosen += (
        " or 1-int8-fp32 or 4-fp8-False or 0-int8--nope_rope or 2-fp8-ue8m0-nope_scale or zeros"
    )
    interpreted.passes(f"({chosen}) and not bfloat16", __file__)
