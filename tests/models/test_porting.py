# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""docs/porting: every snippet runs on the CPU, and gives what the other project's formula gives.

The formulas are written out here, by loops and softmax, in float64 where that is exact.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import custom
from custom.integrations import kernels

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "porting").glob("*.md"))
close = functools.partial(assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)


@functools.cache
def ran(page: str) -> dict[str, Any]:
    """What the snippets of a page leave, one after the other."""
    torch.manual_seed(1)
    names: dict[str, Any] = {}
    text = (ROOT / "docs" / "porting" / f"{page}.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(code, names)
    return names


@pytest.mark.parametrize("page", [page.stem for page in PAGES])
def test_the_snippets_run(page):
    assert ran(page) or page == "index"


def test_every_way_in_is_listed():
    listed = (ROOT / "docs" / "porting" / "index.md").read_text()
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert page.stem == "index" or f"]({page.name})" in listed
        assert f"porting/{page.name}" in nav


# attention


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """o [N, S, D] and lse [N, S] of q [N, S, D], k and v [Nk, T, D] where `seen` [S, T]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    logits = (scale * q @ k.mT).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def mask(queries: int, keys: int, left: int | None, right: int, aligned: int) -> Tensor:
    """FlashAttention's: key j from i + aligned - left to i + aligned + right."""
    away = torch.arange(keys) - torch.arange(queries)[:, None] - aligned
    return (away <= right) & (away >= (-keys if left is None else -left))


def test_flash_attention_batched_with_a_window():
    n = ran("flash_attention")
    for b in range(2):
        q, k, v = (n[name][b].transpose(0, 1) for name in "qkv")
        wanted, _ = softmax_attention(q, k, v, 0.2, mask(5, 9, 3, 0, 4))
        close(n["out"][b].transpose(0, 1), wanted)


def test_flash_attention_packed_and_its_lse():
    n = ran("flash_attention")
    for (a, b), (c, d) in (((0, 3), (0, 5)), ((3, 8), (5, 12))):
        q, k, v = n["qs"][a:b], n["ks"][c:d], n["vs"][c:d]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        seen = mask(b - a, d - c, None, 0, d - c - b + a)
        wanted, lse = softmax_attention(q, k, v, 16**-0.5, seen)
        close(n["packed"][a:b].transpose(0, 1), wanted)
        close(n["lse"][a:b].T, lse)


def test_flash_attention_window_on_both_sides():
    q, k, v = (torch.randn(1, 2, 7, 16) for _ in range(3))
    out = custom.npu_fused_attention(q, k, v, window=3)
    close(out[0], softmax_attention(q[0], k[0], v[0], 0.25, mask(7, 7, 2, 2, 0))[0])


def test_flash_attention_a_query_that_sees_nothing():
    q, k = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 1, 16)
    out, lse = custom.npu_fused_attention(q, k, k, causal=True, return_lse=True)
    assert not out[0, 0, :2].any() and (lse[0, 0, :2] == -torch.inf).all()


def test_flash_attention_a_layout_that_is_not_detected():
    q = torch.randn(1, 4, 4, 16)  # S = N
    swapped = custom.npu_fused_attention(q, q, q)
    right = custom.npu_fused_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2)
    assert swapped.shape == right.shape and (swapped - right).abs().max() > 0.05


def test_torch_npu_fusion_attention():
    n = ran("torch_npu")
    q, k, v = (n[name][0] for name in "qkv")
    close(n["attended"][0], softmax_attention(q, k, v, 0.25, mask(5, 9, None, 0, 4))[0])
    for (a, b), (c, d) in (((0, 3), (0, 4)), ((3, 5), (4, 9))):
        seen = mask(b - a, d - c, None, 0, d - c - b + a)
        wanted, _ = softmax_attention(q[:, a:b], k[:, c:d], v[:, c:d], 0.25, seen)
        close(n["packed"][a:b].transpose(0, 1), wanted)


