# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What test_parallel.py has every rank do: processes that serve checks, and the checks.

A check is a function of the group; each rank draws the whole problem from one seed, computes it as
one process would, and compares its part: in float32, so that equality is that of the arithmetic,
but on GPUs in float16, which their kernels take. The same checks run over gloo, by the reference or
by CUDA kernels under Triton's interpreter, and over NCCL.
"""

from __future__ import annotations

import datetime
import os
import time
import traceback
from functools import partial
from typing import Any

import torch
import torch._dynamo  # before ranks are forked: the first collective imports it
import torch.distributed as dist
from custom.dispatch.common import paged
from torch import Tensor

import custom
from custom import parallel

from ..support.layer_v4 import drawn
from ..support.shared_kv import packed

P = 16  # page size
CLOSE = dict(rtol=1e-5, atol=1e-5)


def join(rank: int, size: int, file: str, device: str, seconds: int) -> None:
    """Into a group of `size`, over gloo, or over NCCL with a GPU each, where new tensors lie."""
    torch.set_num_threads(1)
    options: dict[str, Any] = dict(backend="gloo")
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
        options = dict(backend="nccl", device_id=torch.device("cuda", rank))
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        init_method=f"file://{file}", timeout=timeout, rank=rank, world_size=size, **options
    )


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def half_by_kernels(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or what kernels take that have none but half precision."""
    return torch.float16 if on_gpu() or custom.config.backend == "cuda" else dtype


def serve(rank: int, size: int, file: str, pipe: Any, device: str) -> None:
    """Runs checks by name until told to stop; answers with the traceback of what went wrong."""
    join(rank, size, file, device, 60)
    while (name := pipe.recv()) is not None:
        try:
            torch.manual_seed(0)
            globals()[name](dist.group.WORLD, rank, size)
            pipe.send("")
        except BaseException:
            pipe.send(f"rank {rank} of {size}: {traceback.format_exc()}")
    dist.destroy_process_group()


def meet(
    rank: int, size: int, file: str, pipe: Any, fault: str, device: str, waits: bool = True
) -> None:
    """The last rank dies, or hangs, before its collective; the others tell what they get. NCCL
    waits on the host (`waits`), or its watchdog speaks, into a file."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(waits))
    if not waits:
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = (
            "0"  # what was in flight, a minute before the end
        )
        os.dup2(os.open(f"{file}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    join(rank, size, file, device, 60)
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    step = Decode(rank, size, (2, 37))
    # CUDA may wait for a collective under way before it loads a kernel: all are loaded before
    step.parts(dist.group.WORLD, 16)
    parallel.all_reduce(torch.ones(1), group)
    if rank == size - 1:
        time.sleep(60 if fault == "hangs" else 0)
        os._exit(1)
    begin = time.monotonic()
    try:
        step.parts(group, 16)
        if on_gpu():
            torch.cuda.synchronize()
        pipe.send((0.0, "no error"))
    except RuntimeError as error:
        pipe.send((time.monotonic() - begin, str(error)))
    os._exit(0)


def said(call: Any, error: type[Exception] = ValueError) -> str:
    """The sentence of what refuses `call`."""
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError("not refused")


def _refuses(call: Any, begin: str, error: type[Exception] = ValueError) -> None:
    message = said(call, error)
    assert message.startswith(begin), message


def assert_near(got: Tensor, wanted: Tensor) -> None:
    """As sums in another order are; on a GPU both were made of half precision."""
    size = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(
        got, wanted, **dict(rtol=0.0, atol=2**-6 * size) if on_gpu() else CLOSE
    )


class Draw:
    """Random tensors: float32, or float16 on a GPU, whose kernels take half precision."""

    def __init__(self, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        self.random = torch.Generator("cpu").manual_seed(seed)
        self.dtype = dtype or (torch.float16 if on_gpu() else torch.float32)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.random, device="cpu") * scale
        return drawn.to(torch.get_default_device(), self.dtype)

    def whole(self, *shape: int) -> Tensor:
        """Small whole numbers: their scores are exact in float32, and some tie."""
        drawn = torch.randint(-3, 4, shape, generator=self.random, device="cpu")
        return drawn.to(torch.get_default_device(), self.dtype)

    def table(self, requests: int, pages: int) -> Tensor:
        order = torch.randperm(requests * pages, generator=self.random, device="cpu")
        return order.view(requests, pages).to(torch.get_default_device(), torch.int32)


# -------------------------------------------------------------------------- rows of the indexer


def rows_of_the_indexer(group, rank, size):
    """Ragged requests, fewer rows than chunks, keys of every layout: the same bits."""
    for S, S2, mode in ((23, 40, 3), (1, 40, 3), (8, 8, 3), (11, 30, 0), (13, 5, 3)):
        draw = Draw(S)
        q, k, w = draw.whole(3, S, 4, 16), draw.whole(3, S2, 1, 16), draw.whole(3, S, 4).abs()
        lengths = dict(
            actual_seq_lengths_query=torch.tensor([S, max(S - 3, 0), S // 2]),
            actual_seq_lengths_key=torch.tensor([S2, S2 - 3, 2]),
        )
        for given in ({}, lengths):
            options = dict(sparse_count=12, sparse_mode=mode, **given)
            wanted, _ = custom.npu_lightning_indexer(q, k, w, **options)
            learned = [x.clone().requires_grad_() for x in (q, k, w)]  # indices have no gradient
            for each in ((q, k, w), learned):
                got = parallel.row_parallel_indexer(*each, group=group, **options)
                assert torch.equal(got, wanted), (S, S2, mode)


def ragged_rows_of_the_indexer(group, rank, size):
    """Packed requests, of which some are empty and some cross the ranks' cuts."""
    for requests in ([5, 17, 0, 2, 9], [33], [1, 1, 1], [0, 40, 3]):
        draw = Draw(len(requests))
        T = sum(requests) + 2  # two tokens behind the last request
        q, w = draw.whole(T, 4, 16), draw.whole(T, 4).abs()
        ends = torch.tensor(requests).cumsum(0).to(torch.int32)
        extra = torch.tensor([7 * (i % 3) for i in range(len(requests))])
        lengths = (torch.tensor(requests) + extra).to(torch.int32)
        packed = dict(
            actual_seq_lengths_query=ends,
            layout_query="TND",
            sparse_count=10,
        )
        rows = draw.whole(int(lengths.sum()), 1, 16)
        flat = dict(actual_seq_lengths_key=lengths.cumsum(0).to(torch.int32), layout_key="TND")
        pages = draw.whole(len(requests) * 4, P, 1, 16)
        table = draw.table(len(requests), 4)
        in_pages = dict(actual_seq_lengths_key=lengths, layout_key="PA_BSND", block_table=table)
        for keys, given in ((rows, flat), (pages, in_pages)):
            wanted, _ = custom.npu_lightning_indexer(q, keys, w, **packed, **given)
            got = parallel.row_parallel_indexer(q, keys, w, group=group, **packed, **given)
            assert torch.equal(got, wanted), requests


# ------------------------------------------------------------------------------ tensor parallel


def layer_of(heads: int, S: int = 2, lengths: tuple[int, ...] = (20, 45, 2)) -> dict[str, Tensor]:
    """Arguments of npu_sparse_attention_pto."""
    H, Rq, Dn, R, Dr, Ni, Di = 64, 32, 16, 32, 16, 16, 32
    B, pages = len(lengths), 4
    draw = Draw(heads)

    def nz(*shape: int) -> Tensor:
        return custom.to_nz(draw(*shape, scale=0.2))

    table, act = draw.table(B, pages), torch.tensor(lengths)
    positions = act[:, None] - S + torch.arange(S)
    slot = paged.slots(table, torch.arange(B), positions, B * pages, P)
    return dict(
        x=draw(B, S, H),
        w_dq=nz(H, Rq),
        w_uq_qr=nz(Rq, heads * (Dn + Dr)),
        w_uk=draw(heads, Dn, R, scale=0.2),
        w_dkv_kr=nz(H, R + Dr),
        gamma_cq=draw(Rq),
        gamma_ckv=draw(R),
        sin=draw(B, S, Dr),
        cos=draw(B, S, Dr),
        cache_index=slot.int(),
        kv_cache=draw(B * pages, P, 1, R),
        kr_cache=draw(B * pages, P, 1, Dr),
        block_table=table,
        act_seqs=act.int(),
        w_idx_qb=nz(Rq, Ni * Di),
        w_idx_k=nz(H, Di),
        w_idx_proj=nz(H, Ni),
        in_gamma_k=draw(Di),
        in_beta_k=draw(Di),
        index_k_cache=draw(B * pages, P, 1, Di),
    )


