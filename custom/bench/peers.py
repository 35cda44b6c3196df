# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Kernels of other packages, timed beside ours wherever they are installed.

    package                                  imported as            beside
    flash-attn-3 (FlashAttention's hopper/)  flash_attn_interface   dense attention, its gradient
    flash-attn-4                             flash_attn.cute        the same
    FlashMLA                                 flash_mla              attention to latents
    nvidia-cudnn-frontend                    cudnn                  gradients of sparse attention,
                                                                    of the indexer, of its KL loss;
                                                                    KDA
    DeepGEMM                                 deep_gemm              scores of 8 bits (quantized.py)
    fla-core                                 fla                    delta rules, convolution, norm
    vLLM                                     vllm                   MiniMax-M3's blocks, Qwen4-Exp's
                                                                    pools; latents (latents.py)
    SGLang                                   sglang                 MiniMax-M3's blocks

`prepare(arguments)` returns the call to time, or None where the package is not installed or refuses
the arguments, which a warning says.  What a package needs in another layout is made ahead and not
timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .case import Arguments

Call = Callable[[], Any]
Prepare = Callable[[Arguments], Call | None]


def installed(module: str, tensor: Tensor) -> bool:
    """Whether `module` can be imported, and `tensor` is where its kernels run."""
    if tensor.device.type != "cuda":
        return False
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is part of
        return False


def taken(package: str, call: Call) -> Call | None:
    """`call`, compiled; None where the package refuses these arguments."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as refusal:
        warnings.warn(f"no column for {package}: {refusal}", stacklevel=2)
        return None
    return call


# -------------------------------------------------------------------------------- dense attention


def _by_tokens(arguments: Arguments, *names: str) -> list[Tensor]:
    """[B, S, N, D] of what our op takes as [B, N, S, D]."""
    return [arguments[name].transpose(1, 2).contiguous() for name in names]


def _first(result: Any) -> Any:
    """The output, of versions that return it alone or with its lse."""
    return result[0] if isinstance(result, tuple) else result


def _forward(module: str, package: str, arguments: Arguments) -> Call | None:
    if not installed(module, arguments["q"]):
        return None
    attend = importlib.import_module(module).flash_attn_func
    q, k, v = _by_tokens(arguments, "q", "k", "v")
    call = partial(attend, q, k, v, causal=arguments["causal"])
    return taken(package, lambda: _first(call()))


flash_attention_3: Prepare = partial(_forward, "flash_attn_interface", "flash-attn-3")
flash_attention_4: Prepare = partial(_forward, "flash_attn.cute", "flash-attn-4")


def flash_attention_3_backward(arguments: Arguments) -> Call | None:
    if not installed("flash_attn_interface", arguments["q"]):
        return None
    backward = importlib.import_module("flash_attn_interface")._flash_attn_backward
    q, k, v, d_out, out = _by_tokens(arguments, "q", "k", "v", "grad_o", "o")
    options: Arguments = dict(
        softmax_scale=q.shape[-1] ** -0.5,
        is_causal=arguments["causal"],
        deterministic=arguments.get("deterministic", False),
    )

    def call() -> tuple[Tensor, ...]:
        made = tuple(torch.empty_like(x) for x in (q, k, v))
        d_q, d_k, d_v = made
        backward(d_out, q, k, v, out, arguments["lse"], dq=d_q, dk=d_k, dv=d_v, **options)
        return made

    return taken("flash-attn-3", call)


def flash_attention_4_backward(arguments: Arguments) -> Call | None:
    # its deterministic form is for later GPUs
    if not installed("flash_attn.cute", arguments["q"]) or arguments.get("deterministic"):
        return None
    backward = importlib.import_module("flash_attn.cute.interface")._flash_attn_bwd
    q, k, v, d_out, out = _by_tokens(arguments, "q", "k", "v", "grad_o", "o")
    scale, causal = q.shape[-1] ** -0.5, arguments["causal"]
    call = partial(backward, q, k, v, out, d_out, arguments["lse"], scale, causal=causal)
    return taken("flash-attn-4", call)


# ------------------------------------------------------------------------------- sparse attention


def _latents(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """(queries [T, N, 576], keys [S2, 576]) with their rotary parts behind."""
    query, key = (
        torch.cat([arguments[name], arguments[f"{name}_rope"]], -1) for name in ("query", "key")
    )
    return query.flatten(0, 1), key.flatten(0, -2)


def positions(arguments: Arguments) -> Tensor:
    """int32 [T, K]: rows of the keys as they lie in memory."""
    chosen = arguments["sparse_indices"]
    table = arguments.get("block_table")
    if table is not None:
        page = arguments["key"].shape[1]
        at = chosen.flatten(1).long()
        found = table.long().gather(1, (at // page).clamp_min(0)) * page + at % page
        chosen = torch.where(at < 0, -1, found)
    out: Tensor = chosen.reshape(-1, arguments["sparse_indices"].shape[-1]).to(torch.int32)
    return out


def flash_mla_sparse(arguments: Arguments) -> Call | None:
    """FlashMLA's sparse forward in bf16, which takes gathered rows of any number of queries."""
    if not installed("flash_mla", arguments["query"]):
        return None
    attend = importlib.import_module("flash_mla").flash_mla_sparse_fwd
    query, key = _latents(arguments)
    # its kernel is for 64 heads and multiples
    query = torch.nn.functional.pad(query, (0, 0, 0, -query.shape[1] % 64))
    chosen = positions(arguments)[:, None]
    return taken("FlashMLA", partial(attend, query, key[:, None], chosen, arguments["scale_value"]))


def _cudnn(name: str) -> Callable[..., Any]:
    wrapper: Callable[..., Any] = getattr(
        importlib.import_module("cudnn.deepseek_sparse_attention"), name
    )
    return wrapper


def _statistics(arguments: Arguments) -> Tensor:
    """float32 [T, N]: log-sum-exp of each row's logits."""
    peak, total = (arguments[f"softmax_{name}"].flatten(0, -2) for name in ("max", "sum"))
    out: Tensor = (peak + total.log()).contiguous()
    return out


_NO_SINK = -1e4  # a logit whose probability is 0


def cudnn_attention_grad(arguments: Arguments) -> Call | None:
    if not installed("cudnn.deepseek_sparse_attention", arguments["query"]):
        return None
    query, key = _latents(arguments)
    out, d_out = (arguments[name].flatten(0, 1) for name in ("out", "d_out"))
    sink = torch.full((query.shape[1],), _NO_SINK, device=query.device)
    call = partial(
        _cudnn("sparse_attention_backward_wrapper"),
        query,
        key,
        out,
        d_out,
        _statistics(arguments),
        sink,
        positions(arguments),
        softmax_scale=arguments["scale_value"],
    )
    return taken("cuDNN", call)


def cudnn_indexer_grad(arguments: Arguments) -> Call | None:
    """With the softmax's gradient ahead, which ours is given: 34 of the 4096 queries' 1900 us."""
    if not installed("cudnn.deepseek_sparse_attention", arguments["query"]):
        return None
    scores = arguments["dy"][:, :, 0].float()
    call = partial(
        _cudnn("indexer_backward_wrapper"),
        arguments["query"],
        arguments["weights"],
        arguments["key"][:, :, 0],
        scores.clone(),
        scores,
        positions(arguments)[None],
        torch.ones(1, device=scores.device),
    )
    return taken("cuDNN", call)


def cudnn_loss_grad(arguments: Arguments) -> Call | None:
    """Its four kernels: target, scores, the softmax's gradient, the indexer's."""
    if not installed("cudnn.deepseek_sparse_attention", arguments["query"]):
        return None
    query, key = _latents(arguments)
    chosen = positions(arguments)[None]
    lse = _statistics(arguments)[None]
    q_index, weights = arguments["query_index"], arguments["weights"]
    k_index = arguments["key_index"][:, :, 0]
    one = torch.ones(1, device=query.device)
    target = partial(
        _cudnn("sparse_attn_score_recompute_wrapper"),
        query[None],
        key[None],
        lse,
        chosen,
        arguments["scale_value"],
    )
    predict = partial(
        _cudnn("sparse_indexer_score_recompute_wrapper"), q_index, k_index, weights, chosen
    )
    backward = _cudnn("indexer_backward_wrapper")

    def call() -> Any:
        wanted, found = target()["target"], predict()["predict"]
        return backward(
            q_index,
            weights,
            k_index,
            wanted,
            found,
            chosen,
            one,
            loss_coeff=float(chosen.shape[1]),  # a sum over the tokens, not their mean
        )

    return taken("cuDNN", call)


# ---------------------------------------------------------------------------------------- blocks

_M3, _QSA = "vllm.models.minimax_m3.common.ops", "vllm.models.qwen4_exp.nvidia.ops.qsa"
_BLOCKS = "sglang.kernels.ops.attention.minimax_sparse"


def _ranges(arguments: Arguments, keys: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """Of requests: where each begins, its length, what was before; how many tokens each has."""
    count, lengths = arguments["actual_seq_lengths"], arguments[keys]
    starts = torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0))
    return starts, lengths, lengths - count, len(arguments["query"]) // len(count)


