# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What the bench hands to other packages: stand-ins with their signatures compute by formula, in
double, and must come to what our ops do."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import pytest
import torch

from custom.bench import peers
from custom.bench.__main__ import relative_error
from custom.bench.attention import case as dense_case
from custom.bench.block_sparse import Model as Blocks
from custom.bench.block_sparse import attention as blocks_case
from custom.bench.block_sparse import indexer as block_indexer_case
from custom.bench.delta_rule import kda_case
from custom.bench.sparse_attention import attention_case, prefill_case
from custom.bench.sparse_gradients import attention_case as grad_case
from custom.bench.sparse_gradients import indexer_case, loss_case

CPU = torch.device("cpu")


def dense(q, k, v, causal):
    """[B, S, N, D], in double."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        above = torch.ones(scores.shape[-2:]).triu(scores.shape[-1] - scores.shape[-2] + 1).bool()
        scores = scores.masked_fill(above, float("-inf"))
    return scores, (scores.softmax(-1) @ v).transpose(1, 2)


def dense_grads(d_out, q, k, v, causal):
    given = [x.double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(dense(*given, causal)[1], given, d_out.double())


def rows(key, index):
    return key.double()[index.clamp_min(0).long()], index < 0


def sparse(q, kv, index, scale):
    """(out, lse): q [T, N, 576], kv [S, 576], index [T, K]."""
    found, absent = rows(kv, index)
    scores = torch.einsum("tnd,tkd->tnk", q.double(), found) * scale
    scores = scores.masked_fill(absent[:, None], float("-inf"))
    out = torch.einsum("tnk,tkd->tnd", scores.softmax(-1), found[..., :512])
    return out, scores.logsumexp(-1)


def index_scores(q, k, weights, index):
    """q [T, N, 128], k [S, 128], weights [T, N]."""
    found, absent = rows(k, index)
    each = torch.einsum("tnd,tkd->tnk", q.double(), found).relu()
    return (each * weights.double()[..., None]).sum(1).masked_fill(absent, float("-inf"))


@pytest.fixture
def package(monkeypatch):
    """A stand-in under a package's names, which alone is installed."""
    known = set()

    def make(name, **functions):
        module = ModuleType(name)
        for each, function in functions.items():
            setattr(module, each, function)
        known.add(name)
        monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.setattr(peers, "installed", lambda name, tensor: name in known)
    return make


def run(case, name, seed=0):
    """(ours, theirs)"""
    arguments = case.make(CPU, seed)
    call = case.peers[name](arguments)
    assert call is not None
    ours = case.call(arguments)
    return ([ours] if isinstance(ours, torch.Tensor) else list(ours)), call()


@pytest.mark.parametrize("module, name", [
    ("flash_attn_interface", "flash_attn_3"), ("flash_attn.cute", "flash_attn_4"),
])  # fmt: skip
@pytest.mark.parametrize("heads, both", [(2, False), (1, True)])
def test_dense_attention(package, module, name, heads, both):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        out = dense(q, k, v, causal)[1]
        return (out, None) if both else out

    package(module, flash_attn_func=flash_attn_func)
    case = dense_case("npu_fused_attention", 2, 2, heads, 24, 40, 32)
    (ours, _), theirs = run(case, name)
    assert relative_error([theirs.transpose(1, 2)], [ours]) < case.tolerance


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradient_of_dense_attention_by_the_third_version(package, deterministic):
    seen = []

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, *, dq, dk, dv, softmax_scale, is_causal, deterministic
    ):
        scores, wanted = dense(q, k, v, is_causal)
        assert relative_error([softmax_lse, out], [scores.logsumexp(-1), wanted]) < 1e-2
        assert softmax_scale == q.shape[-1] ** -0.5
        seen.append(deterministic)
        for to, x in zip((dq, dk, dv), dense_grads(dout, q, k, v, is_causal), strict=True):
            to.copy_(x)

    package("flash_attn_interface", _flash_attn_backward=_flash_attn_backward)
    case = dense_case(
        "npu_fused_attention_backward", 1, 2, 2, 24, 24, 32, deterministic=deterministic
    )
    ours, theirs = run(case, "flash_attn_3")
    assert relative_error([x.transpose(1, 2) for x in theirs], ours) < case.tolerance
    assert set(seen) == {deterministic}