def copied(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in layer.items()}


def output(latent: Tensor, uv: Tensor, o: Tensor) -> Tensor:
    """[B, S, H] of the latent output: value up-projection by head, output projection."""
    return torch.einsum("bsnr,nrv->bsnv", latent, uv).flatten(2) @ o.T


def tensor_parallel(group, rank, size):
    """The whole layer, with one all_reduce behind the output projection, which is the caller's."""
    heads = 2 * size
    layer = layer_of(heads)
    uv, o = Draw(1)(heads, 32, 16), Draw(2)(64, heads * 16)
    whole = copied(layer)
    wanted = output(custom.npu_sparse_attention_pto(**whole, sparse_count=16), uv, o)
    mine = [parallel.shard(uv, 0, group), parallel.shard(o, 1, group)]
    for options in ({}, dict(check_equal=True), dict(broadcast=True)):
        local = parallel.shard_layer(copied(layer), group=group)
        out = parallel.tensor_parallel_attention(local, group=group, sparse_count=16, **options)
        got = parallel.all_reduce(output(out, *mine), group)
        # sums over heads in another order
        atol = (2**-6 if on_gpu() else 1e-5) * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
        for cache in ("kv_cache", "kr_cache", "index_k_cache"):
            assert torch.equal(local[cache], whole[cache])
    flat = layer | {"w_uq_qr": layer["w_uq_qr"].view(32, -1)}
    again = parallel.shard_layer(flat, group=group)
    assert torch.equal(again["w_uq_qr"], parallel.shard_layer(layer, group=group)["w_uq_qr"])
    rows = custom.from_nz(layer["w_uq_qr"])
    nd = parallel.shard_layer(layer | {"w_uq_qr": rows}, group=group, weight_format="nd")
    assert torch.equal(nd["w_uq_qr"], custom.from_nz(again["w_uq_qr"]))
    linear = layer | {"w_uq_qr": rows.t().contiguous(), "weight_format": "linear"}
    assert torch.equal(parallel.shard_layer(linear, group=group)["w_uq_qr"].t(), nd["w_uq_qr"])


def tensor_parallel_of_deepseek_v4(group, rank, size):
    """Heads and output groups over ranks; rows, entries and states are the same on all."""
    for kind in ("sliding", "HCA", "CSA"):
        dtype = half_by_kernels(torch.float32)
        device = torch.get_default_device()
        layer = drawn(kind, device, dtype, heads=4 * size, groups=2 * size)
        whole, caches = copied_tensors(layer), ("ori_kv", "cmp_kv", "cmp_state", "idx_k")
        wanted = custom.npu_sparse_attention_v4_pto(**whole)
        for options in ({}, dict(check_equal=True), dict(broadcast=True)):
            given = copied_tensors(layer)
            local = parallel.shard_layer_v4(given, group=group, weight_format="nd")
            got = parallel.tensor_parallel_attention_v4(local, group=group, **options)
            # sums over heads in another order
            atol = (2**-9 if dtype is torch.float16 else 1e-5) * float(wanted.abs().max())
            torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
            for cache in caches:
                assert cache not in local or torch.equal(local[cache], whole[cache])
        projections = dict(w_o_a=None, w_o_b=None)
        heads = custom.npu_sparse_attention_v4_pto(**copied_tensors(layer) | projections)
        for options in ({}, dict(check_equal=True)):
            given = copied_tensors(layer) | projections
            local = parallel.shard_layer_v4(given, group=group, weight_format="nd")
            got = parallel.tensor_parallel_attention_v4(local, group=group, **options)
            assert_near(got, parallel.shard(heads, 2, group))


def context_parallel_of_deepseek_v4(group, rank, size):
    """Entries over ranks, a page at a time; window rows and states are the same on all. Pages in
    disorder, more and fewer than ranks, of which some are nowhere; rows and keys of 8 bits."""
    dtype, device = half_by_kernels(torch.float32), torch.get_default_device()
    heads = dict(heads=2 * size, groups=size)
    cases = [
        ("sliding", {}, {}),
        ("HCA", dict(starts=(30, 0, 9), used=(6, 4, 0)), {}),
        ("HCA", dict(entry_page=16, output=False), {}),
        ("CSA", dict(starts=(35, 2, 17), used=None, steps=5), {}),
        ("CSA", dict(entry_page=1), dict(check_equal=True)),
        ("CSA", dict(m=3, holes=False), dict(broadcast=True)),
        ("HCA", dict(starts=(), used=None), {}),
    ]
    for kind, sizes, options in cases:
        layer = drawn(kind, device, dtype, **heads | sizes)
        _assert_whole_v4(layer, group, rank, size, options)
    layer = drawn("CSA", device, dtype, **heads, Dr=64, D=512, Di=128)
    layer["sinks"][:2] = torch.tensor([torch.inf, -torch.inf])
    rows = {name: packed(layer[name]) for name in ("ori_kv", "cmp_kv")}
    keys = torch.zeros(*layer["idx_k"].shape[:3], 132, dtype=torch.uint8)
    fp8 = dict(kv_kind="fp8", index_kind="fp8", idx_k=keys)
    _assert_whole_v4(layer | rows | fp8, group, rank, size, {})


def _assert_whole_v4(layer, group, rank, size, options):
    """Of this rank's heads and entries, as one process computes it with all of them."""
    whole, table = copied_tensors(layer), layer.get("cmp_block_table")
    wanted = custom.npu_sparse_attention_v4_pto(**whole)
    given = copied_tensors(layer)
    if table is not None:
        # what lies in the pages of another rank is nobody's
        given["cmp_block_table"] = parallel.shard_entry_pages(table, group=group)
        mine = torch.zeros(len(given["cmp_kv"]), dtype=torch.bool)
        mine[given["cmp_block_table"][given["cmp_block_table"] >= 0].long()] = True
        for name in ("cmp_kv", "idx_k"):
            if given.get(name) is not None:
                given[name][~mine] = torch.nan if given[name].is_floating_point() else 0x7F
    local = parallel.shard_layer_v4(given, group=group, weight_format="nd")
    got = parallel.context_parallel_attention_v4(local, group=group, **options)
    if layer.get("w_o_a") is None:
        wanted = parallel.shard(wanted, 2, group)
    # float16: three roundings of attention's output, two of what W_o_b multiplies, and those of
    # each rank's share and of their sum
    eps = (5 + 2 * size) * 2**-11 if got.dtype is torch.float16 else CLOSE["atol"]
    atol = eps * float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
    for name in ("ori_kv", "cmp_state", "idx_state"):
        assert layer.get(name) is None or torch.equal(local[name], whole[name]), name
    for name in ("cmp_kv", "idx_k"):
        if layer.get(name) is not None:
            assert torch.equal(local[name][mine], whole[name][mine]), name


def entries_of_another_rank_are_refused(group, rank, size):
    layer = drawn("HCA", torch.device("cpu"), torch.float32, heads=2 * size, groups=size)
    local = parallel.shard_layer_v4(layer, group=group, weight_format="nd")
    message = said(lambda: parallel.context_parallel_attention_v4(local, group=group))
    assert f"expected -1 on rank {rank}" in message and "shard_entry_pages" in message, message
    message = said(
        lambda: parallel.context_parallel_attention(
            layer, group=group, index_block_table=local["x"], index_cache_index=local["x"]
        ),
        NotImplementedError,
    )
    assert "Use context_parallel_attention_v4" in message, message
    local["x"].requires_grad_()
    _refuses(
        lambda: parallel.context_parallel_attention_v4(local, group=group),
        "context_parallel_attention_v4",
        RuntimeError,
    )