def vllm_blocks(arguments: Arguments) -> Call | None:
    """vLLM's MiniMax-M3, whose cache has a head's keys and values side by side."""
    if not installed(f"{_M3}.sparse_attn", arguments["query"]):
        return None
    ops = importlib.import_module(f"{_M3}.sparse_attn")
    query, scale = arguments["query"], arguments["scale_value"]
    pairs = torch.cat([arguments["key"], arguments["value"]], -1).transpose(1, 2).contiguous()
    given = (query, pairs, arguments["select_idx"], arguments["block_table"])
    heads, out = pairs.shape[1], torch.empty_like(query)
    starts, lengths, before, each = _ranges(arguments, "actual_seq_lengths_kv")
    if each == 1:
        decode = ops.minimax_m3_sparse_attn_decode
        attend = partial(decode, *given, lengths, heads, scale, out, each)
    else:
        prefill = ops.minimax_m3_sparse_attn
        attend = partial(prefill, *given, starts, lengths, before, each, heads, scale, out)

    def call() -> Tensor:
        attend()
        return out

    return taken("vLLM", call)


def sglang_blocks(arguments: Arguments) -> Call | None:
    """SGLang's MiniMax-M3, whose table has a slot for every position."""
    starts, lengths, before, each = _ranges(arguments, "actual_seq_lengths_kv")
    step = "decode" if each == 1 else "prefill"
    query, page = arguments["query"], arguments["key"].shape[1]
    if not installed(f"{_BLOCKS}.{step}.topk_sparse", query):
        return None
    ops = importlib.import_module(f"{_BLOCKS}.{step}.topk_sparse")
    key, value = (arguments[name].flatten(0, 1).contiguous() for name in ("key", "value"))
    slots = arguments["block_table"][:, :, None] * page + torch.arange(page, device=query.device)
    options = dict(
        req_to_token=slots.flatten(1).to(torch.int32),
        seq_lens=lengths,
        slot_ids=torch.arange(len(lengths), dtype=torch.int32, device=query.device),
        topk_idx=arguments["select_idx"],
        sm_scale=arguments["scale_value"],
    )
    given, size = dict(q=query, k_cache=key, v_cache=value, sink=None), arguments["block_size"]
    if each == 1:
        options |= dict(block_size=size, page_size=page)
        return taken("SGLang", partial(ops.flash_decode_with_gqa_share_sparse, **given, **options))
    # every query has a list of its own
    options |= dict(block_size_q=1, cu_seqblocks_q=starts, max_seqblock_q=each)
    options |= dict(block_size_k=size, cu_seqlens=starts, prefix_lens=before, max_seqlen_q=each)
    return taken("SGLang", partial(ops.flash_prefill_with_gqa_share_sparse, **given, **options))