def test_torch_npu_fusion_attention_modes():
    """sparse_mode 2 is aligned at the first key, 4 is a band at the last one."""
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    band = custom.npu_fused_attention(q, k, v, causal=True, window=3)
    close(band[0], softmax_attention(q[0], k[0], v[0], 0.25, mask(5, 9, 2, 0, 4))[0])
    ours = custom.npu_fused_attention(q, k, v, causal=True)
    first, _ = softmax_attention(q[0], k[0], v[0], 0.25, mask(5, 9, None, 0, 0))
    assert (ours[0] - first).abs().max() > 0.05
    ours = custom.npu_fused_attention(q, k[:, :, :5], v[:, :, :5], causal=True)
    first, _ = softmax_attention(q[0], k[0, :, :5], v[0, :, :5], 0.25, mask(5, 5, None, 0, 0))
    close(ours[0], first)


# sparse attention


def logits_of(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The indexer's, [S, T]: query [S, N, D], keys [T, D], weights [S, N]."""
    scores = torch.einsum("snd,td->nst", query.double(), keys.double()).relu()
    return (scores * weights.double().T[..., None]).sum(0)


def best(logits: Tensor, first: int, count: int) -> list[list[int]]:
    """Positions of the `count` best of the first `first + row` of each row, ascending."""
    rows = []
    for row, values in enumerate(logits):
        there = values[: first + row]
        chosen = sorted(there.topk(min(count, len(there)))[1].tolist())
        rows.append(chosen + [-1] * (count - len(chosen)))
    return rows


def chosen_attention(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, sink: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one query q [N, D] over some positions: out [N, Dv], the largest logit and lse [N]."""
    there = positions[(positions >= 0) & (positions < len(keys))].long()
    logits = scale * q.double() @ keys[there].double().T
    lse = logits.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double())
    out = (logits - total[:, None]).exp() @ values[there].double()
    return out, logits.amax(-1), lse


def test_torch_npu_indexer_and_sparse_attention():
    n = ran("torch_npu")
    for b in range(n["B"]):
        logits = logits_of(n["index_query"][b], n["index_key"][b, :, 0], n["weights"][b])
        assert n["indices"][b, :, 0].tolist() == best(logits, n["T"] - n["S"] + 1, 8)
        keys = torch.cat((n["key"][b, :, 0], n["key_rope"][b, :, 0]), -1)
        for s in range(n["S"]):
            q = torch.cat((n["query"][b, s], n["query_rope"][b, s]), -1)
            out, top, lse = chosen_attention(q, keys, n["key"][b, :, 0], n["indices"][b, s, 0], 0.1)
            close(n["out"][b, s], out)
            close(n["softmax_max"][b, 0, s], top)
            close(n["lse"][b, 0, s], lse)


def test_torch_npu_dense_latents():
    """Of request 0 the last of 20 tokens, of request 1 the last two of 9."""
    n = ran("torch_npu")
    for row, (pages, seen) in enumerate((([3, 1], 20), ([4, 0], 8), ([4, 0], 9))):
        latents, rotary = (n[name][pages].flatten(0, 2)[:seen] for name in ("latents", "rotary"))
        keys, q = torch.cat((latents, rotary), -1), (n["mla_query"][row], n["mla_rope"][row])
        out, _, lse = chosen_attention(torch.cat(q, -1), keys, latents, torch.arange(seen), 0.1)
        close(n["mla_out"][row], out)
        close(n["mla_lse"][row, :, 0], lse)


def test_vllm_ascend_packed_queries_on_pages():
    n = ran("vllm_ascend")
    for b, (a, z) in enumerate(((0, 1), (1, 4))):
        length, pages = n["lengths"][b], n["table"][b]
        keys, rotary, index = (
            n[name][pages].flatten(0, 2)[:length] for name in ("latents", "rotary", "index_keys")
        )
        logits = logits_of(n["index_query"][a:z], index, n["weights"][a:z])
        assert n["indices"][a:z, 0].tolist() == best(logits, length - (z - a) + 1, 8)
        for t in range(a, z):
            q = torch.cat((n["query"][t], n["query_rope"][t]), -1)
            whole = torch.cat((keys, rotary), -1)
            close(n["out"][t], chosen_attention(q, whole, keys, n["indices"][t, 0], 0.1)[0])


def test_cann_recipes_results():
    n = ran("cann_recipes")
    logits = logits_of(n["index_query"][0], n["index_key"][0, :, 0], n["weights"][0])
    assert n["indices"][0, :, 0].tolist() == best(logits, n["T"] - n["S"] + 1, 8)
    keys = n["key"][0, :, 0]
    for s in range(n["S"]):
        out = chosen_attention(n["query"][0, s], keys, keys, n["indices"][0, s, 0], 0.1)[0]
        close(n["out"][0, s], out)


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / 127
    return (x.float() / scale[..., None]).round(), scale


def test_cann_recipes_dynamic_quantization():
    n = ran("cann_recipes")
    values, scale = dynamic_quant(n["keys"])
    close(n["values"].flatten(0, 2)[n["slots"]], values)
    close(n["scales"].flatten()[n["slots"]], scale)
    values, scale = dynamic_quant(n["raw"])
    close(n["query_8"], values)
    close(n["query_scale"], scale)


def test_cann_recipes_attention_on_int8_rows():
    n = ran("cann_recipes")
    values, scale = dynamic_quant(n["latents"].view(20, 4, 128))
    latents = (values * scale[..., None]).flatten(1)
    keys = torch.cat((latents, n["rotary"].float()), -1)
    out = chosen_attention(n["q8"][0, 0], keys, latents, n["chosen"][0, 0, 0], 0.1)[0]
    assert_close(n["attended"][0, 0].double(), out, rtol=2e-2, atol=1e-2)  # bf16 keys and result


def fp8_rows(latents: Tensor) -> Tensor:
    """What DeepSeek's act_quant by tiles of 128 leaves, scales powers of two."""
    tiles = latents.view(-1, 4, 128)
    scale = (tiles.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil().exp2()[..., None]
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


def test_flash_mla_decoding_with_a_sink_and_a_length():
    n = ran("flash_mla")
    cache = torch.zeros(256, 512)
    cache[64:164] = fp8_rows(n["latents"])
    keys = torch.zeros(256, 576)
    keys[:, :512] = cache
    keys[64:164, 512:] = n["rotary"].float()
    assert n["out"].shape == (2, 1, 4, 512) and n["lse"].shape == (2, 4, 1)
    torch.manual_seed(0)
    for sink, length in ((None, None), (torch.randn(4), torch.tensor([2, 3], dtype=torch.int32))):
        ours, lse_ours = custom.flash_mla_sparse_fp8(
            n["q"], n["rows"], n["indices"], 0.1, attn_sink=sink, topk_length=length
        )
        for b in range(2):
            count = 4 if length is None else int(length[b])
            slots = n["indices"][b, 0, :count]
            out, _, lse = chosen_attention(n["q"][b, 0], keys, cache, slots, 0.1, sink)
            assert_close(ours[b, 0].double(), out, rtol=2e-2, atol=1e-2)  # a bf16 result
            assert_close(lse_ours[b, :, 0].double(), lse, rtol=1e-3, atol=1e-3)
    none = torch.full_like(n["indices"], -1)
    out, lse = custom.flash_mla_sparse_fp8(n["q"], n["rows"], none, 0.1)
    assert not out.any() and (lse == -torch.inf).all()


def test_flash_mla_prefill():
    n = ran("flash_mla")
    kv, sink = n["kv"][:, 0], torch.randn(n["N"])
    chosen = n["chosen"].clone()
    chosen[0, 0, 5:] = -1  # topk_length
    parts = dict(query_rope=n["q3"][..., 512:], key_rope=n["kv"][..., 512:])
    ends = dict(
        actual_seq_lengths_query=torch.tensor([n["S"]]),
        actual_seq_lengths_kv=torch.tensor([n["T"]]),
    )
    with_sink = custom.npu_sparse_flash_attention(
        n["q3"][..., :512],
        n["kv"][..., :512],
        None,
        chosen,
        0.1,
        **parts,
        **ends,
        layout_query="TND",
        layout_kv="TND",
        sparse_mode=0,
        sinks=sink,
    )[0]
    for s in range(n["S"]):
        out, top, lse = chosen_attention(n["q3"][s], kv, kv[:, :512], n["chosen"][s, 0], 0.1)
        close(n["prefill"][s], out)
        close(n["max_logits"][s], top)
        close(n["lse_prefill"][s], lse)
        out, *_ = chosen_attention(n["q3"][s], kv, kv[:, :512], chosen[s, 0], 0.1, sink)
        close(with_sink[s], out)


def test_deep_gemm_paged_logits():
    n = ran("deep_gemm")
    for b in range(n["B"]):
        length, pages = int(n["context_lens"][b]), n["block_table"][b]
        keys = n["values"][pages].float() * n["scales"][pages][..., None]
        weights = n["weights"].view(n["B"], n["next_n"], n["H"])[b]
        logits = logits_of(n["q"][b].float(), keys.flatten(0, 2)[:length], weights)
        wanted = best(logits, length - n["next_n"] + 1, 16)
        assert n["indices"][b, :, 0].tolist() == wanted
        close(n["scores"][b, :, 0], logits.gather(1, torch.tensor(wanted)))


def test_deep_gemm_flat_logits():
    n = ran("deep_gemm")
    keys = n["kv"].float() * n["kv_scales"][:, None]
    for (a, z), (c, d) in (((0, 2), (0, 10)), ((2, 6), (10, 30))):
        logits = logits_of(n["q_flat"][a:z].float(), keys[c:d], n["w_flat"][a:z])
        assert n["flat"][a:z, 0].tolist() == best(logits, d - c - (z - a) + 1, 4)


# linear attention


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """fla's naive loop: q, k [T, H, K], v [T, HV, V], g [T, HV] or [T, HV, K], state [HV, K, V]."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    outs = []
    for t in range(len(q)):
        decay = g[t].exp()
        state = state * (decay[..., None] if decay.ndim == 2 else decay[:, None, None])
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - seen))
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs), state


def test_fla_gated_delta_rule():
    n = ran("fla")
    for b in range(n["B"]):
        out, state = delta_rule(
            *(n[name][b] for name in ("q", "k", "v", "g", "beta", "initial_state"))
        )
        for ours, final in ((n["o"], n["final_state"]), (n["o_of_op"], n["state_of_op"])):
            close(ours[b], out)
            close(final[b], state)


def test_fla_states_of_one_size_are_not_detected():
    q, k = (F.normalize(torch.randn(5, 1, 8), dim=-1) for _ in range(2))
    v, g, beta, state = (
        torch.randn(5, 1, 8),
        -torch.rand(5, 1),
        torch.rand(5, 1),
        torch.randn(1, 8, 8),
    )
    wanted, final = delta_rule(q, k, v, g, beta, state)
    lengths = torch.tensor([5])
    right, ours = custom.npu_chunk_gated_delta_rule(
        q,
        k,
        v,
        beta=beta,
        g=g,
        initial_state=state.mT.contiguous()[None],
        actual_seq_lengths=lengths,
    )
    close(right, wanted)
    close(ours.mT[0], final)
    wrong, _ = custom.npu_chunk_gated_delta_rule(
        q, k, v, beta=beta, g=g, initial_state=state[None], actual_seq_lengths=lengths
    )
    assert (wrong - wanted).abs().max() > 0.05


def test_fla_packed_sequences_and_the_gate():
    n = ran("fla")
    sums, a = torch.tensor([0, 3, 7]), torch.randn(7, n["HV"])
    A_log, dt_bias = torch.randn(n["HV"]), torch.randn(n["HV"])
    g = -A_log.exp() * F.softplus(a.float() + dt_bias)
    q, k, v, beta = (n[name][0] for name in ("q", "k", "v", "beta"))
    packed, _ = custom.npu_chunk_gated_delta_rule(
        F.normalize(q, dim=-1),
        F.normalize(k, dim=-1),
        v,
        beta=beta,
        g=g,
        actual_seq_lengths=sums.diff(),
    )
    zero = torch.zeros(n["HV"], n["K"], n["V"])
    for first, last in ((0, 3), (3, 7)):
        part = slice(first, last)
        wanted, _ = delta_rule(q[part], k[part], v[part], g[part], beta[part], zero)
        close(packed[part], wanted)


def test_fla_kda():
    n = ran("fla")
    bias = n["dt_bias"].view(n["HV"], n["K"])
    for b in range(n["B"]):
        g = -n["A_log"].exp()[:, None] * F.softplus(n["gate"][b] + bias)
        out, state = delta_rule(
            n["q"][b], n["k"][b], n["v"][b], g, n["beta"][b], n["initial_state"][b]
        )
        close(n["o_kda"][b], out)
        close(n["state_kda"][b], state)


def test_fla_decode_on_a_pool():
    n = ran("fla")
    zero = torch.zeros(n["HV"], n["K"], n["V"])
    for b, slot in enumerate((3, 1)):
        out, state = delta_rule(*(n[name][b, :1] for name in ("q", "k", "v", "g", "beta")), zero)
        close(n["step"][b], out[0])
        close(n["pool"][slot].mT, state)
    assert not n["pool"][[0, 2, 4]].any()


def test_fla_gated_norm():
    n = ran("fla")
    x = n["x"].double()
    wanted = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * n["weight"] * F.silu(n["z"])
    close(n["normed"], wanted)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor) -> Tensor:
    """x [B, D, S] behind history [B, D, W - 1]."""
    joined = torch.cat((history, x), -1)
    return F.silu(F.conv1d(joined, weight[:, None], bias, groups=x.shape[1]))


def test_fla_convolution_and_its_state():
    n = ran("fla")
    tokens, history = n["tokens"].mT, n["history"][..., 1:]
    close(n["convolved"], convolved(tokens, n["taps"], None, history).mT)
    close(n["last"], tokens[..., -3:].mT)


def test_causal_conv1d():
    n = ran("causal_conv1d")
    x, weight, bias = n["x"], n["weight"], n["bias"]
    zero = x.new_zeros(2, 24, 3)
    close(n["out"], convolved(x, weight, bias, zero))
    close(n["same"].mT, n["out"])
    close(n["last"], x[..., -3:].mT)
    close(n["step"], convolved(n["new"][..., None], weight, bias, x[..., -3:])[..., 0])
    close(n["states"], torch.cat((x[..., -2:], n["new"][..., None]), -1))  # updated in place


def test_causal_conv1d_of_sequences():
    n = ran("causal_conv1d")
    x, weight, bias = n["x"][:1], n["weight"], n["bias"]
    zero = x.new_zeros(1, 24, 3)
    wanted = [convolved(part, weight, bias, zero) for part in (x[..., :4], x[..., 4:])]
    by_number = torch.tensor([[0] * 4 + [1] * 5])
    out = custom.causal_conv1d_fn(x, weight, bias, by_number, activation="silu")
    close(out, torch.cat(wanted, -1))
    packed, _ = custom.npu_causal_conv1d(
        x[0].T.contiguous(),
        weight.t(),
        bias,
        query_start_loc=torch.tensor([0, 4, 9]),
        activation="silu",
    )
    close(packed.T[None], torch.cat(wanted, -1))


def test_causal_conv1d_reads_the_last_columns_of_a_wider_state():
    n = ran("causal_conv1d")
    wide, new = torch.randn(2, 24, 5), torch.randn(2, 24, 1)
    last = custom.causal_conv1d_update(new, wide.clone(), n["weight"], None, "silu")
    close(last, convolved(new, n["weight"], None, wide[..., -3:]))
    ones = torch.ones(2, dtype=torch.int32)
    first = custom.causal_conv1d_update(
        new, wide.clone(), n["weight"], None, "silu", num_accepted_tokens=ones
    )
    close(first, convolved(new, n["weight"], None, wide[..., :3]))


def test_fla_recurrent_forms_of_the_kernels_module():
    n = ran("fla")
    rows = dict(initial_state=n["initial_state"], output_final_state=True)
    rows["use_qk_l2norm_in_kernel"] = True
    q, k, v, beta = (n[name] for name in ("q", "k", "v", "beta"))
    by_channel = -torch.rand(n["B"], n["T"], n["HV"], n["K"])
    for function, g in (
        (kernels.fused_recurrent_gated_delta_rule, n["g"]),
        (kernels.fused_recurrent_kda, by_channel),
        (kernels.chunk_kda, by_channel),
    ):
        ours, final = function(q, k, v, g, beta, **rows)
        for b in range(n["B"]):
            out, state = delta_rule(q[b], k[b], v[b], g[b], beta[b], n["initial_state"][b])
            close(ours[b], out)
            close(final[b], state)


def test_fla_what_is_not_computed_is_refused_by_its_name():
    n = ran("fla")
    with pytest.raises(custom.NotSupported, match="head_first"):
        kernels.chunk_gated_delta_rule(*(n[x] for x in ("q", "k", "v", "g", "beta")), head_first=1)


def test_fla_raw_gates_of_a_decode_step():
    n = ran("fla")
    a, b, A_log, dt_bias = (torch.randn(n["HV"]) for _ in range(4))
    pool = torch.randn(3, n["HV"], n["V"], n["K"])
    before = pool[2].mT.clone()
    q, k, v = (n[name][:1, :1] for name in "qkv")
    out = custom.npu_fused_sigmoid_gating_delta_rule_update(
        A_log,
        a.view(1, 1, -1),
        dt_bias,
        1.0,
        20.0,
        q,
        k,
        v,
        b.view(1, 1, -1),
        pool,
        torch.tensor([2]),
        use_qk_l2norm_in_kernel=True,
        state_layout="vk",
    )
    g = -A_log.exp() * F.softplus(a + dt_bias)
    wanted, state = delta_rule(q[0], k[0], v[0], g[None], b.sigmoid()[None], before)
    close(out[0], wanted)
    close(pool[2].mT, state)


def test_fla_kda_with_a_bounded_gate_and_the_other_layout():
    n = ran("fla")
    bias = n["dt_bias"].view(n["HV"], n["K"])
    out, state = custom.npu_chunk_kda(
        n["q"],
        n["k"],
        n["v"],
        n["gate"],
        n["beta"],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=n["A_log"],
        dt_bias=n["dt_bias"],
        lower_bound=-5.0,
        initial_state=n["initial_state"].mT.contiguous(),
        state_layout="vk",
    )
    for b in range(n["B"]):
        g = -5.0 * (n["A_log"].exp()[:, None] * (n["gate"][b] + bias)).sigmoid()
        wanted, final = delta_rule(
            n["q"][b], n["k"][b], n["v"][b], g, n["beta"][b], n["initial_state"][b]
        )
        close(out[b], wanted)
        close(state[b].mT, final)


def test_deep_gemm_scales_of_the_query_go_into_the_weights():
    n = ran("deep_gemm")
    scale = torch.rand(n["B"], n["next_n"], n["H"]) + 0.5
    weights = n["weights"].view(scale.shape)
    rest = dict(
        layout_key="PA_BSND",
        sparse_count=16,
        block_table=n["block_table"],
        actual_seq_lengths_key=n["context_lens"],
    )
    call = custom.npu_quant_lightning_indexer
    folded = call(n["q"], n["values"], weights * scale, None, n["scales"], 0, 0, **rest)
    apart = call(n["q"], n["values"], weights, scale, n["scales"], 0, 0, **rest)
    assert folded.tolist() == apart.tolist()


def test_flash_mla_rows_by_positions_and_a_table():
    n = ran("flash_mla")
    by_slots, _ = custom.flash_mla_sparse_fp8(n["q"], n["rows"], n["indices"], 0.1)
    table = torch.tensor([[1, 2], [1, 2]])  # the rows from slot 64 on
    positions = torch.where(n["indices"] < 0, -1, n["indices"] - 64)
    by_positions = custom.npu_kv_quant_sparse_flash_attention(
        n["q"],
        n["rows"],
        n["rows"],
        positions[:, :, None],
        0.1,
        2,
        2,
        attention_mode=2,
        layout_kv="PA_BSND",
        block_table=table,
        actual_seq_lengths_kv=torch.tensor([100, 100]),
        sparse_mode=0,
        key_dtype=torch.float8_e4m3fn,
        value_dtype=torch.float8_e4m3fn,
        row_layout="nope_scale_rope",
    )
    assert torch.equal(by_slots, by_positions)


def test_torch_npu_merging_of_parts():
    q, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 10, 16), torch.randn(1, 2, 10, 16)
    whole, lse = custom.npu_fused_attention(q, k, v, return_lse=True)
    parts = [
        custom.npu_fused_attention(q, k[:, :, part], v[:, :, part], return_lse=True)
        for part in (slice(0, 4), slice(4, 10))
    ]
    outs, lses = ([each.flatten(0, 2) for each in both] for both in zip(*parts, strict=True))
    merged, merged_lse = custom.npu_attention_update([x.flatten() for x in lses], outs, 1)
    close(merged, whole.flatten(0, 2))
    close(merged_lse, lse.flatten())


def test_torch_npu_s_convolution_with_bias_and_activation():
    x, taps, bias = torch.randn(1, 9, 24), torch.randn(4, 24), torch.randn(24)
    states = torch.zeros(1, 3, 24)
    out = custom.npu_fused_causal_conv1d(x, taps, states, bias=bias, activation="silu")
    close(out.mT, convolved(x.mT, taps.T.contiguous(), bias, torch.zeros(1, 24, 3)))
    close(states, x[:, -3:])


def test_causal_conv1d_rings_slots_and_a_buffer_for_states():
    n = ran("causal_conv1d")
    weight, x = n["weight"], torch.randn(2, 24, 6)
    wanted = convolved(x, weight, None, x.new_zeros(2, 24, 3))
    ring, plain = torch.zeros(2, 24, 5), torch.zeros(3, 24, 3)
    for t in range(6):
        token = x[..., t : t + 1]
        seen = torch.full((2,), t, dtype=torch.int32)
        out = custom.causal_conv1d_update(token, ring, weight, None, "silu", cache_seqlens=seen)
        close(out, wanted[..., t : t + 1])
        out = custom.causal_conv1d_update(
            token, plain, weight, None, "silu", conv_state_indices=torch.tensor([2, 0])
        )
        close(out, wanted[..., t : t + 1])
    assert not plain[1].any()
    buffer = torch.zeros(2, 24, 3)
    custom.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)
    close(buffer, x[..., -3:])


# the traps of index.md


def test_a_row_major_weight_is_read_as_nz_unless_it_is_named():
    x, query_norm = torch.randn(1, 1, 64), torch.randn(1, 1, 32)
    weights = [torch.randn(32, 256), torch.randn(64, 32), torch.randn(64, 16)]

    def query(weights, **options):
        return custom.npu_indexer_prolog_pto(
            x,
            query_norm,
            *weights,
            torch.ones(32),
            torch.zeros(32),
            torch.zeros(1, 1, 16),
            torch.ones(1, 1, 16),
            torch.zeros(2, 16, 1, 32),
            torch.tensor([[3]]),
            **options,
        )[0]

    weights[0] = torch.randn(32, 16 * 32)
    right = query(weights, weight_format="nd")
    close(query([custom.to_nz(w) for w in weights]), right)
    assert (query(weights) - right).abs().max() > 0.5


def test_epsilons_are_as_the_pages_say():
    defaults = {
        name: inspect.signature(getattr(custom, name)).parameters
        for name in ("npu_gated_rms_norm", "npu_mla_prolog_v3", "npu_mla_prolog_pto")
    }
    assert defaults["npu_gated_rms_norm"]["epsilon"].default == 1e-6
    assert defaults["npu_mla_prolog_v3"]["rmsnorm_epsilon_cq"].default == 1e-5
    assert defaults["npu_mla_prolog_pto"]["rmsnorm_epsilon_cq"].default == 1e-6


def test_keys_that_are_not_normalised_grow_without_bound():
    q, k, v = (torch.randn(64, 1, 16) for _ in range(3))
    rate = torch.ones(64, 1)
    grown, _ = custom.npu_chunk_gated_delta_rule(q, k, v, beta=rate)
    right, _ = custom.npu_chunk_gated_delta_rule(q, F.normalize(k, dim=-1), v, beta=rate)
    assert right.abs().max() < 1e3 and not grown.abs().max() < 1e3