def weights_of_deepseek_v4_are_cut(group, rank, size):
    """NZ of either shape as row-major ones; what cannot be dealt out is refused, by name."""
    draw = Draw(3)
    heads, groups, D, Ro = 2 * size, size, 32, 16
    layer = dict(
        w_uq=draw(32, heads * D),
        gamma_kv=draw(D),
        sinks=draw(heads),
        w_o_a=draw(groups, 2 * D, Ro),
        w_o_b=draw(groups * Ro, 64),
    )
    rows = parallel.shard_layer_v4(layer, group=group, weight_format="nd")
    assert torch.equal(rows["w_uq"], layer["w_uq"][:, rank * 2 * D : (rank + 1) * 2 * D])
    assert torch.equal(rows["sinks"], layer["sinks"][rank * 2 : rank * 2 + 2])
    assert torch.equal(rows["w_o_a"], layer["w_o_a"][rank : rank + 1])
    assert torch.equal(rows["w_o_b"], layer["w_o_b"][rank * Ro : (rank + 1) * Ro])
    turned = {n: layer[n].mT.contiguous() for n in ("w_uq", "w_o_a", "w_o_b")}
    linear = layer | turned | dict(weight_format="linear")
    cut = parallel.shard_layer_v4(linear, group=group)
    assert all(torch.equal(cut[n].mT, rows[n]) for n in turned)
    for flat in (False, True):
        tiled = {n: custom.to_nz(layer[n], flat=flat) for n in ("w_uq", "w_o_a", "w_o_b")}
        cut = parallel.shard_layer_v4(layer | tiled, group=group)
        for name in ("w_uq", "w_o_b"):
            assert torch.equal(cut[name], custom.to_nz(rows[name])), (name, flat)
        assert torch.equal(cut["w_o_a"], custom.to_nz(rows["w_o_a"], flat=flat))
    scales = dict(
        dequant_scale_w_uq=draw(1, heads * D),
        dequant_scale_w_o_a=draw(groups, 1, Ro),
        dequant_scale_w_o_b=draw(1, 64),
    )
    int8 = layer | scales | dict(weight_quant_mode=2, weight_format="nd")
    cut = parallel.shard_layer_v4(int8, group=group)
    for name, dim in dict(w_uq=1, w_o_a=0).items():
        wanted = scales[f"dequant_scale_{name}"].chunk(size, dim)[rank]
        assert torch.equal(cut[f"dequant_scale_{name}"], wanted)
    assert cut["dequant_scale_w_o_b"] is scales["dequant_scale_w_o_b"]
    blocks = dict(
        w_uq=draw(32, heads * 128),
        gamma_kv=draw(128),
        w_o_a=draw(groups, 256, 128),
        w_o_b=draw(groups * 128, 64),
        dequant_scale_w_uq=draw(1, heads),
        dequant_scale_w_o_a=draw(groups, 2, 1),
        dequant_scale_w_o_b=draw(groups, 1),
        weight_quant_mode=4,
        weight_format="nd",
    )
    cut = parallel.shard_layer_v4(blocks, group=group)
    assert torch.equal(cut["dequant_scale_w_uq"], blocks["dequant_scale_w_uq"].chunk(size, 1)[rank])
    for name in ("dequant_scale_w_o_a", "dequant_scale_w_o_b"):
        assert torch.equal(cut[name], blocks[name][rank : rank + 1])
    message = said(lambda: parallel.shard_layer_v4(int8 | dict(weight_quant_mode=4), group=group))
    assert "`w_uq` has 64 columns a rank, expected whole blocks" in message, message
    uneven = layer | dict(w_uq=draw(32, (heads + 1) * D))
    message = said(lambda: parallel.shard_layer_v4(uneven, group=group))
    assert f"`w_uq` has {heads + 1} heads" in message, message
    for given, sentence in (
        (dict(surplus=1), "npu_sparse_attention_v4_pto has no argument `surplus`"),
        ({}, "`x` is missing"),
    ):
        message = said(
            lambda given=given: parallel.tensor_parallel_attention_v4(
                given, group=group, check_equal=True
            ),
            TypeError,
        )
        assert sentence in message, message


def copied_tensors(layer: dict[str, Any]) -> dict[str, Any]:
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in layer.items()}


def another_selection_is_found(group, rank, size):
    """One rank's input differs: the check names it, and a broadcast makes all agree."""
    indices = torch.arange(40, dtype=torch.int32).view(2, 1, 1, 20)
    assert parallel.same_selection(indices, group=group) is indices
    if rank == size - 1:
        indices = indices.clone()
        indices[1, 0, 0, 3] += 1
    try:
        parallel.same_selection(indices, group=group)
    except RuntimeError as error:
        assert f"ranks [{size - 1}] selected other positions" in str(error)
    else:
        raise AssertionError("not found")
    agreed = parallel.same_selection(indices, group=group, broadcast=True)
    assert torch.equal(agreed.flatten(), torch.arange(40, dtype=torch.int32))


def heads_of_the_delta_rule(group, rank, size):
    """Value heads are dealt out; key heads too, or several ranks use the same one."""
    for Nk in (size, 2 * size, 1):
        Nv, T = 4 * size, 5
        draw = Draw(Nk)
        q, k, v = draw(1, T, Nk, 16), draw(1, T, Nk, 16), draw(1, T, Nv, 8)
        a, b = draw(1, T, Nv), draw(1, T, Nv)
        A_log, bias, state = draw(Nv), draw(Nv), draw(2, Nv, 16, 8)
        slot = torch.tensor([1])
        run = partial(
            custom.npu_fused_sigmoid_gating_delta_rule_update, use_qk_l2norm_in_kernel=True
        )
        after = state.clone()
        wanted = run(A_log, a, bias, 1.0, 20.0, q, k, v, b, after, slot)
        keys, values = parallel.delta_rule_heads(Nk, Nv, group=group)
        mine = state[:, values].clone()
        got = run(
            A_log[values],
            a[..., values],
            bias[values],
            1.0,
            20.0,
            q[:, :, keys],
            k[:, :, keys],
            v[:, :, values],
            b[..., values],
            mine,
            slot,
        )
        assert_near(got, wanted[:, :, values])
        assert_near(mine, after[:, values])


def heads_of_kda(group, rank, size):
    """A head of KDA needs no other."""
    T, H, K, V = 20, 2 * size, 16, 8
    draw = Draw(size, half_by_kernels(torch.float32))
    q, k = (torch.nn.functional.normalize(draw(1, T, H, K), dim=-1) for _ in range(2))
    v, g = draw(1, T, H, V), -draw(1, T, H, K).abs()
    beta, state = draw(1, T, H).sigmoid(), Draw(1)(1, H, V, K)
    keys, values = parallel.delta_rule_heads(H, H, group=group)
    assert keys == values
    call = partial(custom.npu_chunk_kda, state_layout="vk", scale=0.3)
    wanted, final = call(q, k, v, g, beta, initial_state=state)
    mine = [x[:, :, values] for x in (q, k, v, g, beta)]
    got, last = call(*mine, initial_state=state[:, values].contiguous())
    _as_one(got, wanted[:, :, values], draw.dtype)
    _as_one(last, final[:, values], draw.dtype)


# -------------------------------------------------------------------------- context parallel


