# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The grouped output projection, against Transformers' DeepseekV4 and a loop over numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import custom

from ...support import quantization
from ...support.accuracy import assert_close_to_float64, skip_unless_taken
from ...support.calls import CPU, runs_once
from ...support.deepseek_v4 import Attention, pairs
from ...support.prologs import FORMS
from ...support.samples import sample

OP = "npu_grouped_o_proj_pto"
F64 = torch.float64
pytestmark = pytest.mark.usefixtures("processors_of_a_gpu")


def draw(
    dtype: torch.dtype,
    B: int = 2,
    S: int = 3,
    N: int = 6,
    D: int = 32,
    G: int = 2,
    Ro: int = 16,
    H: int = 48,
    Dr: int = 8,
) -> dict[str, Tensor]:
    """Numbers of `dtype`, in float64."""
    deep = N // G * D
    drawn = dict(
        attn_out=torch.randn(B, S, N, D, dtype=F64),
        w_o_a=torch.randn(G, deep, Ro, dtype=F64) * deep**-0.5,
        w_o_b=torch.randn(G * Ro, H, dtype=F64) * (G * Ro) ** -0.5,
        rope_sin=pairs(torch.randn(B, S, Dr // 2, dtype=F64)),
        rope_cos=pairs(torch.randn(B, S, Dr // 2, dtype=F64)),
    )
    return {name: x.to(dtype).double() for name, x in drawn.items()}


def expected(x: dict[str, Tensor], dtype: torch.dtype, kind: str | None = None) -> Tensor:
    """Rounded to `dtype` where the op rounds; `kind`: of the weights of 8 bits that are met."""

    def rnd(u: Tensor) -> Tensor:
        return u.to(dtype).double()

    def eight(u: Tensor) -> Tensor:
        if kind is None or not u.numel():
            return u
        made = quantization.activations(u.flatten(0, -2), kind)
        return quantization.stands_for(*made).view(u.shape)

    heads, rotary = x["attn_out"].clone(), x["rope_sin"].shape[-1]
    first, groups = heads.shape[-1] - rotary, len(x["w_o_a"])
    for pair in range(rotary // 2):
        a, b = (x["attn_out"][..., first + 2 * pair + i] for i in (0, 1))
        c, s = (x[name][:, :, None, 2 * pair] for name in ("rope_cos", "rope_sin"))
        heads[..., first + 2 * pair] = a * c + b * s
        heads[..., first + 2 * pair + 1] = b * c - a * s
    heads = rnd(heads).unflatten(2, (groups, -1)).flatten(3)
    ranks = [rnd(eight(heads[:, :, g]) @ x["w_o_a"][g]) for g in range(groups)]
    return rnd(eight(torch.cat(ranks, -1)) @ x["w_o_b"])


def check(
    x: dict[str, Tensor], dtype: torch.dtype, device: Any, backend: str, form: str, mode: int = 0
) -> None:
    """`mode`: `weight_quant_mode`; the weights become what those of 8 bits stand for."""
    skip_unless_taken(dtype, device, backend)
    given: dict[str, Any] = {name: v.to(device, dtype) for name, v in x.items()}
    make, weight_format = FORMS[form]
    kind = {2: "int8", 4: "fp8"}.get(mode)
    if kind is not None:
        made = [quantization.weight(w, kind) for w in (*x["w_o_a"], x["w_o_b"])]
        *x["w_o_a"], x["w_o_b"] = (quantization.dequantized(*each) for each in made)
        x["w_o_a"] = torch.stack([*x["w_o_a"]])
        (*values, given["w_o_b"]), (*scales, last) = (
            [each.to(device) for each in of] for of in zip(*made, strict=True)
        )
        given |= dict(
            w_o_a=values, dequant_scale_w_o_a=torch.stack(scales), dequant_scale_w_o_b=last
        )
    given["w_o_b"] = make(given["w_o_b"])
    each = [make(w) for w in given["w_o_a"]]
    given["w_o_a"] = torch.stack(each) if each else given["w_o_a"]
    with runs_once(OP, backend):
        got = getattr(custom, OP)(**given, weight_format=weight_format, weight_quant_mode=mode)
    assert_close_to_float64("out", got, expected(x, dtype, kind), expected(x, F64))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_formula(form, dtype, device, backend):
    check(draw(dtype), dtype, device, backend, form)


@pytest.mark.parametrize("kind", [0, 1], ids=["sliding", "csa"])
def test_equals_transformers_in_float64(kind):
    """Its own layer behind an attention that gives drawn heads."""
    layer = Attention(kind)
    a, size = layer.module, layer.config
    positions = torch.arange(70, 75).expand(2, -1)
    heads = torch.randn(2, 5, size.num_attention_heads, size.head_dim, dtype=F64)
    x = torch.randn(2, 5, size.hidden_size, dtype=F64)
    theirs = layer.run(x, positions, lambda q: heads).out
    cos, sin = (pairs(u) for u in layer.angles(positions)["compress" if kind else "main"])
    w_o_a = a.o_a_proj.weight.detach().unflatten(0, (size.o_groups, -1)).transpose(1, 2)
    got = getattr(custom, OP)(
        heads,
        w_o_a.contiguous(),
        a.o_b_proj.weight.detach().T.contiguous(),
        sin,
        cos,
        weight_format="nd",
    )
    assert (got - theirs).abs().max() < 1e-12


def test_equals_a_loop_over_numbers():
    x = draw(F64, B=1, S=1, N=2, D=4, G=2, Ro=3, H=5, Dr=2)
    got = getattr(custom, OP)(**x, weight_format="nd")[0, 0]
    c, s = (float(x[name][0, 0, 0]) for name in ("rope_cos", "rope_sin"))
    ranks = []
    for group, head in enumerate(x["attn_out"][0, 0].tolist()):
        turned = [*head[:2], head[2] * c + head[3] * s, head[3] * c - head[2] * s]
        ranks += [
            sum(turned[d] * float(x["w_o_a"][group, d, r]) for d in range(4)) for r in range(3)
        ]
    for column in range(5):
        want = sum(ranks[r] * float(x["w_o_b"][r, column]) for r in range(6))
        assert abs(float(got[column]) - want) < 1e-12


# a group's K and its columns: below a block of 128, of one, and beyond, whole and not
QUANTIZED_SIZES = [
    dict(),
    dict(N=8, D=32, Ro=128, H=160),
    dict(N=10, D=64, G=2, Ro=160, H=128, S=9),
]


@pytest.mark.parametrize("mode", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights(form, mode, device, backend):
    x = draw(torch.float16, N=6, D=96, G=3, Ro=32, H=288)
    check(x, torch.float16, device, backend, form, mode)


@pytest.mark.parametrize("mode", [2, 4])
@pytest.mark.parametrize("sizes", QUANTIZED_SIZES, ids=["small", "a block", "ragged"])
def test_quantized_weights_of_other_sizes(sizes, mode, device, backend):
    check(draw(torch.float16, **sizes), torch.float16, device, backend, "linear", mode)


@pytest.mark.parametrize("mode", [1, 2, 4])
def test_quantized_weights_and_no_tokens(mode, device, backend):
    check(draw(torch.float16, B=0), torch.float16, device, backend, "row-major", mode)


def test_each_group_has_the_scale_of_its_own_tokens(device, backend):
    """Tokens of one group far smaller than those of another keep their digits."""
    x = draw(torch.float16, N=4, D=32, G=2, Ro=32)
    x["attn_out"][:, :, :2] *= 2.0**-9
    x["attn_out"] = x["attn_out"].half().double()
    x["w_o_b"][32:] = 0  # what is small alone
    for mode in (2, 4):
        check(dict(x), torch.float16, device, backend, "row-major", mode)


@pytest.mark.parametrize(
    ("heads", "groups"), [(8, 1), (16, 2), (20, 4), (32, 4), (64, 8), (128, 16)], ids=str
)
def test_heads_of_a_shard(heads, groups, device, backend):
    x = draw(torch.float16, N=heads, G=groups)
    check(x, torch.float16, device, backend, "4-D NZ")


def test_shards_add_up(device):
    """Groups over two ranks: the sum of their parts is the whole, up to one rounding of each."""
    x = draw(torch.float16, N=8, G=4)
    given = {name: v.to(device, torch.float16) for name, v in x.items()}
    parts = []
    for rank in range(2):
        of = given | dict(
            attn_out=given["attn_out"].chunk(2, 2)[rank].contiguous(),
            w_o_a=given["w_o_a"].chunk(2)[rank].contiguous(),
            w_o_b=given["w_o_b"].chunk(2)[rank].contiguous(),
        )
        parts.append(getattr(custom, OP)(**of, weight_format="nd").float())
    whole = getattr(custom, OP)(**given, weight_format="nd").float()
    most = max(float(part.abs().max()) for part in (*parts, whole))
    assert (parts[0] + parts[1] - whole).abs().max() <= 3 * 2.0**-11 * most


@pytest.mark.parametrize(
    "sizes",
    [
        dict(B=1, S=1),
        dict(B=1, S=70),
        dict(B=0),
        dict(S=0),
        dict(N=1, G=1, D=40, Ro=5, H=3, Dr=40),
        dict(D=200, Ro=70, H=130, Dr=64, N=2, G=2),
        dict(Dr=0),
        dict(B=1, S=300, N=2, D=64),
    ],
    ids=str,
)
def test_sizes_that_divide_nothing(sizes, device, backend):
    x = draw(torch.float16, **sizes)
    check(x, torch.float16, device, backend, "row-major")


# heads of which a product takes 64 dims from the kernel ahead: every tile of few tokens, groups of
# more and of less columns than a tile has, one group alone
SPLIT_SIZES = [
    dict(B=1, S=3, D=128, Ro=32),
    dict(B=1, S=20, N=2, D=192, G=1, Ro=48),
    dict(B=2, S=30, N=4, D=64, Ro=80),
    dict(B=1, S=100, N=4, D=128, G=4, Ro=64),
    dict(B=1, S=140, N=2, D=128, Ro=16),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SPLIT_SIZES, ids=str)
def test_dims_that_are_turned_ahead(sizes, form, device, backend):
    check(draw(torch.float16, Dr=64, **sizes), torch.float16, device, backend, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(S=2000, N=8, D=128, G=8, Ro=256, H=2000),
        dict(S=600, N=64, G=32, Ro=256, H=64),
        dict(S=257, N=64, G=64, Ro=256, H=48),
    ],
    ids=str,
)
def test_prompts(sizes, form, device, backend):
    """Tiles for all multiprocessors: of groups and of heads, whole and cut off at both ends."""
    if device.type == "cpu":
        pytest.skip("seconds on a GPU, minutes on a CPU")
    x = draw(torch.bfloat16, B=1, Dr=64, **dict(D=64) | sizes)
    check(x, torch.bfloat16, device, backend, form)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(S=2000, N=16, D=128, G=8, Ro=256, H=2000),
        dict(S=600, N=64, G=32, Ro=256, H=256),
        dict(S=257, N=64, D=48, G=64, Ro=128, H=8320),
        dict(S=300, N=32, D=80, G=32, Ro=384, H=4104),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_prompts(sizes, dtype, device, backend):
    """As the last one, in fp8: the first product quantizes what the second one takes."""
    if device.type == "cpu":
        pytest.skip("seconds on a GPU, minutes on a CPU")
    x = draw(dtype, B=1, Dr=16, **dict(D=64) | sizes)
    check(x, dtype, device, backend, "linear", 4)


@pytest.mark.parametrize("sizes", SPLIT_SIZES[:3], ids=str)
def test_fp8_that_is_quantized_ahead(sizes, device, backend):
    """Blocks of 128 that are parts of heads, and of the groups' columns."""
    sizes = sizes | dict(D=128, Ro=128)
    check(draw(torch.float16, Dr=64, **sizes), torch.float16, device, backend, "linear", 4)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(weight_quant_mode=5), ValueError, r"`weight_quant_mode` is 5 \(hif8"),
        (dict(weight_quant_mode=2), TypeError, "`w_o_a` is float32, expected int8 in weight_quant"),
        (dict(dequant_scale_w_o_b=torch.ones(1, 48)), ValueError, "`dequant_scale_w_o_b` is given"),
        (
            dict(w_o_a=torch.zeros(3, 64, 16)),
            ValueError,
            "`w_o_a` has 3 groups, expected a divisor",
        ),
        (dict(w_o_a=torch.zeros(0, 64, 16)), ValueError, "`w_o_a` has 0 groups"),
        (dict(w_o_a=torch.zeros(64, 16)), ValueError, r"`w_o_a` has shape \[64, 16\]"),
        (dict(w_o_a=torch.zeros(2, 60, 16)), ValueError, r"`w_o_a` has shape \[2, 60, 16\]"),
        (dict(w_o_b=torch.zeros(48, 64)), ValueError, r"`w_o_b` has shape \[48, 64\]"),
        (dict(rope_sin=torch.zeros(2, 2, 8)), ValueError, "`rope_cos` has shape"),
        (dict(attn_out=torch.zeros(2, 2, 4, 32).half()), TypeError, "has dtype"),
    ],
    ids=str,
)
def test_errors(change, error, sentence):
    with pytest.raises(error, match=f"^{OP}: .*{sentence}"):
        getattr(custom, OP)(**sample(OP, CPU, torch.float32) | change)
