# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What people do who come from another project, on CPU tensors as they try it first: each mistake
gets a sentence that says the op, the argument, what came, what is wanted, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from custom.dispatch import log, values
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import custom

pytestmark = pytest.mark.usefixtures("looked_at")


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


def i32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense(q: tuple[int, ...] = (1, 8, 16, 8), k: Any = None, **changes: Any) -> Any:
    keys = r(*(k or q))
    return custom.npu_fused_attention(r(*q), keys, keys, **changes)


def packed(sums_q: Any, sums_k: Any) -> Any:
    return dense((10, 2, 16), cu_seqlens_q=sums_q, cu_seqlens_k=sums_k)


TABLE = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)


def indexer(**changes: Any) -> Any:
    given: dict[str, Any] = dict(
        query=r(2, 1, 4, 16),
        key=r(8, 128, 1, 16),
        weights=r(2, 1, 4),
        block_table=TABLE,
        actual_seq_lengths_key=i32(100, 200),
        layout_key="PA_BSND",
        sparse_count=16,
    )
    return custom.npu_lightning_indexer(**(given | changes))


def sparse(**changes: Any) -> Any:
    given: dict[str, Any] = dict(
        query=r(2, 1, 4, 32),
        key=r(8, 128, 1, 32),
        value=None,
        scale_value=0.1,
        sparse_indices=torch.zeros(2, 1, 1, 16, dtype=torch.int32),
        query_rope=r(2, 1, 4, 16),
        key_rope=r(8, 128, 1, 16),
        actual_seq_lengths_kv=i32(100, 200),
        block_table=TABLE,
        layout_kv="PA_BSND",
    )
    return custom.npu_sparse_flash_attention(**(given | changes))


def latents(**changes: Any) -> Any:
    cache = r(8, 128, 1, 32)
    return custom.npu_fused_infer_attention_score_v2(r(2, 1, 4, 32), cache, cache, **changes)


def nz(*shape: int) -> Tensor:
    return custom.to_nz(r(*shape) / 8)


def layer(**changes: Any) -> Any:
    given: dict[str, Any] = dict(
        x=r(1, 1, 64),
        w_dq=nz(64, 32),
        w_uq_qr=nz(32, 64),
        w_uk=r(2, 16, 32),
        w_dkv_kr=nz(64, 48),
        gamma_cq=torch.ones(32),
        gamma_ckv=torch.ones(32),
        sin=r(1, 1, 16),
        cos=r(1, 1, 16),
        cache_index=i32(37)[None],
        kv_cache=r(8, 16, 1, 32),
        kr_cache=r(8, 16, 1, 16),
        block_table=i32(0, 1, 2)[None],
        act_seqs=i32(38),
        w_idx_qb=nz(32, 512),
        w_idx_k=nz(64, 32),
        w_idx_proj=nz(64, 16),
        in_gamma_k=torch.ones(32),
        in_beta_k=torch.zeros(32),
        index_k_cache=r(8, 16, 1, 32),
        sparse_count=16,
    )
    return custom.npu_sparse_attention_pto(**(given | changes))


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(r(*shape), dim=-1)


def rule(**changes: Any) -> Any:
    given: dict[str, Any] = dict(
        query=unit(7, 2, 16),
        key=unit(7, 2, 16),
        value=r(7, 4, 16),
        beta=torch.rand(7, 4),
        g=-r(7, 4).abs(),
        actual_seq_lengths=i32(3, 4),
    )
    return custom.npu_chunk_gated_delta_rule(**(given | changes))


def convolved(weight: Tensor, **changes: Any) -> Any:
    return custom.npu_causal_conv1d(r(1, 9, 16), weight, **changes)


def quantized(dtype: torch.dtype, *modes: int, **changes: Any) -> Any:
    q = torch.zeros(1, 1, 4, 128, dtype=dtype)
    k, scales = torch.zeros(2, 16, 1, 128, dtype=dtype), r(2, 16, 1)
    paged = dict(layout_key="PA_BSND", block_table=i32(0, 1)[None], actual_seq_lengths_key=i32(20))
    return custom.npu_quant_lightning_indexer(
        q, k, r(1, 1, 4), None, scales, *modes, **paged, **changes
    )


def loss(indices: Tensor) -> Any:
    return custom.compute_index_loss_sparse(r(1, 2, 4, 16), r(1, 8, 16), r(1, 4, 3), indices, 0.25)


