# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_mla_prolog_pto against its formulas, token by token."""

from __future__ import annotations

import pytest
import torch

import custom

from ...support.accuracy import every_dtype, skip_unless_taken
from ...support.calls import CPU
from ...support.prologs import FORMS, Tokens, check_caches, check_outputs, every_formula, refuse
from ...support.ragged import run
from ...support.samples import sample

OP = "npu_mla_prolog_pto"


def check(device, backend, dtype, B, S, interleaved, form="4-D NZ", latent=True, **sizes):
    """Not `latent`: there is no query latent, and W_uq_qr is [H, ..]."""
    skip_unless_taken(dtype, device, backend)
    if not latent:
        sizes["Rq"] = sizes.setdefault("H", 80)
    tokens = Tokens(B, S, dtype, **sizes).without_slots(beyond=3)
    w, (move, matrix) = tokens.layer, tokens.to(device, form)
    caches = dict(
        kv_cache=tokens.cache(w.w_uk.shape[2], device),
        kr_cache=tokens.cache(tokens.sin.shape[-1], device),
    )
    before = {name: cache.clone() for name, cache in caches.items()}
    outs = run(
        OP,
        backend,
        token_x=move(tokens.x),
        weight_dq=matrix(w.w_dq) if latent else None,
        weight_uq_qr=matrix(w.w_uq_qr),
        weight_uk=move(w.w_uk),
        weight_dkv_kr=matrix(w.w_dkv_kr),
        rmsnorm_gamma_cq=move(w.gamma_cq) if latent else None,
        rmsnorm_gamma_ckv=move(w.gamma_ckv),
        rope_sin=move(tokens.sin),
        rope_cos=move(tokens.cos),
        **caches,
        cache_index=tokens.slots.to(device),
        rmsnorm_epsilon_cq=1e-5,
        rmsnorm_epsilon_ckv=3e-5,
        rope_interleaved=interleaved,
        weight_format=FORMS[form][1],
    )
    plain, exact = tokens.outputs(
        lambda golden, at: golden.mla_prolog(
            tokens.x[at], tokens.sin[at], tokens.cos[at], 1e-5, 3e-5, interleaved, latent
        )
    )
    names = ("query", "query_rope", "query_norm") if latent else ("query", "query_rope")
    check_outputs(names, outs, dtype, plain, exact)
    assert latent or (outs[2].shape == (0,) and outs[2].dtype is dtype)
    for i, name in enumerate(caches):
        check_caches(tokens, name, caches[name], before[name], plain[3 + i], exact[3 + i])


@every_formula
def test_formulas(device, backend, dtype, B, S, interleaved):
    check(device, backend, dtype, B, S, interleaved)


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_any_form(device, backend, form):
    check(device, backend, torch.float16, 2, 3, True, form)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(N=1, Dn=32),
        dict(N=8, R=64, Dr=32),
        dict(H=144, Rq=16, Dr=64),
        dict(N=12, Dr=0),
        dict(N=20, Dn=32, R=64, Dr=0),
    ],
    ids=str,
)
def test_other_sizes(device, backend, sizes):
    check(device, backend, torch.float16, 2, 3, True, **sizes)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("B", "S"), [(1, 1), (5, 7)])
@every_dtype
def test_without_a_query_latent(device, backend, dtype, B, S, interleaved):
    check(device, backend, dtype, B, S, interleaved, latent=False)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [dict(), dict(N=1, Dn=32, H=64), dict(N=20, Dr=0)], ids=str)
def test_other_sizes_without_a_query_latent(device, backend, form, sizes):
    check(device, backend, torch.float16, 2, 3, True, form, latent=False, **sizes)


@pytest.mark.parametrize("form", ["row-major", "linear"])
def test_uneven_sizes_without_a_query_latent(device, backend, form):
    """No multiple of 16; 37 tokens."""
    sizes = dict(H=70, N=5, Dn=24, R=40, Dr=10)
    check(device, backend, torch.float16, 37, 1, False, form, latent=False, **sizes)