def test_gradient_of_dense_attention_by_the_fourth_version(package):
    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False):
        scores, wanted = dense(q, k, v, causal)
        assert relative_error([lse, out], [scores.logsumexp(-1), wanted]) < 1e-2
        return dense_grads(dout, q, k, v, causal)

    package("flash_attn.cute")
    package("flash_attn.cute.interface", _flash_attn_bwd=_flash_attn_bwd)
    case = dense_case("npu_fused_attention_backward", 1, 2, 1, 24, 24, 32)
    ours, theirs = run(case, "flash_attn_4")
    assert relative_error([x.transpose(1, 2) for x in theirs], ours) < case.tolerance


@pytest.mark.parametrize("case", [
    partial(attention_case, 2, 2, 16, 1024, 64), partial(prefill_case, 40, 8, 256, 32),
])  # fmt: skip
def test_sparse_attention(package, case):
    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        assert q.shape[1] == 64 and kv.shape[1] == indices.shape[1] == 1
        out, lse = sparse(q, kv[:, 0], indices[:, 0], sm_scale)
        return out, None, lse

    package("flash_mla", flash_mla_sparse_fwd=flash_mla_sparse_fwd)
    case = case()
    ours, theirs = run(case, "flash_mla_sparse")
    heads = ours[0].shape[-2]
    assert relative_error([theirs[0][:, :heads]], [ours[0].flatten(0, 1)]) < case.tolerance


class Cudnn:
    """cudnn.deepseek_sparse_attention, by autograd."""

    def sparse_attention_backward_wrapper(
        self, q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale
    ):
        given = [x.double().requires_grad_() for x in (q, kv)]
        wanted, of_row = sparse(*given, topk_idxs, softmax_scale)
        assert relative_error([out, lse], [wanted.detach(), of_row.detach()]) < 1e-2
        assert (attn_sink - lse).exp().max() < 1e-30
        d_q, d_kv = torch.autograd.grad(wanted, given, dout.double())
        return dict(dq=d_q, dkv=d_kv)

    def sparse_attn_score_recompute_wrapper(self, q_attn, k_attn, lse, topk_indices, softmax_scale):
        found, absent = rows(k_attn[0], topk_indices[0])
        scores = torch.einsum("tnd,tkd->tnk", q_attn[0].double(), found) * softmax_scale
        p = (scores - lse[0][..., None]).exp().masked_fill(absent[:, None], 0).sum(1)
        return dict(target=(p / p.sum(-1, keepdim=True))[None])

    def sparse_indexer_score_recompute_wrapper(self, q_indexer, k_indexer, weights, topk_indices):
        scores = index_scores(q_indexer[0], k_indexer[0], weights[0], topk_indices[0])
        return dict(predict=scores.softmax(-1)[None])

    def indexer_backward_wrapper(
        self, index_q, weights, index_k, attn_score, index_score, topk_indices, grad_loss,
        loss_coeff=1.0,
    ):  # fmt: skip
        assert grad_loss.shape == (1,)
        given = [x[0].double().requires_grad_() for x in (index_q, weights, index_k)]
        signal = (index_score - attn_score)[0] * loss_coeff / topk_indices[0].shape[0]
        attn_score.copy_(signal[None])
        q, w, k = given
        scores = index_scores(q, k, w, topk_indices[0])
        there = torch.isfinite(scores)
        d_q, d_w, d_k = torch.autograd.grad(
            torch.where(there, scores, 0), given, torch.where(there, signal.double(), 0)
        )
        return dict(d_index_q=d_q[None], d_weights=d_w[None], d_index_k=d_k[None])


@pytest.fixture
def cudnn(package):
    made = Cudnn()
    names = [name for name in dir(Cudnn) if name.endswith("_wrapper")]
    package("cudnn.deepseek_sparse_attention", **{name: getattr(made, name) for name in names})


def test_gradient_of_sparse_attention(cudnn):
    case = grad_case(24, 16, 128, 32)
    (d_q, d_k, _, d_qr, d_kr), theirs = run(case, "cudnn")
    wanted = [torch.cat([d_q, d_qr], -1)[0], torch.cat([d_k, d_kr], -1)[0, :, 0]]
    assert relative_error([theirs["dq"], theirs["dkv"]], wanted) < case.tolerance


