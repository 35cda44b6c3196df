# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The indexer loss's CUDA kernels: those for Hopper and the plain one in float64, their memory.
(test_cuda_delta_rule.py runs the plain ones under the interpreter.)"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from custom.dispatch.reference.indexer import indexer_loss as reference
from torch import Tensor

import custom

from ...support.kernels import gpu, hopper

# heads and their size
WIDE = [(128, 576), (65, 320), (96, 576), (64, 576), (16, 576), (3, 320)]
NARROW = [(64, 128), (100, 128), (33, 64), (5, 64), (40, 256)]


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "sizes,split",
    [*product(WIDE, (False, True)), *product(NARROW, (False,))],
    ids=lambda x: {False: "joined", True: "rope apart"}.get(x, str(x)),
)
def test_both_kernels_equal_float64(sizes, split, dtype, monkeypatch):
    """As near as test_indexer_loss.py asks of smaller cases; with log-sum-exps given too."""
    from custom.cuda_ops.common import gpu
    from custom.cuda_ops.indexer import indexer_loss

    (heads, size), (B, S, S2, K) = sizes, (2, 37, 150, 130)
    query = torch.randn(B, heads, S, size).to(dtype).cuda()
    key = torch.randn(B, S2, size).to(dtype).cuda()
    score = torch.randn(B, S, K).to(dtype).cuda()
    index = torch.randint(-2, S2 + 2, (B, S, K), device="cuda")
    index[0, 3], index[1, 4, :70], index[1, 5, 64:] = -1, -1, -1
    cut = size - 64 if split else size
    rope = (query[..., cut:], key[..., cut:]) if split else (None, None)

    options = dict(scaling=size**-0.5, chunk_offset=S2 - S, eps=1e-10)

    def run(lse: Tensor | None) -> tuple[Tensor, Tensor]:
        return indexer_loss.forward(
            query=query[..., :cut],
            key=key[..., :cut],
            index_score=score,
            indices=index,
            **options,
            query_rope=rope[0],
            key_rope=rope[1],
            softmax_lse=lse,
        )

    wide = [x.double() for x in (query, key, score)]
    exact = reference.forward(
        **dict(zip(("query", "key", "index_score"), wide, strict=True)),
        indices=index,
        **options,
        query_rope=None,
        key_rope=None,
        softmax_lse=None,
    )
    rows = torch.arange(S, device="cuda")[:, None] + S2 - S
    valid = (index >= 0) & (index <= rows) & (index < S2)
    every = (wide[0] @ wide[1][:, None].mT) * size**-0.5
    at = index.clamp(0, S2 - 1)[:, None].expand(-1, heads, -1, -1)
    lse = every.gather(-1, at).masked_fill(~valid[:, None], -torch.inf).logsumexp(-1).float()

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(gpu, "is_hopper", lambda device: False)
        plain = [run(None), run(lse)]
    ours = [run(None), run(lse)]
    for one, same in zip(ours, [run(None), run(lse)], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, same, strict=True))
    for got in (*plain, *ours):
        for one, want in zip(got, exact, strict=True):
            torch.testing.assert_close(one.double(), want, rtol=1e-4, atol=2e-6)


@gpu
@pytest.mark.parametrize("N,D", [(16, 128), (64, 128), (64, 576), (128, 576)])
@pytest.mark.parametrize("lse", [False, True], ids=["", "lse given"])
def test_memory_of_the_indexer_loss(N, D, lse):
    """Forward and backward keep B S K numbers: no [N, S, K] logits, no gathered keys."""
    S, K = 512, 512
    query = torch.randn(1, N, S, D, device="cuda").bfloat16()
    key = torch.randn(1, S, D, device="cuda").bfloat16()
    score = torch.randn(1, S, K, device="cuda").bfloat16().requires_grad_()
    index = torch.arange(K, device="cuda", dtype=torch.int32).expand(1, S, K).contiguous()
    sums = torch.randn(1, N, S, device="cuda") if lse else None

    def extra(*, backward: bool) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = custom.compute_index_loss_sparse(query, key, score, index, 0.1, softmax_lse=sums)
        if backward:
            loss.backward()
            score.grad = None
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    extra(backward=True)  # compile
    numbers = S * K  # the target, and for Hopper's kernel the slots; then the gradient
    assert extra(backward=False) <= 2.1 * 4 * numbers
    assert extra(backward=True) <= 3.1 * 4 * numbers