class Mistake(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception] | None
    """None: it is legal, and a line on stderr says what it most often is."""
    said: str


MISTAKES = {
    "FlashAttention's layout": Mistake(
        lambda: dense((1, 64, 8, 16), causal=True),
        None,
        "npu_fused_attention: `q` is read as 64 heads of 8 tokens, [B, N, S, D]. If it is "
        "[B, S, N, D], as FlashAttention has it, pass q, k and v .transpose(1, 2).",
    ),
    "two dtypes": Mistake(
        lambda: custom.npu_fused_attention(r(1, 2, 4, 8).half(), *[r(1, 2, 4, 8)] * 2),
        TypeError,
        "npu_fused_attention: `k` has dtype torch.float32, expected torch.float16 (from `q`). "
        "Convert one of them with .to().",
    ),
    "heads that do not divide": Mistake(
        lambda: dense((1, 8, 4, 16), (1, 3, 4, 16)),
        ValueError,
        "npu_fused_attention: `q` has 8 heads and `k` 3, expected a multiple of the heads of `k`. "
        "Pass keys and values whose number of heads divides 8.",
    ),
    "softmax_scale": Mistake(
        lambda: dense(softmax_scale=0.1),
        TypeError,
        "npu_fused_attention: `softmax_scale` is no argument of it. Did you mean `sm_scale`?",
    ),
    "sums in a list": Mistake(
        lambda: packed([0, 4, 10], [0, 4, 10]),
        TypeError,
        "npu_fused_attention: `cu_seqlens_q` is of type list, expected Tensor or None. Make it one "
        "with torch.as_tensor().",
    ),
    "sums of queries alone": Mistake(
        lambda: packed(i32(0, 4, 10), None),
        ValueError,
        "npu_fused_attention: only one of `cu_seqlens_q` and `cu_seqlens_k` is given, expected "
        "both (varlen) or none. Where keys are cut as queries are, pass the same tensor for both.",
    ),
    "sums past the tokens": Mistake(
        lambda: packed(i32(0, 4, 12), i32(0, 4, 12)),
        ValueError,
        "npu_fused_attention: `cu_seqlens_q` is [0, 4, 12], expected prefix sums that never fall, "
        "from 0 to at most 10. The last one is the number of tokens.",
    ),
    "sums without their leading 0": Mistake(
        lambda: packed(i32(4, 10), i32(4, 10)),
        None,
        "npu_fused_attention: `cu_seqlens_q` begins at 4, so that as many tokens are of no "
        "sequence. If they are its first sequence, put a 0 in front: "
        "torch.nn.functional.pad(x, (1, 0)).",
    ),
    "TND sums with a leading 0": Mistake(
        lambda: indexer(
            query=r(2, 4, 16),
            weights=r(2, 4),
            layout_query="TND",
            actual_seq_lengths_query=i32(0, 1, 2),
        ),
        ValueError,
        "npu_lightning_indexer: `actual_seq_lengths_query` has 3 numbers, expected 2, as "
        "`actual_seq_lengths_key` has: prefix sums of layout 'TND' have no leading 0. Pass "
        "actual_seq_lengths_query[1:].",
    ),
    "TND without sums": Mistake(
        lambda: indexer(query=r(2, 4, 16), weights=r(2, 4), layout_query="TND"),
        ValueError,
        "npu_lightning_indexer: `actual_seq_lengths_query` is missing, and layout 'TND' needs it. "
        "Pass prefix sums without the leading 0.",
    ),
    "no table": Mistake(
        lambda: indexer(block_table=None),
        ValueError,
        "npu_lightning_indexer: `block_table` is missing, and paged keys need it. Pass "
        "[B, max_pages], the page of each block of positions.",
    ),
    "a table of floats": Mistake(
        lambda: indexer(block_table=TABLE.float()),
        TypeError,
        "npu_lightning_indexer: `block_table` is float32, expected int32, int64. Convert it with "
        ".to().",
    ),
    "lengths on another device": Mistake(
        lambda: indexer(actual_seq_lengths_key=i32(100, 200).to("meta")),
        ValueError,
        "npu_lightning_indexer: `actual_seq_lengths_key` has device meta, expected cpu (from "
        "`query`). Move one of them with .to().",
    ),
    "pages of 24": Mistake(
        lambda: indexer(key=r(8, 24, 1, 16)),
        ValueError,
        "npu_lightning_indexer: the page size is 24, expected a multiple of 16 (from `key`). "
        "Allocate the cache in such pages, [pages, P, 1, D].",
    ),
    "PA_BNSD": Mistake(
        lambda: indexer(layout_key="PA_BNSD"),
        ValueError,
        "npu_lightning_indexer: `layout_key` is 'PA_BNSD', expected one of 'BSND', 'TND', "
        "'PA_BSND'. Keys have one head: pass the pages [pages, P, 1, D] (.transpose(1, 2) of them) "
        "as 'PA_BSND'.",
    ),
    "lengths past the table": Mistake(
        lambda: indexer(actual_seq_lengths_key=i32(100, 9999)),
        ValueError,
        "npu_lightning_indexer: `actual_seq_lengths_key` is [100, 9999], expected lengths from 0 "
        "to 256. Shorten what is longer, or pass the tensors (a table of more pages) that hold it.",
    ),
    "no scale": Mistake(
        lambda: custom.npu_sparse_flash_attention(
            r(1, 2, 4, 32), r(1, 9, 1, 32), None, torch.zeros(1, 2, 1, 4, dtype=torch.int32)
        ),
        TypeError,
        "npu_sparse_flash_attention: `scale_value` is missing. It has no default: pass a value for "
        "each.",
    ),
    "the rotary part of queries alone": Mistake(
        lambda: sparse(key_rope=None),
        ValueError,
        "npu_sparse_flash_attention: only one of `query_rope` and `key_rope` is given, expected "
        "both or none. Pass the other as well, or join each with its latent.",
    ),
    "indices [B, S, K]": Mistake(
        lambda: sparse(sparse_indices=torch.zeros(2, 1, 16, dtype=torch.int32)),
        ValueError,
        "npu_sparse_flash_attention: `sparse_indices` has shape [2, 1, 16], expected [B, S, 1, K] "
        "with B=2, S=1 (from `query`). Pass sparse_indices.unsqueeze(1).",
    ),
    "what the indexer returns": Mistake(
        lambda: sparse(sparse_indices=indexer()),
        TypeError,
        "npu_sparse_flash_attention: `sparse_indices` is of type tuple, expected Tensor. Pass one "
        "of its tensors: [0] is the first.",
    ),
    "attention_mode 0": Mistake(
        lambda: sparse(attention_mode=0),
        ValueError,
        "npu_sparse_flash_attention: `attention_mode` is 0, expected 2 (absorbed latent attention),"
        " the only one there is; torch_npu's default 0 is not valid there either. Leave it out.",
    ),
    "BSND queries as TND": Mistake(
        lambda: sparse(layout_query="TND"),
        ValueError,
        "npu_sparse_flash_attention: `query` has shape [2, 1, 4, 32], expected [T, N, D]. Pass "
        "query.flatten(0, 1).",
    ),
    "sparse_block_size by position": Mistake(
        lambda: custom.npu_sparse_flash_attention(
            r(1, 2, 4, 32), r(1, 9, 1, 32), None, torch.zeros(1, 2, 1, 4), 0.1, 1
        ),
        TypeError,
        "npu_sparse_flash_attention: 6 arguments came by position, expected at most 5 (`query`, "
        "`key`, `value`, `sparse_indices`, `scale_value`). Pass `block_table`, "
        "`actual_seq_lengths_query`, `actual_seq_lengths_kv`, `query_rope`, `key_rope`, "
        "`sparse_block_size`, `layout_query`, `layout_kv`, `sparse_mode`, `pre_tokens`, "
        "`next_tokens`, `attention_mode`, `return_softmax_lse`, `sinks` by name.",
    ),
    "a row-major weight as NZ": Mistake(
        lambda: layer(w_dq=r(64, 32)),
        None,
        'a 2-D weight on cpu is read as FRACTAL_NZ bytes, since weight_format is "nz". For a '
        'row-major [K, N] pass weight_format="nd" or custom.to_nz(weight), for nn.Linear.weight '
        'weight_format="linear".',
    ),
    "nn.Linear's weight": Mistake(
        lambda: layer(w_dq=r(32, 64), weight_format="nd"),
        ValueError,
        "npu_sparse_attention_pto: `w_dq` has shape [32, 64], expected [H, Rq] = [64, 32]. As it "
        'is it fits weight_format="linear", which wants all weights so.',
    ),
    "[K, N] as nn.Linear's weight": Mistake(
        lambda: layer(w_dq=r(64, 32), weight_format="linear"),
        ValueError,
        "npu_sparse_attention_pto: `w_dq` has shape [64, 32], expected [Rq, H] = [32, 64]. As it "
        'is it fits weight_format="nd", which wants all weights so.',
    ),
    "NZ as nn.Linear's weight": Mistake(
        lambda: layer(weight_format="linear"),
        ValueError,
        "npu_sparse_attention_pto: `w_dq` has shape [4, 4, 16, 8], which is NZ, expected [Rq, H] "
        'with weight_format="linear". Pass nn.Linear.weight itself, or all weights as NZ with '
        'weight_format="nz".',
    ),
    "sin [T, Dr]": Mistake(
        lambda: layer(sin=r(1, 16)),
        ValueError,
        "npu_sparse_attention_pto: `sin` has shape [1, 16], expected [B, S, Dr] with B=1, S=1 "
        "(from `x`). Pass sin.unsqueeze(0).",
    ),
    "half of a cache": Mistake(
        lambda: layer(kv_cache=r(8, 16, 1, 64)[..., :32]),
        ValueError,
        "npu_sparse_attention_pto: `kv_cache` is not contiguous (shape [8, 16, 1, 32], strides "
        "[1024, 64, 64, 1]). Pass kv_cache.contiguous(); a cache must be allocated contiguous.",
    ),
    "weights in float32": Mistake(
        lambda: layer(x=r(1, 1, 64).bfloat16()),
        TypeError,
        "npu_sparse_attention_pto: `gamma_cq` has dtype torch.float32, expected torch.bfloat16 "
        "(from `x`). Convert one of them with .to().",
    ),
    "training an inference op": Mistake(
        lambda: layer(x=r(1, 1, 64).requires_grad_()),
        RuntimeError,
        "npu_sparse_attention_pto: `x` requires grad, and this op has no backward. Call it under "
        "torch.no_grad() (or torch.inference_mode()).",
    ),
    "fla's layout": Mistake(
        lambda: rule(query=r(1, 7, 2, 16), key=r(1, 7, 2, 16), value=r(1, 7, 4, 16)),
        ValueError,
        "npu_chunk_gated_delta_rule: `query` has shape [1, 7, 2, 16], expected [T, N, Dk]. Pass "
        "query.flatten(0, 1).",
    ),
    "sums for lengths": Mistake(
        lambda: rule(actual_seq_lengths=i32(0, 3, 7)),
        ValueError,
        "npu_chunk_gated_delta_rule: `actual_seq_lengths` adds up to 10, expected lengths from 0 "
        "and at most T=7 tokens. Of prefix sums pass .diff().",
    ),
    "cu_seqlens": Mistake(
        lambda: rule(cu_seqlens=i32(0, 3, 7)),
        TypeError,
        "npu_chunk_gated_delta_rule: `cu_seqlens` is no argument of it. Did you mean "
        "`actual_seq_lengths`? It holds lengths: pass the prefix sums' .diff().",
    ),
    "states [Dk, Dv]": Mistake(
        lambda: rule(value=r(7, 4, 8), initial_state=torch.zeros(2, 4, 16, 8)),
        ValueError,
        "npu_chunk_gated_delta_rule: `initial_state` has shape [2, 4, 16, 8], expected "
        "[B, Nv, Dv, Dk] with B=2, Nv=4, Dv=8, Dk=16 (from `actual_seq_lengths`, `value`, "
        "`query`). Pass initial_state.mT.",
    ),
    "keys of any length": Mistake(
        lambda: rule(key=unit(7, 2, 16) * 3, beta=torch.ones(7, 4)),
        None,
        "npu_chunk_gated_delta_rule: `beta` |`key`|^2 is up to 9, and above 2 the state grows by "
        "every token. If keys should be of length 1 (fla's use_qk_l2norm_in_kernel), pass "
        "torch.nn.functional.normalize(key.float(), dim=-1), and the query likewise.",
    ),
    "a decay above 1": Mistake(
        lambda: rule(g=torch.full((7, 4), 0.5)),
        None,
        "npu_chunk_gated_delta_rule: `g` is up to 0.5, and above 0 the state grows by every token. "
        "It is the logarithm of the decay: -A_log.exp() * softplus(a + dt_bias), say.",
    ),
    "nn.Conv1d's weight": Mistake(
        lambda: convolved(r(16, 1, 4)),
        ValueError,
        "npu_causal_conv1d: `weight` has shape [16, 1, 4], expected [W, D] with D=16 (from `x`). "
        "Pass weight.squeeze(1).t().",
    ),
    "causal-conv1d's weight": Mistake(
        lambda: convolved(r(16, 4)),
        ValueError,
        "npu_causal_conv1d: `weight` has shape [16, 4], expected [W, D] with D=16 (from `x`). Pass "
        "weight.t().",
    ),
    "activation=True": Mistake(
        lambda: convolved(r(4, 16), activation=True),
        TypeError,
        "npu_causal_conv1d: `activation` is of type bool, expected str or None. Pass its name: "
        "'silu' for an activation that is on, None for off.",
    ),
    "lists for tensors": Mistake(
        lambda: custom.npu_fused_attention([[1.0]], r(1, 1, 1, 8), r(1, 1, 1, 8)),
        TypeError,
        "npu_fused_attention: `q` is of type list, expected Tensor. Make it one with "
        "torch.as_tensor().",
    ),
    "bytes that say no dtype": Mistake(
        lambda: quantized(torch.uint8, 0, 0),
        TypeError,
        "npu_quant_lightning_indexer: `query` is uint8 and `query_dtype` is None, expected the "
        "dtype of its values. Pass query_dtype=torch.float8_e4m3fn or torch.int8.",
    ),
    "no quant modes": Mistake(
        lambda: quantized(torch.int8),
        TypeError,
        "npu_quant_lightning_indexer: `query_quant_mode`, `key_quant_mode` are missing. They have "
        "no default: pass a value for each.",
    ),
    "int16 indices": Mistake(
        lambda: loss(torch.zeros(1, 4, 3, dtype=torch.int16)),
        TypeError,
        "npu_indexer_loss: `indices` is int16, expected int32, int64. Convert it with .to().",
    ),
    "a misspelt op": Mistake(
        lambda: custom.npu_flash_attention,
        AttributeError,
        "custom has no `npu_flash_attention`. Did you mean `npu_sparse_flash_attention` or "
        "`npu_fused_attention` or `npu_sparse_flash_attention_grad`?",
    ),
    "too few arguments": Mistake(
        lambda: custom.npu_lightning_indexer(r(1, 1, 4, 128)),
        TypeError,
        "npu_lightning_indexer: `key`, `weights` are missing. They have no default: pass a value "
        "for each.",
    ),
    "an activation that is not there": Mistake(
        lambda: custom.npu_gated_rms_norm(r(4, 16), r(4, 16), torch.ones(16), activation="relu"),
        ValueError,
        "npu_gated_rms_norm: `activation` is 'relu', expected one of 'silu', 'swish', 'sigmoid'.",
    ),
}


