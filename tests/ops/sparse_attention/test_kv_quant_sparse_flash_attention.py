# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention over rows of 8 bits: bit for bit the op on the cache that they stand for, and, from
the bytes on, a solution of this file's own in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import custom

from ...support import interpreted
from ...support.calls import refused, runs_once
from ...support.kernels import INTERPRETED, ON_GPU
from ...support.ragged import limits, moved

OP = "npu_kv_quant_sparse_flash_attention"
NUMPY = {"nope_scale_rope": (528, 512), "nope_rope_scale": (512, 640)}
# Triton's interpreter cuts floats off where it makes bf16 of them
HALF = torch.float16 if INTERPRETED else torch.bfloat16
HOSTILE = 0x7F  # a byte of a cache that nobody wrote: NaN as e4m3, and in what it makes of floats
# (query tokens, keys) of each request
RAGGED = [(3, 40), (1, 5), (2, 0), (4, 2), (0, 9), (2, 33)]


class Problem:
    """Ragged requests over rows in pages that lie apart, in random order."""

    def __init__(
        self,
        kind="fp8",
        row_layout="nope_scale_rope",
        heads=5,
        count=12,
        page=16,
        between=656,
        scale_format="ue8m0",
        block=1,
        requests=RAGGED,
        dtype=HALF,
        rotary=64,
    ):
        self.row_layout, self.block, self.dtype, self.rotary = row_layout, block, dtype, rotary
        width = 528 + 2 * rotary
        self.rows, self.keys = zip(*requests, strict=True)
        total, tokens = sum(self.keys), sum(self.rows)
        pages = [-(-n // page) for n in self.keys]
        step = page * width + between
        cache = torch.full(((sum(pages) + 2) * step,), HOSTILE, dtype=torch.uint8)
        cache = cache.as_strided((sum(pages) + 2, page, 1, width), (step, width, width, 1))
        order = torch.randperm(len(cache)).tolist()
        self.table = torch.full((len(pages), max(pages) + 1), -1, dtype=torch.int32)
        slots = []
        for request, n in enumerate(self.keys):
            for i in range(pages[request]):
                self.table[request, i] = order[-1]
                slots += [order[-1] * page + j for j in range(min(page, n - i * page))]
                order.pop()
        self.slots = torch.tensor(slots)
        custom.npu_latent_cache_write(
            torch.randn(total, 512) * torch.exp2(torch.randint(-3, 3, (total, 1))),
            torch.randn(total, rotary).to(dtype),
            cache,
            self.slots,
            kind=kind,
            row_layout=row_layout,
            scale_format=scale_format,
            rope_head_dim=rotary,
        )
        self.cache = cache if kind == "fp8" else cache.view(torch.int8)
        self.values = torch.float8_e4m3fn if kind == "fp8" else torch.int8
        self.query = torch.randn(tokens, heads, 512 + rotary).to(dtype)
        most = max(self.keys) // block + 3
        self.indices = torch.stack([torch.randperm(most)[:count] for _ in range(tokens)])
        self.indices[0] = -1  # a row without keys, beside those of a request without any
        self.indices[1, ::2] = -1
        self.indices[-1, 0] = 10**6
        self.indices[-1, 2] = self.indices[-1, 1]  # counts twice

    def arguments(self, device, **more) -> dict:
        cache = moved(self.cache, device)
        number = self.values if cache.dtype is torch.uint8 else None
        return (
            dict(
                query=self.query.to(device),
                key=cache,
                value=cache,
                sparse_indices=self.indices[:, None].to(torch.int32).to(device),
                scale_value=0.06,
                key_quant_mode=2,
                value_quant_mode=2,
                attention_mode=2,
                block_table=self.table.to(device),
                actual_seq_lengths_query=prefix(self.rows, device),
                actual_seq_lengths_kv=torch.tensor(self.keys, dtype=torch.int32, device=device),
                sparse_block_size=self.block,
                layout_query="TND",
                layout_kv="PA_BSND",
                key_dtype=number,
                value_dtype=number,
                rope_head_dim=self.rotary,
                row_layout=self.row_layout,
            )
            | more
        )

    def dequantized(self, given: dict) -> dict:
        """The arguments of npu_sparse_flash_attention on the cache that the rows stand for."""
        nope, rope, scale = custom.row_views(given["key"], self.row_layout)
        wide = nope.view(self.values).float() * scale.repeat_interleave(128, -1)
        kept = (
            "sparse_indices", "scale_value", "block_table", "actual_seq_lengths_query",
            "actual_seq_lengths_kv", "sparse_block_size", "layout_query", "layout_kv",
            "sparse_mode", "sinks",
        )  # fmt: skip
        return {name: given[name] for name in kept if name in given} | dict(
            query=given["query"][..., :512],
            query_rope=given["query"][..., 512:],
            key=wide.to(self.dtype),
            value=None,
            key_rope=rope.view(self.dtype).contiguous(),
            return_softmax_lse=True,
        )

    def solved(self, sparse_mode=3, sinks=None) -> list[tuple[np.ndarray, ...]]:
        """(out [N, 512], max, sum) of every token, from the bytes, in float64."""
        at_rope, at_scale = NUMPY[self.row_layout] if self.rotary else (512, 512)
        page = self.cache.shape[1]
        out, t, first = [], 0, 0
        for rows, keys in zip(self.rows, self.keys, strict=True):
            places = self.slots[first : first + keys].tolist()
            first += keys
            for limit in limits(rows, keys, sparse_mode):
                chosen = [
                    i * self.block + j
                    for i in self.indices[t].tolist()
                    for j in range(self.block)
                    if 0 <= i * self.block + j < limit
                ]
                latent, rope = [], []
                for p in chosen:
                    raw = self.cache[places[p] // page, places[p] % page, 0].contiguous()
                    raw = raw.view(torch.uint8).numpy().tobytes()
                    numbers = torch.frombuffer(bytearray(raw[:512]), dtype=self.values).float()
                    scale = np.frombuffer(raw[at_scale : at_scale + 16], np.float32)
                    product = torch.from_numpy(numbers.numpy() * np.repeat(scale, 128))
                    latent.append(product.to(self.dtype).double().numpy())
                    part = np.frombuffer(raw[at_rope : at_rope + 2 * self.rotary], np.int16)
                    part = torch.from_numpy(part.copy()).view(self.dtype)
                    rope.append(part.double().numpy())
                out.append(solve(self.query[t].double().numpy(), latent, rope, sinks))
                t += 1
        return out


def solve(query, latent, rope, sinks):
    if not latent:
        heads = len(query)
        return np.zeros((heads, 512)), np.full(heads, -np.inf), np.zeros(heads)
    k = np.concatenate([np.array(latent), np.array(rope)], 1)
    z = query @ k.T * 0.06
    top = z.max(1)
    p = np.exp(z - top[:, None])
    total = p.sum(1)
    below = total if sinks is None else total + np.exp(sinks.double().numpy() - top)
    return p @ np.array(latent) / below[:, None], top, total


def prefix(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def attended(arguments, backend) -> tuple[Tensor, Tensor, Tensor]:
    with runs_once(f"{OP}_lse", backend):
        out = custom.npu_kv_quant_sparse_flash_attention_lse(**arguments)
    assert torch.equal(out[0], custom.npu_kv_quant_sparse_flash_attention(**arguments))
    return out


def plain_kernels(monkeypatch):
    """The op on floats by the kernel that reads 8 bits too, with the same tiles."""
    if ON_GPU or INTERPRETED:
        from custom.cuda_ops.common import gpu
        from custom.cuda_ops.sparse_attention import sparse_flash_attention

        def tiles(*sizes):
            *before, _itemsize, device = sizes
            return chosen(*before, 1, device)

        chosen = sparse_flash_attention.tiles
        monkeypatch.setattr(gpu, "is_hopper", lambda device: False)
        monkeypatch.setattr(sparse_flash_attention, "tiles", tiles)


@pytest.mark.parametrize("row_layout", list(NUMPY))
@pytest.mark.parametrize(
    "kind, scale_format", [("fp8", "ue8m0"), ("fp8", "fp32"), ("int8", "ue8m0")]
)
@pytest.mark.parametrize("mode, sinks", [(3, False), (0, True)])
def test_the_bits_of_the_op_on_the_dequantized_cache(
    row_layout, kind, scale_format, mode, sinks, device, backend, monkeypatch
):
    plain_kernels(monkeypatch)
    problem = Problem(kind, row_layout, scale_format=scale_format)
    given = problem.arguments(device, sparse_mode=mode)
    given["sinks"] = torch.randn(5, device=device) if sinks else None
    got = attended(given, backend)
    wanted = custom.npu_sparse_flash_attention(**problem.dequantized(given))
    for name, x, y in zip(("out", "max", "sum"), got, wanted, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize(
    "sizes",
    [
        dict(heads=1),
        dict(heads=17, page=64, between=0),
        dict(heads=4, block=4, count=5),
        dict(heads=3, page=48, between=4),
        dict(heads=3, page=1024, between=16),
        dict(heads=128, count=32, requests=[(2, 300)]),
        dict(heads=16, count=600, requests=[(9, 700)]),
        dict(heads=64, count=600, requests=[(9, 700)]),
        dict(heads=16, count=2048, requests=[(2, 2500)]),
        dict(heads=12, rotary=0, between=528),
        dict(heads=20, rotary=0, block=4, count=6, between=4),
        dict(heads=96, rotary=0, kind="int8", count=20, requests=[(2, 90)]),
        # GLM-5.3-Flash: pools of 4, 512 and the open one
        dict(heads=64, rotary=0, block=4, count=513, requests=[(2, 2102)], page=64),
    ],
    ids=str,
)
def test_sizes(sizes, device, backend, monkeypatch):
    plain_kernels(monkeypatch)
    problem = Problem(**sizes)
    given = problem.arguments(device)
    wanted = custom.npu_sparse_flash_attention(**problem.dequantized(given))
    for x, y in zip(attended(given, backend), wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("row_layout", list(NUMPY))
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("mode, sinks, rotary", [(3, True, 64), (0, False, 64), (3, True, 0)])
def test_from_the_bytes_on(row_layout, kind, mode, sinks, rotary, device, backend):
    problem = Problem(kind, row_layout, scale_format="fp32", rotary=rotary)
    sink = torch.randn(5) if sinks else None
    given = problem.arguments(device, sparse_mode=mode)
    given["sinks"] = None if sink is None else sink.to(device)
    out, top, total = (x.cpu() for x in attended(given, backend))
    eps = torch.finfo(problem.dtype).eps
    for t, (o, m, s) in enumerate(problem.solved(mode, sink)):
        # probabilities and results are rounded, once each
        assert np.abs(out[t].double().numpy() - o).max() <= 3 * eps * max(np.abs(o).max(), 1e-30)
        assert np.allclose(top[0, t].double().numpy(), m, rtol=1e-5, atol=1e-5)
        assert np.allclose(total[0, t].double().numpy(), s, rtol=1e-4)
    assert not out.isnan().any()


@pytest.mark.parametrize("row_layout", list(NUMPY))
@pytest.mark.parametrize(
    "kind, scale_format", [("fp8", "ue8m0"), ("fp8", "fp32"), ("int8", "ue8m0")]
)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(heads=5, requests=[(3, 40), (1, 5), (2, 0), (40, 20), (0, 9), (2, 33)]),
        dict(heads=17, count=600, requests=[(41, 700)]),
        dict(heads=16, count=300, requests=[(41, 700)], dtype=torch.float16),
        dict(heads=128, count=300, requests=[(200, 900), (7, 70)]),
        dict(heads=64, count=2048, requests=[(40, 2500)], page=64),
    ],
    ids=str,
)
def test_the_bits_of_the_kernel_for_hopper(
    sizes, kind, scale_format, row_layout, device, backend, monkeypatch
):
    """Of the one for floats, which has the same consumers of keys."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU")
    from custom.cuda_ops.sparse_attention.hopper import kv_quant_sparse_flash_attention as hopper

    launched = []
    launch = hopper.launch
    monkeypatch.setattr(hopper, "launch", lambda *given: (launched.append(given), launch(*given)))
    problem = Problem(kind, row_layout, between=0, scale_format=scale_format, **sizes)
    given = problem.arguments(device, sinks=torch.randn(sizes["heads"], device=device))
    got = attended(given, backend)
    assert launched
    wanted = custom.npu_sparse_flash_attention(**problem.dequantized(given))
    for name, x, y in zip(("out", "max", "sum"), got, wanted, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("byte, keys, count", [(0x7F, 40, 12), (0xFF, 40, 12), (0x7F, 700, 600)])
def test_values_that_are_not_numbers(byte, keys, count, device, monkeypatch):
    """Whoever selects their row gets NaN, and nobody else; of many keys in parts, too."""
    if INTERPRETED:
        monkeypatch.setattr("custom.cuda_ops.common.gpu.num_sms", lambda device: 132)
    problem = Problem("fp8", requests=[(9, keys)], count=count)
    problem.indices[3:, 5] = 7
    problem.indices[2][problem.indices[2] == 7] = -1
    place = int(problem.slots[7])
    problem.cache[place // 16, place % 16, 0, 200] = byte
    out = custom.npu_kv_quant_sparse_flash_attention(**problem.arguments(device))
    nan = out.isnan().cpu()
    asked = (problem.indices == 7).any(1)[:, None]
    assert asked[3] and not asked[0] and not asked[2]
    assert torch.equal(nan.all(-1), asked.expand(9, 5))
    assert torch.equal(nan.any(-1), asked.expand(9, 5))


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_dense_rows_and_a_value_of_its_own(layout, device, backend, monkeypatch):
    plain_kernels(monkeypatch)
    problem = Problem("int8", "nope_rope_scale", 4, requests=[(3, 32)] * 2, page=32, between=0)
    given = problem.arguments(device)
    page = given["key"][problem.table[:, 0].long().to(device)].contiguous()
    shape = (2, 32, 1, 656) if layout == "BSND" else (64, 1, 656)
    tokens = (2, 3) if layout == "BSND" else (6,)
    own = page.flip(1).contiguous()
    given |= dict(
        query=given["query"].view(*tokens, 4, 576),
        sparse_indices=given["sparse_indices"].view(*tokens, 1, 12),
        key=page.view(shape),
        value=own.view(shape),
        block_table=None,
        layout_query=layout,
        layout_kv=layout,
        actual_seq_lengths_query=None if layout == "BSND" else prefix((3, 3), device),
        actual_seq_lengths_kv=None if layout == "BSND" else prefix((32, 32), device),
    )
    plain = problem.dequantized(given)
    latent = custom.row_views(given["value"], problem.row_layout)
    latent = latent[0].float() * latent[2].repeat_interleave(128, -1)
    wanted = custom.npu_sparse_flash_attention(**plain | dict(value=latent.to(problem.dtype)))
    for x, y in zip(attended(given, backend), wanted, strict=True):
        assert torch.equal(x, y)


def test_float16_queries_read_float16_rotary_keys(device, backend, monkeypatch):
    plain_kernels(monkeypatch)
    problem = Problem(dtype=torch.float16)
    given = problem.arguments(device)
    wanted = custom.npu_sparse_flash_attention(**problem.dequantized(given))
    assert torch.equal(attended(given, backend)[0], wanted[0])


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("typed", [False, True])
def test_slots_as_flash_mla_names_them(sink, typed, device):
    """Against the op by positions; lengths cut the indices off, an empty row's lse is -inf."""
    problem = Problem(requests=[(3, 40), (3, 25)], heads=6)
    problem.indices = problem.indices.clamp(max=24)
    problem.indices[2] = -1
    given = problem.arguments(device, sparse_mode=0)
    given["sinks"] = torch.randn(6, device=device) if sink else None
    first = torch.tensor([0, 0, 0, 40, 40, 40])[:, None]
    slots = problem.slots[(problem.indices.clamp(min=0) + first)].masked_fill(
        problem.indices < 0, -1
    )
    slots = slots.view(2, 3, -1).to(torch.int32)
    length = torch.tensor([7, 12], dtype=torch.int32)
    cut = torch.arange(12) < length.repeat_interleave(3)[:, None]
    given["sparse_indices"] = problem.indices.where(cut, -1)[:, None].to(torch.int32).to(device)
    want, top, total = custom.npu_kv_quant_sparse_flash_attention_lse(**given)
    rows = given["key"].view(torch.float8_e4m3fn) if typed else given["key"]
    out, lse = custom.flash_mla_sparse_fp8(
        given["query"].view(2, 3, 6, 576),
        rows,
        slots.to(device),
        0.06,
        attn_sink=given["sinks"],
        topk_length=length.to(device),
    )
    assert torch.equal(out.flatten(0, 1), want)
    assert lse.shape == (2, 6, 3)
    assert torch.equal(lse.mT.flatten(0, 1), (top + total.log())[0])
    assert (lse[0, :, 2] == -torch.inf).all() and (out[0, 2] == 0).all()
    beyond = torch.full_like(slots, len(rows) * rows.shape[1]).to(device)
    out, lse = custom.flash_mla_sparse_fp8(given["query"].view(2, 3, 6, 576), rows, beyond, 0.06)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        *refused(
            key_quant_mode=(1, 2),
            value_quant_mode=(3, 2),
            quant_scale_repo_mode=(0, 1),
            tile_size=(64, 128),
            rope_head_dim=(32, "64 or 0"),
        ),
        (dict(rope_head_dim=0), r"`query` has shape .*576\], expected .*512"),
        (dict(key_dequant_scale=torch.zeros(1)), "`key_dequant_scale` is given, expected None"),
        (dict(key_dtype=None), "`key` is uint8 and `key_dtype` is None"),
        (dict(key_dtype=290), "`key_dtype` is hif8, expected float8_e4m3fn or int8"),
        (dict(value_dtype=1), "`key` is fp8 and `value` int8, expected one kind"),
        (dict(sinks=torch.zeros(4)), r"`sinks` has shape \[4\]"),
    ],
    ids=str,
)
def test_refused(changes, message):
    problem = Problem()
    given = problem.arguments(torch.device("cpu"))
    with pytest.raises((ValueError, TypeError), match=message):
        custom.npu_kv_quant_sparse_flash_attention(**given | changes)


def test_rows_that_are_no_656_bytes():
    """584 bytes of V4 and 352 of nvfp4 are other caches."""
    given = Problem().arguments(torch.device("cpu"))
    for size in (584, 352):
        cache = torch.zeros(4, 16, 1, size, dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"`key` has shape .*{size}\], expected"):
            custom.npu_kv_quant_sparse_flash_attention(**given | dict(key=cache, value=cache))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_under_the_interpreter():
    """The kernels on CPU tensors, on a machine without a GPU."""
    chosen = "False-fp8-ue8m0 or False-int8-ue8m0-nope_rope or 48 or own or slots or True-int8"
    chosen += " or True-64-int8 or True-0-fp8-nope_scale or 528"
    interpreted.passes(chosen, __file__)
