# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Attention whose heaviest keys hold most of the probability: kernels round the weights to bfloat16
for the product with the values, and what that adds to the error is bounded here.

A weight that is not 1 is off by up to 2**-9 of itself.  Relative to the true maximum the heaviest
is 1, and the error stays that of the output's own rounding, 1.7e-3, and a little.
"""

from __future__ import annotations

import pytest
import torch

from ...support.ragged import run

RELATIVE, LARGEST = 1.9e-3, 9e-3


def near(got, exact, relative=RELATIVE, largest=LARGEST):
    error = got.double() - exact
    assert float(error.norm() / exact.norm()) <= relative
    assert float(error.abs().max()) <= largest


def sparse(device, rows, heads):
    """Latents of DeepSeek-V3.2, 2048 keys a row, softmax of scores that spread by 3.2."""
    torch.manual_seed(0)
    count = 2048
    made = [(rows, 1, heads, 512), (rows, 1, heads, 64), (1, 4096, 1, 512), (1, 4096, 1, 64)]
    q, q_rope, key, key_rope = (torch.randn(x, device=device).bfloat16() for x in made)
    index = torch.stack([torch.randperm(4096, device=device)[:count] for _ in range(rows)])
    return q, q_rope, key, key_rope, index.to(torch.int32)


def exact_sparse(q, q_rope, key, key_rope, index, scale):
    out = []
    for row in range(q.shape[0]):
        k, k_rope = (
            key[0, index[row].long(), 0].double(),
            key_rope[0, index[row].long(), 0].double(),
        )
        s = (q[row, 0].double() @ k.T + q_rope[row, 0].double() @ k_rope.T) * scale
        out.append(s.softmax(-1) @ k)
    return torch.stack(out)[:, None]


def arguments(q, q_rope, key, key_rope, index):
    """One request, whose query tokens they all are."""
    return dict(
        query=q.transpose(0, 1),
        query_rope=q_rope.transpose(0, 1),
        key=key,
        key_rope=key_rope,
        sparse_indices=index[None, :, None],
        scale_value=0.13523,
        sparse_mode=0,
        attention_mode=2,
    )


@pytest.mark.parametrize("rows, heads", [(1, 128), (12, 128), (24, 16)])
def test_sparse_attention(device, backend, rows, heads):
    if backend != "reference" and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 product is wrong")
    every = sparse(device, rows, heads)
    out = run("npu_sparse_flash_attention", backend, value=None, **arguments(*every))[0]
    near(out.transpose(0, 1), exact_sparse(*every, 0.13523))


@pytest.mark.parametrize("size, v_size", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_attention(device, backend, size, v_size):
    """Scores that spread by 4; the keys that weigh most come in any block."""
    if backend != "reference" and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 product is wrong")
    torch.manual_seed(0)
    tokens = 4096 if device.type == "cuda" else 512
    widths = (size, size, v_size)
    q, k, v = (torch.randn(1, 2, tokens, width, device=device).bfloat16() for width in widths)
    q, k = 2 * q, 2 * k
    scores = q.double() @ k.double().mT * size**-0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
    exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()
    out = run("npu_fused_attention", backend, q=q, k=k, v=v, causal=True)[0]
    # the largest is half a unit of an output between 4 and 8
    near(out, exact, largest=2**-6)
