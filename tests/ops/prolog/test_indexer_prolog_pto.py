# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_indexer_prolog_pto against its formulas, token by token."""

from __future__ import annotations

import pytest
import torch

from ...support.accuracy import skip_unless_taken
from ...support.prologs import FORMS, Tokens, check_caches, check_outputs, every_formula, refuse
from ...support.ragged import run

OP = "npu_indexer_prolog_pto"


def check(device, backend, dtype, B, S, interleaved, form="4-D NZ", **sizes):
    skip_unless_taken(dtype, device, backend)
    tokens = Tokens(B, S, dtype, **sizes).without_slots()
    w, (move, matrix) = tokens.layer, tokens.to(device, form)
    query_norm = torch.randn(B, S, len(w.gamma_cq)).to(dtype).double()
    cache = tokens.cache(len(w.in_gamma_k), device)
    before = cache.clone()
    outs = run(
        OP,
        backend,
        token_x=move(tokens.x),
        query_norm=move(query_norm),
        weight_qb=matrix(w.w_idx_qb),
        weight_k=matrix(w.w_idx_k),
        weight_proj=matrix(w.w_idx_proj),
        ln_gamma_k=move(w.in_gamma_k),
        ln_beta_k=move(w.in_beta_k),
        rope_sin=move(tokens.sin),
        rope_cos=move(tokens.cos),
        index_k_cache=cache,
        cache_index=tokens.slots.to(device, torch.int32),
        ln_epsilon=2e-5,
        rope_interleaved=interleaved,
        weight_format=FORMS[form][1],
    )
    plain, exact = tokens.outputs(
        lambda golden, at: golden.indexer_prolog(
            tokens.x[at], query_norm[at], tokens.sin[at], tokens.cos[at], 2e-5, interleaved
        )
    )
    check_outputs(("query_index", "weights"), outs, dtype, plain, exact)
    check_caches(tokens, "index_k_cache", cache, before, plain[2], exact[2])


@every_formula
def test_formulas(device, backend, dtype, B, S, interleaved):
    check(device, backend, dtype, B, S, interleaved)


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_any_form(device, backend, form):
    check(device, backend, torch.float16, 2, 3, False, form)


@pytest.mark.parametrize(
    "sizes", [dict(Di=16), dict(Ni=32, Di=64, Dr=64), dict(H=144, Rq=16), dict(Dr=0)], ids=str
)
def test_other_sizes(device, backend, sizes):
    """Among them heads that rotate as a whole, and not at all."""
    check(device, backend, torch.float16, 2, 3, False, **sizes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(weight_qb=torch.zeros(32, 500)), ValueError, r"`weight_qb` has .* Ni\*Di=512"),
        (dict(weight_k=torch.zeros(4, 5, 16, 8)), ValueError, "`weight_k` has .* Di/8=4, H/16=4"),
        (dict(weight_proj=torch.zeros(64, 24)), ValueError, "NZ with|Ni"),
        (
            dict(weight_qb=torch.zeros(16, 2, 16, 8), weight_proj=torch.zeros(1, 4, 16, 8)),
            ValueError,
            r"`weight_proj` is NZ with Ni=4, .* row-major with weight_format=\"nd\"",
        ),
        (dict(ln_beta_k=torch.zeros(16)), ValueError, "`ln_beta_k` has shape .* Di=32"),
        (dict(query_norm=torch.zeros(2, 3, 32)), ValueError, "`query_norm` has shape .* S=2"),
        (dict(query_norm=torch.zeros(2, 2, 32).half()), TypeError, "`query_norm` has dtype"),
        (
            dict(rope_sin=torch.zeros(2, 2, 48), rope_cos=torch.zeros(2, 2, 48)),
            ValueError,
            "the rotary size Dr is 48, expected at most the index dim Di=32",
        ),
    ],
)
def test_errors(change, error, message):
    refuse(OP, change, error, message)