def test_no_token_without_a_query_latent(device, backend):
    given = plain_sample(device)
    rows = ("token_x", "rope_sin", "rope_cos", "cache_index")
    kept = {name: given[name].clone() for name in ("kv_cache", "kr_cache")}
    outs = run(OP, backend, **given | {name: given[name][:0] for name in rows})
    heads, _, rank = given["weight_uk"].shape
    assert [list(out.shape) for out in outs] == [[0, 2, heads, rank], [0, 2, heads, 16], [0]]
    assert all(torch.equal(given[name], kept[name]) for name in kept)


def plain_sample(device, dtype=torch.float16):
    """Small legal arguments without a query latent."""
    given = sample(OP, device, dtype)
    hidden = given["token_x"].shape[-1]
    columns = given["weight_uk"].shape[0] * (given["weight_uk"].shape[1] + 16)
    weight = custom.to_nz(torch.randn(hidden, columns).to(device, dtype))
    return given | dict(weight_dq=None, rmsnorm_gamma_cq=None, weight_uq_qr=weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight_dq=None), "one of `weight_dq` and `rmsnorm_gamma_cq` is None, expected both"),
        (dict(rmsnorm_gamma_cq=None), "one of `weight_dq` and .* or neither"),
        (
            dict(weight_dq=None, rmsnorm_gamma_cq=None),
            r"`weight_uq_qr` has shape .* expected \[N\*\(Dn\+Dr\)/8, H/16",
        ),
        (
            dict(weight_dq=None, rmsnorm_gamma_cq=None, weight_quant_mode=2),
            "`weight_quant_mode` is 2, expected 0 without a query latent",
        ),
        (
            dict(weight_dq=None, rmsnorm_gamma_cq=None, kv_cache_quant_mode=3),
            "`kv_cache_quant_mode` is 3, expected 0 without a query latent",
        ),
    ],
)
def test_errors_without_a_query_latent(change, message):
    refuse(OP, change, ValueError, message)


@pytest.mark.parametrize("name", ["weight_dq", "rmsnorm_gamma_cq"])
def test_v3_needs_a_query_latent(name):
    """Its signature is torch_npu's."""
    refuse("npu_mla_prolog_v3", {name: None}, TypeError, f"`{name}` is None, expected a tensor")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(weight_dq=torch.zeros(64, 48)), ValueError, r"`weight_dq` has .* H=64, Rq=32"),
        (dict(weight_dq=torch.zeros(4, 3, 16, 8)), ValueError, "`weight_dq` has shape .*H/16=4"),
        (dict(weight_uk=torch.zeros(2, 16, 48)), ValueError, "`weight_uk` has shape .* R=32"),
        (dict(token_x=torch.zeros(2, 2, 64).half()), TypeError, "has dtype"),
        (dict(cache_index=torch.zeros(2, 2)), TypeError, "`cache_index` is float32"),
        (dict(cache_index=torch.zeros(2, 3).int()), ValueError, "`cache_index` has .* S=2"),
        (dict(kv_cache=torch.zeros(8, 24, 1, 32)), ValueError, "has shape|pages of 24"),
        (dict(kr_cache=torch.zeros(7, 16, 1, 16)), ValueError, "`kr_cache` has .* pages=8"),
        (dict(rope_sin=torch.zeros(2, 2, 15)), ValueError, "`rope_cos` has shape"),
    ],
)
def test_errors(change, error, message):
    refuse(OP, change, error, message)


def test_nz_needs_multiples_of_16():
    """A size that is no multiple of 16 is for row-major weights only."""
    sizes = dict(rmsnorm_gamma_cq=torch.zeros(24), weight_uq_qr=torch.zeros(24, 64))
    refuse(
        OP, sizes | dict(weight_dq=torch.zeros(64, 24)), ValueError, "NZ with Rq=24, .* multiple"
    )
    arguments = sample(OP, CPU, torch.float32) | sizes | dict(weight_dq=torch.zeros(64, 24))
    arguments["weight_dkv_kr"] = torch.zeros(64, 48)
    _, _, query_norm = custom.npu_mla_prolog_pto(**arguments, weight_format="nd")
    assert query_norm.shape == (2, 2, 24)


def test_debug_finds_a_slot_written_twice(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    twice = torch.tensor([[3, -1], [-1, 3]], dtype=torch.int32)
    refuse(OP, dict(cache_index=twice), ValueError, "`cache_index` names a slot twice")