def vllm_pools(arguments: Arguments) -> Call | None:
    """vLLM's Qwen4-Exp, whose list has tokens and their number, and which opens a gate as well."""
    if not installed(_QSA, arguments["query"]):
        return None
    attend = importlib.import_module(_QSA).qsa_sparse_paged_attention
    query, size = arguments["query"], arguments["block_size"]
    blocks = arguments["select_idx"][0, :, :, None] * size
    tokens = (blocks + torch.arange(size, device=query.device)).flatten(1).to(torch.int32)
    packed = torch.nn.functional.pad(tokens, (0, 1), value=tokens.shape[1])
    table = arguments["block_table"]
    each = len(query) // len(table)
    requests = torch.arange(len(table), dtype=torch.int32, device=query.device)
    call = partial(
        attend,
        query,
        arguments["key"],
        arguments["value"],
        packed,
        table,
        requests.repeat_interleave(each),
        each > 1,
        output_gate=torch.full_like(query, 30),  # open
    )
    return taken("vLLM", call)


def vllm_block_indexer(arguments: Arguments) -> Call | None:
    """No block is forced but the token's own."""
    if not installed(f"{_M3}.index_topk", arguments["query"]):
        return None
    ops = importlib.import_module(f"{_M3}.index_topk")
    query, key, table = arguments["query"], arguments["key"][:, :, 0], arguments["block_table"]
    starts, lengths, before, each = _ranges(arguments, "actual_seq_lengths_key")
    heads, k = query.shape[1], arguments["top_k"]
    given, reach = (query, key, table), table.shape[1] * key.shape[1]
    if each == 1:
        select = ops.minimax_m3_index_decode
        return taken("vLLM", partial(select, *given, lengths, reach, k, 0, 1, heads, each, each))
    ranges = (starts, lengths, before, each)
    score = partial(ops.minimax_m3_index_score, *given, *ranges, reach, heads)
    select = ops.minimax_m3_index_topk
    return taken("vLLM", lambda: select(score(), starts, before, each, k, 0, 1))


# ------------------------------------------------------------------------------------ delta rule


def cudnn_kda(arguments: Arguments) -> Call | None:
    """One sequence.  Its own gate is the bounded one alone; another's logarithms are given."""
    if not installed("cudnn.linear_attention", arguments["q"]):
        return None
    rule = importlib.import_module("cudnn.linear_attention.ops").kimi_delta_attention
    q, k, v, g, beta = (arguments[name][0] for name in ("q", "k", "v", "g", "beta"))
    bound, a_log, bias = (arguments[name] for name in ("lower_bound", "A_log", "dt_bias"))
    gate: Arguments = {}
    if bound is None:
        g = -a_log.exp()[:, None] * torch.nn.functional.softplus(g.float() + bias)
    else:
        gate = dict(safe_gate=True, gate_lower_bound=bound, a_log=a_log, dt_bias=bias)
    call = partial(
        rule,
        q,
        k,
        v,
        g,
        beta,
        torch.tensor([0, len(q)], dtype=torch.int32, device=q.device),
        initial_state=arguments["initial_state"].mT.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=arguments["use_qk_l2norm_in_kernel"],
        **gate,
    )
    return taken("cuDNN", call)