class Decode:
    """A decode step: queries of all heads, whole caches, and this rank's shard of them."""

    def __init__(
        self,
        rank: int,
        size: int,
        lengths: tuple[int, ...],
        S: int = 1,
        interleave: int = 1,
        ties: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        R, Dr, Ni, Di, n = 32, 16, 4, 32, 2
        B, pages = len(lengths), 8
        draw = Draw(S + interleave, dtype)
        exact = draw.whole if ties else draw
        self.rank, self.size, self.interleave, self.n = rank, size, interleave, n
        self.query, self.rope = draw(B, S, n * size, R), draw(B, S, n * size, Dr)
        self.index, self.weights = exact(B, S, Ni, Di), exact(B, S, Ni).abs()
        self.table, self.act = draw.table(B, pages), torch.tensor(lengths, dtype=torch.int32)
        self.kv, self.kr = draw(B * pages, P, 1, R), draw(B * pages, P, 1, Dr)
        self.keys = exact(B * pages, P, 1, Di)
        self.own_table = draw.table(B, pages)
        self.shards = [self.shard_of(x) for x in (self.kv, self.kr, self.keys)]

    def shard_of(self, cache: Tensor) -> Tensor:
        """The positions of this rank, on the pages of its own table; NaN in all other slots, whose
        bytes are 255."""
        held = cache.view(torch.uint8)
        out = torch.full_like(held, 255)
        for request, length in enumerate(self.act.tolist()):
            mine = [p for p in range(length) if p // self.interleave % self.size == self.rank]
            for row, p in enumerate(mine):
                page, own = self.table[request, p // P], self.own_table[request, row // P]
                out[own, row % P] = held[page, p % P]
        return out.view(cache.dtype)

    def whole(self, count: int, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(indices, out) of one process."""
        indices, _ = custom.npu_lightning_indexer(
            self.index,
            self.keys,
            self.weights,
            actual_seq_lengths_key=self.act,
            block_table=self.table,
            layout_key="PA_BSND",
            sparse_count=count,
        )
        out, _, _ = custom.npu_sparse_flash_attention(
            self.query,
            self.kv,
            None,
            indices,
            0.2,
            block_table=self.table,
            actual_seq_lengths_kv=self.act,
            query_rope=self.rope,
            key_rope=self.kr,
            layout_kv="PA_BSND",
            sinks=sinks,
        )
        return indices, out

    @property
    def heads(self) -> slice:
        return slice(self.rank * self.n, (self.rank + 1) * self.n)

    def parts(self, group: Any, count: int, replicate: bool = True, **options: Any) -> Tensor:
        kv, kr, keys = self.shards
        return parallel.context_parallel_decode(
            self.query[:, :, self.heads],
            self.rope[:, :, self.heads],
            self.index,
            self.weights,
            kv,
            kr,
            self.keys if replicate else keys,
            self.own_table,
            self.act,
            group=group,
            softmax_scale=0.2,
            sparse_count=count,
            interleave=self.interleave,
            index_block_table=self.table if replicate else self.own_table,
            replicate_index=replicate,
            **options,
        )


def decode(group, rank, size):
    """Lengths from 0 and 1, so that shards are empty; stripes of one position, few, and a page."""
    for S, interleave in ((1, 1), (1, P), (2, 3)):
        step = Decode(rank, size, (S, 37, 128, 0), S, interleave)
        _, wanted = step.whole(24)
        for replicate in (True, False):
            got = step.parts(group, 24, replicate)
            assert_near(got, wanted[:, :, step.heads])


def decode_finds_another_selection(group, rank, size):
    """One rank's index query differs: found before it is used, or rank 0's is taken; where all
    agree both change nothing."""
    step = Decode(rank, size, (2, 37, 128))
    _, wanted = step.whole(8)
    for replicate in (True, False):
        for option in ("check_equal", "broadcast"):
            got = step.parts(group, 8, replicate, **{option: True})
            assert_near(got, wanted[:, :, step.heads])
    if rank == size - 1:
        step.index = -step.index
    _refuses(
        lambda: step.parts(group, 8, check_equal=True),
        f"custom.parallel: ranks [{size - 1}] selected other positions than rank 0",
        RuntimeError,
    )
    assert_near(step.parts(group, 8, broadcast=True), wanted[:, :, step.heads])


def decode_selects_the_same(group, rank, size):
    """Sharded index keys whose scores tie across ranks, in half precision many more, rows of a
    draft among them: the same set, bit for bit, fewer keys than the selection included."""
    kinds = (None, torch.bfloat16, torch.bfloat16)
    for kind, S, interleave in zip(kinds, (1, 3, 2), (1, 5, P), strict=True):
        step = Decode(rank, size, (3, 60, 128), S, interleave, ties=True, dtype=kind)
        for count in (1, 16, 100):
            wanted, _ = step.whole(count)
            got = parallel.attention._merged_selection(
                step.index,
                step.weights,
                step.shards[2],
                None,
                step.own_table,
                step.act,
                count,
                interleave,
                group,
            )
            assert torch.equal(got, wanted), (S, interleave, count)


def decode_with_sinks(group, rank, size):
    """The sinks enter the denominator once, not once a rank."""
    step = Decode(rank, size, (2, 37, 128))
    sinks = Draw(3, torch.float32)(step.n * size)
    _, wanted = step.whole(24, sinks)
    got = step.parts(group, 24, sinks=sinks[step.heads])
    assert_near(got, wanted[:, :, step.heads])


def decode_in_half_precision(group, rank, size):
    """The parts are rounded once more than the whole: within 2 ulp of the largest."""
    step = Decode(rank, size, (5, 37, 128), dtype=torch.bfloat16)
    _, wanted = step.whole(24)
    got = step.parts(group, 24)
    assert got.dtype is torch.bfloat16
    error = (got.float() - wanted[:, :, step.heads].float()).abs().max()
    assert error <= 2 * 2**-7 * wanted.float().abs().max(), error


def decode_of_nothing(group, rank, size):
    """An idle step still meets its collectives."""
    for replicate in (True, False):
        got = Decode(rank, size, ()).parts(group, 24, replicate)
        assert got.shape == (0, 1, 2, 32)


def prologs_write_into_shards(group, rank, size):
    """A step of the layer from hidden states: each new token is kept by one rank alone, and a
    replayed step leaves the same bytes."""
    lengths, S, heads = (3, 20, 45), 2, 2 * size
    layer = layer_of(heads, S, lengths)
    whole = copied(layer)
    wanted = custom.npu_sparse_attention_pto(**whole, sparse_count=16)
    for interleave in (1, P):
        mine = parallel.shard_layer(copied(layer), group=group)
        step = Decode.__new__(Decode)
        step.rank, step.size, step.interleave = rank, size, interleave
        step.table, step.act = layer["block_table"], layer["act_seqs"]
        step.own_table = Draw(9).table(3, 4)
        before = layer["act_seqs"] - S
        step.act = before
        kv, kr = step.shard_of(layer["kv_cache"]), step.shard_of(layer["kr_cache"])
        step.act = layer["act_seqs"]
        positions = before[:, None] + torch.arange(S)
        slots = custom.shard_slots(positions, step.own_table, P, rank, size, interleave)
        mine |= dict(kv_cache=kv, kr_cache=kr, block_table=step.own_table)
        for _ in range(2):
            out = parallel.context_parallel_attention(
                mine | dict(cache_index=slots),
                group=group,
                index_block_table=step.table,
                interleave=interleave,
                index_cache_index=mine["cache_index"],
                sparse_count=16,
                check_equal=True,
            )
            for got, cache in ((kv, "kv_cache"), (kr, "kr_cache")):
                expected = step.shard_of(whole[cache])
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
            assert_near(out, wanted[:, :, 2 * rank : 2 * rank + 2])


def prefill(group, rank, size):
    """New tokens behind a cached prefix; one token has no slot, and one request is shorter than its
    rows."""
    n, B, N, R, Dr, Ni, Di, pages = 3, 2, 2, 32, 16, 4, 32, 8
    S = 2 * size * n
    draw = Draw(size)
    query, rope = draw(B, S, N, R), draw(B, S, N, Dr)
    index, weights = draw(B, S, Ni, Di), draw(B, S, Ni)
    table = draw.table(B, pages)
    act = torch.tensor([S + 20, S - 2], dtype=torch.int32)
    positions = act[:, None] - S + torch.arange(S)
    slot = paged.slots(table, torch.arange(B), positions, B * pages, P)
    slot[0, 5] = -1
    rows = dict(kv=draw(B, S, R), kr=draw(B, S, Dr), index=draw(B, S, Di))
    caches = {name: draw(B * pages, P, 1, x.shape[-1]) for name, x in rows.items()}
    whole = copied(caches)
    for name, x in rows.items():
        paged.scatter(whole[name], slot.flatten(), x.flatten(0, 1))
    lengths = dict(block_table=table)
    indices, _ = custom.npu_lightning_indexer(
        index,
        whole["index"],
        weights,
        actual_seq_lengths_key=act,
        layout_key="PA_BSND",
        sparse_count=16,
        **lengths,
    )
    wanted, _, _ = custom.npu_sparse_flash_attention(
        query,
        whole["kv"],
        None,
        indices,
        0.2,
        actual_seq_lengths_kv=act,
        query_rope=rope,
        key_rope=whole["kr"],
        layout_kv="PA_BSND",
        **lengths,
    )

    inputs = (query, rope, index, weights)
    out = _prefilled(inputs, rows, caches, (slot, table, act), group, softmax_scale=0.2)
    assert_near(out, parallel.zigzag(wanted, 1, group))
    for name, cache in caches.items():
        assert torch.equal(cache, whole[name]), name
    assert torch.equal(parallel.zigzag(positions, 1, group), positions[:, _zigzag(rank, size, n)])


def _prefilled(inputs, rows, caches, pages, group, softmax_scale: float) -> Tensor:
    """Of this rank's part of every token's inputs and rows."""
    return parallel.context_parallel_prefill(
        *(parallel.zigzag(x, 1, group) for x in inputs),
        {name: parallel.zigzag(x, 1, group) for name, x in rows.items()},
        caches,
        *pages,
        group=group,
        softmax_scale=softmax_scale,
        sparse_count=16,
    )


def rows_of_a_prefill_are_checked(group, rank, size):
    """Before anything travels or is written."""
    rows = {name: torch.zeros(1, 2, D) for name, D in (("kv", 32), ("kr", 16), ("index", 32))}
    caches = {name: torch.zeros(2, P, 1, x.shape[-1]) for name, x in rows.items()}
    swapped = rows | dict(kv=rows["kr"], kr=rows["kv"])
    less = {name: x for name, x in rows.items() if name != "index"}
    slots = torch.arange(2 * size)[None]

    def refused(said: str, rows=rows, caches=caches, slots=slots, mine=2) -> None:
        x = torch.zeros(1, mine, 2, 32)
        _refuses(
            lambda: parallel.context_parallel_prefill(
                x,
                x,
                x,
                x[..., 0],
                rows,
                caches,
                slots,
                torch.zeros(1, 2).int(),
                torch.tensor([2 * size]),
                group=group,
                softmax_scale=1.0,
            ),
            f"context_parallel_prefill: {said}",
        )
        assert not any(cache.any() for cache in caches.values())

    refused("`rows` or `caches` lacks 'index', expected both", rows=less)
    refused("`rows` or `caches` lacks 'index', expected both", caches=less)
    refused("`rows` or `caches` lacks 'index', expected both", rows=less, caches=less)
    refused("`rows` or `caches` has 'v', expected only", rows=rows | dict(v=rows["kv"]))
    refused("`rows['kv']` has shape [1, 2, 16] and rows of 64 bytes, expected", rows=swapped)
    refused("`rows['kv']` has shape [1, 2, 32]", mine=4)
    odd = {name: x[:, :1] for name, x in rows.items()}
    refused("`query` has 1 rows, expected two chunks", rows=odd, mine=1)
    refused("`cache_index` has shape", slots=slots[:, 1:])


def write_8_bits(caches: dict[str, Tensor], slots: Tensor, *drawn: Tensor) -> None:
    """Latents, rotary keys and index keys."""
    custom.npu_latent_cache_write(
        *drawn[:2], caches["kv"], slots, kind="fp8", row_layout="nope_rope_scale"
    )
    custom.npu_index_cache_write(
        drawn[2], caches["index"], caches["index_scale"], slots, kind="fp8"
    )


def quantized(*drawn: Tensor) -> dict[str, Tensor]:
    """Caches with what was drawn in their first slots; pages of index keys lie apart."""
    pages = -(-len(drawn[0]) // P)
    rows = torch.zeros(pages, P, 1, 656, dtype=torch.float8_e4m3fn)
    values, scales = custom.index_cache_views(torch.zeros(pages, P, 132, dtype=torch.uint8), "fp8")
    caches = dict(kv=rows, index=values, index_scale=scales)
    write_8_bits(caches, torch.arange(len(drawn[0])), *drawn)
    return caches


def quantized_decode(group, rank, size):
    """Latents and index keys of 8 bits, replicated and dealt out."""
    kind = half_by_kernels(torch.bfloat16)
    for S, interleave in ((1, 1), (2, P)):
        step = Decode(rank, size, (2, 37, 60), S, interleave, dtype=kind)
        draw = Draw(size, kind)
        whole = quantized(*(draw(len(step.kv) * P, D) for D in (512, 64, 128)))
        query, rope = draw(3, S, step.n * size, 512), draw(3, S, step.n * size, 64)
        index, weights, _ = custom.quantize_index_query(
            draw(3, S, 4, 128), draw(3, S, 4).abs(), kind="fp8"
        )
        indices = custom.npu_quant_lightning_indexer(
            index,
            whole["index"],
            weights,
            None,
            whole["index_scale"],
            0,
            0,
            sparse_count=24,
            block_table=step.table,
            actual_seq_lengths_key=step.act,
            layout_key="PA_BSND",
        )
        wanted = _of_one_rank(query, rope, whole["kv"], indices, step.table, step.act)
        mine = {name: step.shard_of(cache) for name, cache in whole.items()}
        for replicate in (True, False):
            of = whole if replicate else mine
            got = parallel.context_parallel_decode(
                query[:, :, step.heads],
                rope[:, :, step.heads],
                index,
                weights,
                mine["kv"],
                None,
                of["index"],
                step.own_table,
                step.act,
                group=group,
                softmax_scale=0.1,
                index_scale=of["index_scale"],
                sparse_count=24,
                interleave=interleave,
                index_block_table=step.table if replicate else step.own_table,
                replicate_index=replicate,
            )
            _as_one(got, wanted[:, :, step.heads], kind)


def _of_one_rank(
    query: Tensor, rope: Tensor, kv: Tensor, indices: Tensor, table: Tensor, act: Tensor
) -> Tensor:
    """Attention over rows of 8 bits, by a process of its own."""
    return custom.npu_kv_quant_sparse_flash_attention(
        torch.cat([query, rope], -1),
        kv,
        kv,
        indices,
        0.1,
        2,
        2,
        block_table=table,
        actual_seq_lengths_kv=act,
        layout_kv="PA_BSND",
        attention_mode=2,
    )


def quantized_prefill(group, rank, size):
    """Latents and index keys of 8 bits travel as they lie in the caches, whose pages lie apart."""
    n, B, N, Ni, pages = 2, 2, 2, 4, 4
    S = 2 * size * n
    draw = Draw(size, half_by_kernels(torch.bfloat16))
    query, rope = draw(B, S, N, 512), draw(B, S, N, 64)
    index, weights, _ = custom.quantize_index_query(
        draw(B, S, Ni, 128), draw(B, S, Ni).abs(), kind="fp8"
    )
    table, act = draw.table(B, pages), torch.tensor([S + 20, S - 2], dtype=torch.int32)
    positions = act[:, None] - S + torch.arange(S)
    slot = paged.slots(table, torch.arange(B), positions, B * pages, P)
    slot[0, 5] = -1

    old, new = ([draw(count, D) for D in (512, 64, 128)] for count in (B * pages * P, B * S))
    held, whole = quantized(*old), quantized(*old)
    write_8_bits(whole, slot.flatten(), *new)
    rows = {
        name: x.flatten(0, 1)[: B * S].reshape(B, S, -1).view(torch.uint8)
        for name, x in quantized(*new).items()
    }
    keys = dict(block_table=table, actual_seq_lengths_key=act, layout_key="PA_BSND")
    indices = custom.npu_quant_lightning_indexer(
        index, whole["index"], weights, None, whole["index_scale"], 0, 0, sparse_count=16, **keys
    )
    wanted = _of_one_rank(query, rope, whole["kv"], indices, table, act)
    inputs = (query, rope, index, weights)
    out = _prefilled(inputs, rows, held, (slot, table, act), group, softmax_scale=0.1)
    _as_one(out, parallel.zigzag(wanted, 1, group), draw.dtype)
    for name, cache in held.items():
        got, expected = (x.contiguous().view(torch.uint8) for x in (cache, whole[name]))
        assert torch.equal(got, expected), name


def _zigzag(rank: int, size: int, n: int) -> list[int]:
    last = 2 * size - 1 - rank
    return [*range(rank * n, rank * n + n), *range(last * n, last * n + n)]


def delta_rule_over_the_context(group, rank, size):
    """Two sequences, of which the second has no token on rank 0; with and without a first state."""
    heads, Dk, Dv = 2, 16, 8
    parts = [(70 + 5 * r, 13 * r) for r in range(size)]
    draw = Draw(size, half_by_kernels(torch.float32))
    drawn = [[_tokens(draw, T, heads, Dk, Dv) for T in part] for part in parts]
    initial = draw(2, 2 * heads, Dv, Dk)
    for state in (None, initial):
        sequences = [
            [torch.cat(x) for x in zip(*(part[s] for part in drawn), strict=True)] for s in (0, 1)
        ]
        joined = [torch.cat(x) for x in zip(*sequences, strict=True)]
        lengths = torch.tensor([len(sequences[0][0]), len(sequences[1][0])])
        wanted, final = _delta(custom.npu_chunk_gated_delta_rule, joined, lengths, state)
        mine = [torch.cat(x) for x in zip(*drawn[rank], strict=True)]
        call = partial(parallel.context_parallel_delta_rule, group=group)
        out, last = _delta(call, mine, torch.tensor(parts[rank]), state)
        _as_one(last, final, draw.dtype)
        before = [sum(part[s] for part in parts[:rank]) for s in (0, 1)]
        starts = [before[0], int(lengths[0]) + before[1]]
        rows = [r for s in (0, 1) for r in range(starts[s], starts[s] + parts[rank][s])]
        _as_one(out, wanted[rows], draw.dtype)


def _as_one(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """In half precision a state that is handed along was rounded where one process rounds nothing:
    within the roundings of a few of its sums, relative to the largest."""
    if dtype is torch.float32:
        assert_near(got, wanted)
        return
    error = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert error <= 2**-6, error


def _tokens(draw: Draw, T: int, heads: int, Dk: int, Dv: int) -> list[Tensor]:
    key = torch.nn.functional.normalize(draw(T, heads, Dk), dim=-1)
    beta, g = draw(T, 2 * heads).sigmoid(), -draw(T, 2 * heads).abs()
    return [draw(T, heads, Dk), key, draw(T, 2 * heads, Dv), beta, g]


def _delta(call: Any, x: list[Tensor], lengths: Tensor, state: Tensor | None) -> Any:
    q, k, v, beta, g = x
    return call(q, k, v, beta=beta, g=g, actual_seq_lengths=lengths, initial_state=state)


def kda_over_the_context(group, rank, size):
    """A decay for each channel; one sequence of which every rank has a part."""
    T, heads, Dk, Dv = 40, 2, 16, 8
    draw = Draw(size, half_by_kernels(torch.float32))
    q, k = (torch.nn.functional.normalize(draw(1, T * size, heads, Dk), dim=-1) for _ in range(2))
    v, g = draw(1, T * size, heads, Dv), -draw(1, T * size, heads, Dk).abs()
    beta, state = draw(1, T * size, heads).sigmoid(), draw(1, heads, Dv, Dk)
    wanted, final = custom.npu_chunk_kda(
        q, k, v, g, beta, initial_state=state, state_layout="vk", scale=0.3
    )
    mine = slice(rank * T, rank * T + T)
    out, last = parallel.context_parallel_kda(
        *(x[:, mine] for x in (q, k, v, g, beta)), group=group, initial_state=state, scale=0.3
    )
    _as_one(out, wanted[:, mine], draw.dtype)
    _as_one(last, final, draw.dtype)


# ------------------------------------------------------------------------------ training


def loss_of_all_heads(group, rank, size):
    """The loss of heads on several ranks, and its gradient, as on one, to 1e-6; in float64, where
    there is no kernel."""
    draw = Draw(4, half_by_kernels(torch.float64))
    n, S, K = 2, 6, 5
    query, key = draw(2, n * size, S, 16), draw(2, 9, 16)
    index = torch.stack([torch.randperm(9)[:K] for _ in range(2 * S)]).view(2, S, K)
    scores = draw(2, S, K).to(torch.promote_types(draw.dtype, torch.float32)).requires_grad_()
    again = scores.detach().clone().requires_grad_()
    wanted, target = custom.compute_index_loss_sparse(
        query, key, scores, index, 0.3, 3, return_target=True
    )
    wanted.backward()
    mine = query[:, rank * n : (rank + 1) * n]
    got, summed = custom.compute_index_loss_sparse(
        mine, key, again, index, 0.3, 3, return_target=True, group=group
    )
    got.backward()
    for a, b in ((got, wanted), (summed, target), (again.grad, scores.grad)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------ graphs, DTensor


def steps_compile_as_one_graph(group, rank, size):
    step = Decode(rank, size, (2, 37, 128))
    _, wanted = step.whole(24)
    backend, near = (
        ("inductor", dict(rtol=2**-6, atol=2**-6))
        if on_gpu()
        else ("aot_eager", dict(rtol=0, atol=0))
    )
    for replicate in (True, False):
        call = partial(step.parts, group, 24, replicate)
        compiled = torch.compile(lambda call=call: call(), fullgraph=True, backend=backend)
        with torch.no_grad():
            assert_near(compiled(), wanted[:, :, step.heads])
    layer = layer_of(2 * size)
    local = parallel.shard_layer(copied(layer), group=group)
    uv, o = Draw(1)(2, 32, 16), Draw(2)(64, 32)

    def whole(layer: dict[str, Tensor]) -> Tensor:
        out = parallel.tensor_parallel_attention(layer, group=group, sparse_count=16)
        return parallel.all_reduce(output(out, uv, o), group)

    with torch.no_grad():
        eager = whole(copied(local))
        got = torch.compile(whole, fullgraph=True, backend=backend)(copied(local))
    torch.testing.assert_close(got, eager, **near)
    local = _sharded_v4("CSA", group, size)

    def over_the_context(layer: dict[str, Any]) -> Tensor:
        return parallel.context_parallel_attention_v4(layer, group=group)

    with torch.no_grad():
        eager = over_the_context(copied_tensors(local))
        got = torch.compile(over_the_context, fullgraph=True, backend=backend)(
            copied_tensors(local)
        )
    torch.testing.assert_close(got, eager, **near)


def _sharded_v4(kind: str, group: Any, size: int) -> dict[str, Any]:
    """With this rank's heads, groups and entries."""
    dtype, device = half_by_kernels(torch.float32), torch.get_default_device()
    layer = drawn(kind, device, dtype, heads=2 * size, groups=size)
    layer["cmp_block_table"] = parallel.shard_entry_pages(layer["cmp_block_table"], group=group)
    return parallel.shard_layer_v4(layer, group=group, weight_format="nd")


def steps_in_a_cuda_graph(group, rank, size):
    """A step of each kind, replayed with other inputs: the bits of the eager call, and twice the
    same bytes in the caches."""
    layer = parallel.shard_layer(layer_of(2 * size), group=group)
    uv, o = Draw(1)(2, 32, 16), Draw(2)(64, 32)
    step = Decode(rank, size, (2, 37, 128))

    def tensor_parallel() -> Tensor:
        out = parallel.tensor_parallel_attention(layer, group=group, sparse_count=16)
        return parallel.all_reduce(output(out, uv, o), group)

    caches = [layer[name] for name in ("kv_cache", "kr_cache", "index_k_cache")]
    v4 = _sharded_v4("CSA", group, size)
    of_v4 = [v4[name] for name in ("ori_kv", "cmp_kv", "idx_k", "cmp_state", "idx_state")]
    with torch.no_grad():
        for call, fed, written in (
            (tensor_parallel, layer["x"], caches),
            (partial(parallel.context_parallel_attention_v4, v4, group=group), v4["x"], of_v4),
            (partial(step.parts, group, 24), step.query, []),
            (partial(step.parts, group, 24, False), step.query, []),
        ):
            graph = _captured(call)
            fed.copy_(Draw(7)(*fed.shape))
            seen = []
            for _ in range(2):
                graph[0].replay()
                seen.append([graph[1].clone(), *(x.clone() for x in written)])
            for again, first, eager in zip(*seen, [call(), *written], strict=True):
                assert torch.equal(again, first) and torch.equal(first, eager)


def _captured(call: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        out = call()
    return graph, out


def a_mesh_is_a_group(group, rank, size):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    assert torch.equal(parallel.all_reduce(torch.ones(3), mesh), torch.full((3,), float(size)))
    flat = init_device_mesh(torch.get_default_device().type, (size, 1), mesh_dim_names=("tp", "cp"))
    assert parallel.shard(torch.arange(size), 0, flat["tp"]).item() == rank
    try:
        parallel.all_reduce(torch.ones(3), flat)
    except ValueError as error:
        assert "DeviceMesh of 2 dimensions, expected 1" in str(error)
    else:
        raise AssertionError("a mesh of two dimensions is no group")


def a_subgroup_has_its_own_ranks(group, rank, size):
    """Ranks are those of the group that is passed, not the world's."""
    last = dist.new_group([size - 2, size - 1])
    if rank < size - 2:
        return
    at = rank - (size - 2)
    x = torch.full((2, 4), float(at))
    assert torch.equal(
        parallel.same_selection(x.int(), group=last, broadcast=True), torch.zeros(2, 4).int()
    )
    assert parallel.shard(torch.arange(2), 0, last).item() == at


def pure_ops_take_sharded_tensors(group, rank, size):
    """DTensors in, DTensors out, cut as they came; what cannot stay cut is gathered first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from custom import sharding

    sharding.register()
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    draw = Draw(6)

    def check(op: Any, tensors: list[Tensor], cuts: list[int | None], wanted: list[Any], *rest):
        placed = [
            distribute_tensor(x, mesh, [Replicate() if c is None else Shard(c)])
            for x, c in zip(tensors, cuts, strict=True)
        ]
        out = op(*placed, *rest)
        for got, one, placement in zip(out, op(*tensors, *rest), wanted, strict=True):
            assert got.placements == (placement,), (op, got.placements)
            torch.testing.assert_close(got.full_tensor(), one, rtol=0, atol=0)

    exact = Draw(7, torch.float32)  # statistics
    outs, lses = draw(3, 2 * size, 4, 8), exact(3, 2 * size, 4)
    S0, S1 = Shard(0), Shard(1)
    check(custom.npu_merge_states, [outs, lses], [1, 1], [S0, S0])
    check(custom.npu_merge_states, [outs, lses], [None, None], [Replicate()] * 2)
    values = draw(3, 2 * size, 8)
    positions = torch.randperm(48 * size)[: 48 * size].view(3, 2 * size, 8)
    check(custom.npu_merge_topk, [values, positions], [1, 1], [S0, S0], 5)
    check(custom.npu_localize_indices, [positions], [1], [S1, S1], 0, 2)
    q, k = draw(2 * size, 2 * size, 5, 16), draw(2 * size, 2 * size, 5, 16)
    for cut in (0, 1):
        attend = partial(torch.ops.custom.npu_fused_attention, causal=True)
        check(attend, [q, k, k], [cut] * 3, [Shard(cut)] * 2)
    # heads of attention over latents that all ranks have, statistics of several shapes
    heads = ("query", "query_rope", "sinks")
    for S in (2, 3):
        given = dict(
            query=draw(2, S, 2 * size, 16),
            key=draw(2, 9, 1, 16),
            value=None,
            sparse_indices=torch.arange(4).expand(2, S, 1, 4).contiguous(),
            scale_value=0.2,
            query_rope=draw(2, S, 2 * size, 8),
            key_rope=draw(2, 9, 1, 8),
            sinks=exact(2 * size),
        )
        placed = {
            name: distribute_tensor(
                x, mesh, [Replicate() if name not in heads else Shard(0 if x.ndim == 1 else 2)]
            )
            if isinstance(x, Tensor)
            else x
            for name, x in given.items()
        }
        for stats in (False, True):
            out = custom.npu_sparse_flash_attention(**placed, return_softmax_lse=stats)
            wanted = custom.npu_sparse_flash_attention(**given, return_softmax_lse=stats)
            assert out[0].placements == (Shard(2),)
            for a, b in zip(out, wanted, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)
    # requests
    S = Shard(0)
    keys, w = draw(2 * size, 9, 1, 16), draw(2 * size, 5, 4)
    rows = draw(2 * size, 5, 4, 16)
    for value in (False, True):
        select = partial(custom.npu_lightning_indexer, sparse_count=4, return_value=value)
        check(select, [rows, keys, w], [0, 0, 0], [S, S if value else Replicate()])
    scores, index = draw(2 * size, 5, 3), torch.arange(3).expand(2 * size, 5, 3).contiguous()
    loss = torch.ops.custom.npu_indexer_loss
    check(loss, [rows.movedim(2, 1), keys[:, :, 0], scores, index], [0] * 4, [S, S], 0.3)
    # parts cut: no rule keeps them so, and the result is the same
    check(custom.npu_merge_states, [outs, lses], [3, None], [Replicate()] * 2)


def mutating_ops_refuse_sharded_tensors(group, rank, size):
    """A redistributed cache would be a copy, whose writes are lost: no such call is made, and
    local_map refuses placements other than those it was told."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    layer = layer_of(2 * size)
    R, cut = [Replicate()], [Shard(0)]
    placements = {name: cut if name in ("w_uq_qr", "w_uk") else R for name in layer}
    placed = {n: distribute_tensor(x, mesh, placements[n]) for n, x in copied(layer).items()}
    try:
        custom.npu_sparse_attention_pto(**placed, sparse_count=16)
    except Exception as error:
        assert "sharding strategy" in str(error), error
    else:
        raise AssertionError("not refused")

    def step(*tensors: Tensor) -> Tensor:
        return custom.npu_sparse_attention_pto(*tensors, sparse_count=16)

    mapped = local_map(
        step,
        out_placements=[Shard(2)],
        in_placements=tuple(placements.values()),
        redistribute_inputs=False,
        device_mesh=mesh,
    )
    whole = copied(layer)
    wanted = custom.npu_sparse_attention_pto(**whole, sparse_count=16)
    out = mapped(*placed.values())
    assert_near(out.full_tensor(), wanted)
    for cache in ("kv_cache", "kr_cache", "index_k_cache"):
        assert torch.equal(placed[cache].to_local(), whole[cache]), f"{cache}: writes are lost"
    wrong = dict(placed, kv_cache=distribute_tensor(layer["kv_cache"], mesh, cut))
    try:
        mapped(*wrong.values())
    except ValueError as error:
        assert "redistribute" in str(error), error
    else:
        raise AssertionError("another placement is not refused")


def every_mutating_op_refuses_sharded_tensors(group, rank, size):
    """Whatever its placements; and its arguments are as they were."""
    from custom.dispatch.register import overload
    from custom.dispatch.registry import SPECS
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from custom import sharding
    from tests.support.calls import mutated
    from tests.support.samples import sample

    sharding.register()
    device = torch.get_default_device()
    mesh = init_device_mesh(device.type, (size,))
    dtype = half_by_kernels(torch.float32)
    writers = [spec for spec in SPECS if mutated(spec)]
    assert len(writers) > 8
    for spec in writers:
        for placement in (Replicate(), Shard(0)):
            given = sample(spec.name, device, dtype)
            placed = {
                n: distribute_tensor(x, mesh, [placement if n in mutated(spec) else Replicate()])
                for n, x in given.items()
                if isinstance(x, Tensor)
            }
            before = {n: placed[n].to_local().clone() for n in mutated(spec) if n in placed}
            try:
                overload(spec)(**given | placed)
            except NotImplementedError as error:
                assert "sharding strategy" in str(error), (spec.name, error)
            else:
                raise AssertionError(f"{spec.name} is not refused")
            for name, local in before.items():
                assert torch.equal(
                    placed[name].to_local().view(torch.uint8), local.view(torch.uint8)
                )


def uneven_heads_are_refused(group, rank, size):
    for call in (
        lambda: parallel.shard(torch.zeros(size + 1), 0, group),
        lambda: parallel.delta_rule_heads(1, 2 * size + 1, group=group),
        lambda: parallel.zigzag(torch.zeros(1, 2 * size + 1), 1, group),
    ):
        message = said(call)
        assert message.startswith("custom.parallel: "), message
        assert f"{size}" in message, message


def gradients_are_refused(group, rank, size):
    """By every function whose collectives have no backward, on all ranks, for each tensor in turn,
    before anything is written; under no_grad they give what they give without."""
    draw = Draw(size, half_by_kernels(torch.float32))
    step = Decode(rank, size, (2, 37, 128))
    own = step.heads
    kv, kr, _ = step.shards
    B, T, heads, Dk, Dv = 1, 40, 2, 16, 8
    slots = torch.arange(2 * size)[None]
    table = torch.arange(2, dtype=torch.int32)[None]
    rows = {name: draw(B, 2, D) for name, D in (("kv", 32), ("kr", 16), ("index", 32))}
    caches = {name: draw(2, P, 1, x.shape[-1]) for name, x in rows.items()}
    layer = parallel.shard_layer(layer_of(2 * size), group=group)
    delta = _tokens(draw, T, heads, Dk, Dv)
    kda = [x[None] for x in _tokens(draw, T, heads, Dk, Dv)]
    kda[0], kda[1] = (x.repeat_interleave(2, 2) for x in kda[:2])
    attention = dict(
        layer=layer,
        index_block_table=layer["block_table"],
        index_cache_index=layer["cache_index"],
        sparse_count=8,
    )
    calls: dict[str, dict[str, Any]] = dict(
        tensor_parallel_attention=dict(layer=layer, sparse_count=8, broadcast=True),
        context_parallel_attention=attention,
        context_parallel_decode=dict(
            query=step.query[:, :, own].contiguous(),
            query_rope=step.rope[:, :, own].contiguous(),
            query_index=step.index,
            weights=step.weights,
            kv_cache=kv,
            kr_cache=kr,
            index_k_cache=step.keys,
            block_table=step.own_table,
            act_seqs=step.act,
            softmax_scale=0.2,
            index_block_table=step.table,
            sparse_count=8,
            sinks=draw(2).float(),
        ),
        context_parallel_prefill=dict(
            query=draw(B, 2, 2, 32),
            query_rope=draw(B, 2, 2, 16),
            query_index=draw(B, 2, 4, 32),
            weights=draw(B, 2, 4),
            rows=rows,
            caches=caches,
            cache_index=slots,
            block_table=table,
            act_seqs=torch.tensor([2 * size], dtype=torch.int32),
            softmax_scale=0.2,
            sparse_count=8,
        ),
        context_parallel_delta_rule=dict(
            zip(("query", "key", "value", "beta", "g"), delta, strict=True),
            initial_state=draw(1, 2 * heads, Dv, Dk),
            actual_seq_lengths=torch.tensor([T]),
        ),
        context_parallel_kda=dict(
            q=kda[0],
            k=kda[1],
            v=kda[2],
            g=-draw(B, T, 2 * heads, Dk).abs(),
            beta=kda[3],
            initial_state=draw(1, 2 * heads, Dv, Dk),
            scale=0.3,
        ),
    )
    for name, given in calls.items():
        call = partial(getattr(parallel, name), group=group)
        wanted = call(**given)
        for argument, x in _tensors(given):
            before = {key: y.detach().clone() for key, y in _tensors(given)}
            x.requires_grad_()
            said = f"{name}: `{argument}` requires grad, and this has no backward. Call it under "
            _refuses(partial(call, **given), said, RuntimeError)
            for key, y in _tensors(given):
                same = torch.equal(y.detach().nan_to_num(7), before[key].nan_to_num(7))
                assert same, (name, argument, key)
            with torch.no_grad():
                got = call(**given)
            x.requires_grad_(False)
            for a, b in zip(
                *(y if isinstance(y, tuple) else (y,) for y in (got, wanted)), strict=True
            ):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def _tensors(given: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Those that may require grad, by the names that errors give them."""
    found: dict[str, Any] = {}
    for name, x in given.items():
        if name == "layer":
            found |= x
        elif isinstance(x, dict):
            found |= {f"{name}[{key!r}]": y for key, y in x.items()}
        else:
            found[name] = x
    return [(n, x) for n, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()]


def a_prolog_that_wants_a_gradient_is_refused(group, rank, size):
    """Where `context_parallel_decode` is given a function for the index queries."""
    step = Decode(rank, size, (2, 37))
    kv, kr, _ = step.shards
    _refuses(
        lambda: parallel.context_parallel_decode(
            step.query[:, :, step.heads],
            step.rope[:, :, step.heads],
            lambda: (step.index.requires_grad_(), step.weights),
            None,
            kv,
            kr,
            step.keys,
            step.own_table,
            step.act,
            group=group,
            softmax_scale=0.2,
            index_block_table=step.table,
        ),
        "context_parallel_decode: `query_index` requires grad, ",
        RuntimeError,
    )


def collectives_refuse_gradients(group, rank, size):
    x = torch.ones(size, 2, requires_grad=True)
    _refuses(lambda: parallel.all_reduce(x, group), "all_reduce: `x` requires grad", RuntimeError)
    with torch.no_grad():
        assert torch.equal(parallel.all_reduce(x, group), size * x)


def options_in_stages_are_passed_on_or_refused(group, rank, size):
    """Every argument of the op changes what comes out, or is refused; nothing is dropped."""
    layer = layer_of(2 * size)
    local = parallel.shard_layer(copied(layer), group=group)
    whole = {name: x.clone() for name, x in local.items()}
    calls = {
        "tensor_parallel_attention": partial(
            parallel.tensor_parallel_attention, group=group, check_equal=True
        ),
        "context_parallel_attention": partial(
            parallel.context_parallel_attention,
            group=group,
            index_block_table=local["block_table"],
            index_cache_index=local["cache_index"],
        ),
    }
    for name, call in calls.items():
        for option in parallel.attention._QUANTIZATION:
            message = said(partial(call, local, **{option: "x"}), NotImplementedError)
            assert message.startswith(f"{name}: `{option}` is given")
        assert "no argument `nonsense`" in said(partial(call, local, nonsense=3), TypeError)
        less = {option: x for option, x in local.items() if option != "w_uk"}
        assert f"{name}: `w_uk` is missing" in said(partial(call, less), TypeError)
        for x, before in zip(local.values(), whole.values(), strict=True):
            assert torch.equal(x, before)
    passed = set(parallel.attention._NAMES) - set(parallel.attention._QUANTIZATION)
    read = parallel.tensor_parallel_attention.__code__.co_names
    for stage in (
        parallel.attention._latent_prolog,
        parallel.attention._index_prolog,
        parallel.attention._scale,
    ):
        read += stage.__code__.co_names
    assert passed <= set(read), passed - set(read)


def scales_follow_their_columns(group, rank, size):
    layer = {"w_uk": torch.zeros(2 * size, 16, 32)}
    for columns, scales in ((192 * size, 192 * size), (256 * size, 2 * size)):
        w, scale = torch.zeros(32, columns), torch.rand(1, scales)
        given = layer | {"w_uq_qr": w, "dequant_scale_w_uq_qr": scale}
        mine = parallel.shard_layer(given, group=group, weight_format="nd")
        part = scales // size
        wanted = scale[:, rank * part : (rank + 1) * part]
        assert torch.equal(mine["dequant_scale_w_uq_qr"], wanted)
        given["w_uq_qr"] = w.t().contiguous()
        mine = parallel.shard_layer(given, group=group, weight_format="linear")
        assert torch.equal(mine["dequant_scale_w_uq_qr"], wanted)
    given["w_uq_qr"] = torch.zeros(32, 192 * size)
    given["dequant_scale_w_uq_qr"] = torch.rand(1, -(-192 * size // 128))
    message = said(lambda: parallel.shard_layer(given, group=group, weight_format="nd"))
    assert "192 columns a rank, expected whole blocks" in message