@pytest.fixture(autouse=True)
def _first_call(monkeypatch):
    """Nothing is said yet, and the device decides who runs it."""
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(custom.config, "backend", "auto")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_do(name, capsys):
    call, error, said = MISTAKES[name]
    if error is None:
        call()
        assert capsys.readouterr().err == f"custom: {said}\n"
        return
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == said and capsys.readouterr().err == ""


LEGAL = {
    "tables of int64": lambda: indexer(block_table=TABLE.long()),
    "pages that are not there": lambda: indexer(block_table=TABLE - 1),
    "sums of int64": lambda: packed(i32(0, 4, 10).long(), i32(0, 4, 10).long()),
    "sums that end early": lambda: packed(i32(0, 4, 8), i32(0, 4, 8)),
    "heads of 80": lambda: dense((1, 2, 8, 80)),
    "gates of half precision": lambda: rule(beta=torch.rand(7, 4).bfloat16()),
    "slots that are not there": lambda: layer(cache_index=i32(-1)[None]),
    "positions that are not there": lambda: sparse(
        sparse_indices=torch.full((2, 1, 1, 16), 9999, dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_is_not_remarked_upon(name, capsys):
    LEGAL[name]()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: dense(max_seqlen_q=4), "Leave it out: the prefix sums say it."),
        (lambda: dense(window_size=(4, 0)), "Did you mean `window`? Of FlashAttention's (w, 0) it"),
        (lambda: dense(is_causal=True), "Did you mean `causal`?"),
        (lambda: dense(dropout_p=0.1), "there is no dropout"),
        (lambda: dense(block_table=TABLE), "Keys of this op are not paged"),
        (lambda: dense(actual_seq_qlen=[4]), "Did you mean `cu_seqlens_q`? It holds prefix sums w"),
        (lambda: dense(determinstic=True), "Did you mean `deterministic`?"),
        (lambda: dense(nonsense=True), "It takes `q`, `k`, `v`, `causal`, "),
        (lambda: indexer(cu_seqlens_q=TABLE), "Did you mean `actual_seq_lengths_query`? With layo"),
        (lambda: indexer(topk=4), "Did you mean `sparse_count`?"),
        (lambda: sparse(context_lens=TABLE), "Did you mean `actual_seq_lengths_kv`? It holds a"),
        (lambda: rule(use_qk_l2norm_in_kernel=True), "torch.nn.functional.normalize(x.float()"),
        (lambda: rule(output_final_state=True), "the final state is always returned"),
        (lambda: convolved(r(4, 16), conv_states=r(1, 3, 16)), "Did you mean `initial_states`?"),
        (lambda: layer(actual_seq_lengths_kv=TABLE), "Did you mean `act_seqs`?"),
        (lambda: latents(actual_seq_lengths_kv=[4]), "Did you mean `actual_seq_kvlen`? It holds a"),
        (lambda: latents(cache_seqlens=[4]), "Did you mean `actual_seq_kvlen`?"),
        (lambda: latents(cu_seqlens_q=[0, 1]), "Did you mean `actual_seq_qlen`? With layout 'TND'"),
        (lambda: latents(softmax_lse_flag=True), "Did you mean `return_softmax_lse`?"),
        (lambda: latents(sinks=r(4)), "Did you mean `learnable_sink`?"),
        (lambda: latents(is_causal=True), "Did you mean `sparse_mode`? causal=True is sparse_mode"),
        (lambda: latents(attn_mask=None), "Did you mean `atten_mask`?"),
        (lambda: custom.npu_compressor(block_table=TABLE), "Did you mean `state_block_table`?"),
    ],
)
def test_keywords_of_others(call, said):
    with pytest.raises(TypeError, match=r"^\w+: `\w+` is no argument of it\. ") as raised:
        call()
    assert said in str(raised.value)