def test_gradient_of_the_indexer(cudnn):
    """Theirs begins at a softmax's gradient, which is nothing here: shapes alone."""
    case = indexer_case(24, 128, 32)
    (d_q, d_k, d_w), theirs = run(case, "cudnn")
    assert theirs["d_index_q"].shape == d_q.shape and theirs["d_weights"].shape == d_w.shape
    assert theirs["d_index_k"].shape == d_k[:, :, 0].shape


def test_gradients_of_the_loss(cudnn):
    case = loss_case(24, 16, 128, 32)
    (d_q, d_k, d_w, *_), theirs = run(case, "cudnn")
    names = ("d_index_q", "d_index_k", "d_weights")
    got = [theirs[name] for name in names]
    assert relative_error(got, [d_q, d_k[:, :, 0], d_w]) < case.tolerance


# a page has 128 rows, and so has a block of vLLM
BLOCKS = Blocks("blocks", 8, 2, 32, 128, 3, True)


def over_tokens(q, keys, values, chosen, scale):
    """[T, N, D]: q of token t sees `chosen(t, head of keys)` of keys, values [S, Nk, D] of it."""
    out = torch.empty(q.shape, dtype=torch.double)
    group = q.shape[1] // keys(0).shape[1]
    for t, n in ((t, n) for t in range(q.shape[0]) for n in range(q.shape[1])):
        at = chosen(t, n // group).long()
        k, v = (x(t)[at, n // group].double() for x in (keys, values))
        out[t, n] = (k @ q[t, n].double() * scale).softmax(0) @ v
    return out


def tokens_of(blocks, size, length):
    """Positions of the chosen blocks, below `length`."""
    at = (blocks.long()[:, None] * size + torch.arange(size)).flatten()
    return at[at < length]


def request_of(starts, t):
    return int((starts[1:] <= t).sum())


def vllm_stand_in(query, cache, index, table, starts, lengths, heads, scale):
    """cache [pages, Nk, 128, 2 D]"""
    assert cache.shape[1] == heads == index.shape[0] and cache.shape[2] == 128
    size = query.shape[-1]

    def rows_of(half):
        paged = cache[..., half].transpose(1, 2)
        return lambda t: paged[table[request_of(starts, t)].long()].flatten(0, 1)

    def chosen(t, head):
        r = request_of(starts, t)
        return tokens_of(index[head, t], 128, int(lengths[r] - (starts[r + 1] - t) + 1))

    halves = (rows_of(slice(0, size)), rows_of(slice(size, None)))
    return over_tokens(query, *halves, chosen, scale)


def assert_agrees(case, package):
    """Blocks of theirs and ours."""
    (ours, _), theirs = run(case, package)
    assert relative_error([theirs], [ours]) < case.tolerance


@pytest.mark.parametrize("s", [1, 3])
def test_blocks_by_vllm(package, s):
    def minimax_m3_sparse_attn(
        q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len,
        num_kv_heads, sm_scale, output, k_scale=None, v_scale=None,
    ):  # fmt: skip
        assert max_query_len == 3
        assert torch.equal(seq_lens - prefix_lens, cu_seqlens_q.diff())
        given = (q, kv_cache, topk_idx, block_table, cu_seqlens_q, seq_lens)
        output.copy_(vllm_stand_in(*given, num_kv_heads, sm_scale))

    def minimax_m3_sparse_attn_decode(
        q, kv_cache, topk_idx, block_table, seq_lens, num_kv_heads, sm_scale, output,
        decode_query_len, k_scale=None, v_scale=None, query_start_loc=None,
        token_to_req_indices=None,
    ):  # fmt: skip
        assert decode_query_len == 1
        starts = torch.arange(len(seq_lens) + 1)
        given = (q, kv_cache, topk_idx, block_table, starts, seq_lens)
        output.copy_(vllm_stand_in(*given, num_kv_heads, sm_scale))

    package(
        "vllm.models.minimax_m3.common.ops.sparse_attn",
        minimax_m3_sparse_attn=minimax_m3_sparse_attn,
        minimax_m3_sparse_attn_decode=minimax_m3_sparse_attn_decode,
    )
    assert_agrees(blocks_case(BLOCKS, 2, s, 1024), "vLLM")


@pytest.mark.parametrize("s", [1, 3])
def test_blocks_by_sglang(package, s):
    def attend(q, k_cache, v_cache, req_to_token, slot_ids, topk_idx, size, starts, lens, scale):
        def slots(t):
            return req_to_token[slot_ids[request_of(starts, t)]].long()

        def chosen(t, head):
            r = request_of(starts, t)
            return tokens_of(topk_idx[head, t], size, int(lens[r] - (starts[r + 1] - t) + 1))

        halves = (lambda t: k_cache[slots(t)], lambda t: v_cache[slots(t)])
        return over_tokens(q, *halves, chosen, scale)

    def flash_decode_with_gqa_share_sparse(
        q, sink, k_cache, v_cache, req_to_token, seq_lens, slot_ids, block_size, topk_idx,
        sm_scale=None, use_tma=True, page_size=0, q_scale=None, k_scale=None, v_scale=None,
        hisparse_slots=None,
    ):  # fmt: skip
        assert sink is None and page_size == 128 and req_to_token.dtype is torch.int32
        starts = torch.arange(len(seq_lens) + 1)
        caches = (k_cache, v_cache, req_to_token, slot_ids)
        return attend(q, *caches, topk_idx, block_size, starts, seq_lens, sm_scale)

    def flash_prefill_with_gqa_share_sparse(
        q, k_cache, v_cache, sink, req_to_token, slot_ids, topk_idx, block_size_q, block_size_k,
        cu_seqlens, seq_lens, prefix_lens, max_seqlen_q, sm_scale=None, use_tma=True,
        cu_seqblocks_q=None, max_seqblock_q=None, q_scale=None, k_scale=None, v_scale=None,
        loc_mapping=None,
    ):  # fmt: skip
        assert sink is None and block_size_q == 1 and max_seqlen_q == max_seqblock_q == 3
        assert torch.equal(cu_seqblocks_q, cu_seqlens)
        assert torch.equal(seq_lens - prefix_lens, cu_seqlens.diff())
        caches = (k_cache, v_cache, req_to_token, slot_ids)
        return attend(q, *caches, topk_idx, block_size_k, cu_seqlens, seq_lens, sm_scale)

    of = "sglang.kernels.ops.attention.minimax_sparse"
    package(
        f"{of}.decode.topk_sparse",
        flash_decode_with_gqa_share_sparse=flash_decode_with_gqa_share_sparse,
    )
    package(
        f"{of}.prefill.topk_sparse",
        flash_prefill_with_gqa_share_sparse=flash_prefill_with_gqa_share_sparse,
    )
    assert_agrees(blocks_case(BLOCKS, 2, s, 1024), "SGLang")


@pytest.mark.parametrize("s", [1, 3])
def test_pools_by_vllm(package, s):
    def qsa_sparse_paged_attention(
        q, k_cache, v_cache, logical_indices, block_table, token_to_req, use_prefill_config,
        out=None, k_scale=None, v_scale=None, *, output_gate,
    ):  # fmt: skip
        assert use_prefill_config == (s > 1)
        paged = [
            lambda t, x=x: x[block_table[token_to_req[t]].long()].flatten(0, 1)
            for x in (k_cache, v_cache)
        ]

        def chosen(t, head):
            return logical_indices[t, : int(logical_indices[t, -1])]

        found = over_tokens(q, *paged, chosen, q.shape[-1] ** -0.5)
        return found * output_gate.double().sigmoid()

    package(
        "vllm.models.qwen4_exp.nvidia.ops.qsa",
        qsa_sparse_paged_attention=qsa_sparse_paged_attention,
    )
    assert_agrees(blocks_case(Blocks("pools", 6, 2, 32, 4, 9, False), 2, s, 512), "vLLM")


@pytest.mark.parametrize("s", [1, 3])
def test_block_indexer_by_vllm(package, s):
    def scores(idx_q, cache, table, starts, lengths, reach):
        assert cache.shape[1:] == (128, 32) and reach == 1024
        found = torch.full((idx_q.shape[1], len(idx_q), reach // 128), float("-inf")).double()
        for t in range(len(idx_q)):
            r = request_of(starts, t)
            keys = cache[table[r].long()].flatten(0, 1).double()
            each = idx_q[t].double() @ keys.mT
            each[:, int(lengths[r] - (starts[r + 1] - t) + 1) :] = float("-inf")
            found[:, t] = each.unflatten(-1, (-1, 128)).amax(-1)
        return found

    def top(score, last, k, init_blocks, local_blocks):
        assert (init_blocks, local_blocks) == (0, 1)
        score.scatter_(-1, last.expand(*score.shape[:2])[..., None], float("inf"))
        return score.topk(k).indices

    def minimax_m3_index_score(
        idx_q, index_kv_cache, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len,
        max_seq_len, num_kv_heads,
    ):  # fmt: skip
        assert num_kv_heads == idx_q.shape[1] and max_query_len == 3
        return scores(idx_q, index_kv_cache, block_table, cu_seqlens_q, seq_lens, max_seq_len)

    def minimax_m3_index_topk(
        score, cu_seqlens_q, prefix_lens, max_query_len, topk, init_blocks, local_blocks, out=None
    ):
        assert max_query_len == 3
        last = (prefix_lens[:, None] + torch.arange(max_query_len)).flatten() // 128
        return top(score, last, topk, init_blocks, local_blocks)

    def minimax_m3_index_decode(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, topk, init_blocks, local_blocks,
        num_kv_heads, decode_query_len, max_decode_query_len, out=None, score_out=None,
    ):  # fmt: skip
        assert num_kv_heads == idx_q.shape[1] and decode_query_len == max_decode_query_len == 1
        starts = torch.arange(len(seq_lens) + 1)
        score = scores(idx_q, index_kv_cache, block_table, starts, seq_lens, max_seq_len)
        return top(score, (seq_lens - 1) // 128, topk, init_blocks, local_blocks)

    package(
        "vllm.models.minimax_m3.common.ops.index_topk",
        minimax_m3_index_score=minimax_m3_index_score,
        minimax_m3_index_topk=minimax_m3_index_topk,
        minimax_m3_index_decode=minimax_m3_index_decode,
    )
    (ours, _), theirs = run(block_indexer_case(BLOCKS, 2, s, 1024), "vLLM")
    assert torch.equal(theirs.sort().values, ours.long())


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kda(package, bound):
    def kimi_delta_attention(
        q, k, v, g, beta, cu_seqlens, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        safe_gate=False, gate_lower_bound=None, a_log=None, dt_bias=None,
    ):  # fmt: skip
        """Token by token; states [N, H, V, K]."""
        assert cu_seqlens.tolist() == [0, len(q)] and output_final_state and use_qk_l2norm_in_kernel
        q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, initial_state[0]))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if safe_gate:
            g = gate_lower_bound * torch.sigmoid(a_log.double().exp()[:, None] * (g + dt_bias))
        out = []
        for t in range(len(q)):
            state = state * g[t].exp()[:, None]
            held = (state @ k[t, ..., None])[..., 0]
            state = state + (beta[t, :, None] * (v[t] - held))[..., None] * k[t, :, None]
            out.append((state @ q[t, ..., None])[..., 0] * q.shape[-1] ** -0.5)
        return torch.stack(out), state[None]

    package("cudnn.linear_attention")
    package("cudnn.linear_attention.ops", kimi_delta_attention=kimi_delta_attention)
    case = kda_case(20, bound)
    (out, state), theirs = run(case, "cudnn")
    assert relative_error([theirs[0], theirs[1].mT], [out[0], state]) < case.tolerance


def test_what_a_package_refuses_is_no_column(package):
    def refuses(*_, **__):
        raise RuntimeError("head size 32 is not supported")

    package("flash_attn_interface", flash_attn_func=refuses)
    case = dense_case("npu_fused_attention", 1, 2, 2, 8, 8, 32)
    with pytest.warns(UserWarning, match="no column for flash-attn-3: head size 32"):
        assert case.peers["flash_attn_3"](case.make(CPU, 0)) is None


def test_what_is_not_installed_is_none():
    for case in (dense_case("npu_fused_attention", 1, 2, 2, 8, 8, 32), loss_case(8, 16, 64, 16)):
        arguments = case.make(CPU, 0)
        assert {prepare(arguments) for prepare in case.peers.values()} == {None}
    assert not peers.installed("no_package.part", torch.empty(0, device="meta"))