def test_an_argument_that_came_twice():
    with pytest.raises(TypeError, match=r"^npu_fused_attention: `causal` came twice"):
        custom.npu_fused_attention(*[r(1, 1, 2, 8)] * 3, True, causal=True)


def test_an_error_of_the_op_itself_keeps_its_words():
    """A TypeError that is no question of binding."""
    with pytest.raises(TypeError, match=r"`q` is of type str"):
        custom.attention("q", r(1, 1, 2, 8), r(1, 1, 2, 8), True, 1.0, 16, 16)


# ------------------------------------------------------------------- where values are looked at

PAST = i32(100, 9999)


def test_variable_turns_it_off(monkeypatch):
    monkeypatch.setattr(values, "on_cpu", False)
    indexer(actual_seq_lengths_key=PAST)


def test_every_call_is_looked_at():
    """One that is like an earlier one as well."""
    for lengths in (i32(100, 200), i32(100, 200)):
        indexer(actual_seq_lengths_key=lengths)
    with pytest.raises(ValueError, match=r"is \[100, 9999\]"):
        indexer(actual_seq_lengths_key=PAST)


def test_kernels_of_another_device_are_not(monkeypatch):
    """On CPU tensors too, where an interpreter runs them: they would wait."""
    assert values.looked_at(torch.device("cpu")) and not values.looked_at(torch.device("cuda"))
    for backend in ("cuda", "npu"):
        monkeypatch.setattr(custom.config, "backend", backend)
        assert not values.looked_at(torch.device("cpu"))


def test_debug_refuses_absent_pages_too(monkeypatch):
    indexer(block_table=TABLE - 1)
    monkeypatch.setattr(custom.config, "debug", True)
    with pytest.raises(ValueError, match="`block_table` has the pages"):
        indexer(block_table=TABLE - 1)


def test_a_graph_has_no_values():
    """None are there while one is made."""
    with FakeTensorMode():
        assert not values.known(torch.zeros(2))
    assert not values.known(torch.zeros(2, device="meta")) and values.known(torch.zeros(2))
