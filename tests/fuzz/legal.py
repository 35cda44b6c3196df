# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A legal call in disguise: as near to float64 as the plain call by the reference is."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import torch
from custom.dispatch import backends
from custom.dispatch.env import by_reference, config
from custom.dispatch.errors import NotSupported
from custom.dispatch.reference.common import delta_rules, selection
from custom.dispatch.reference.deepseek_v4 import sparse_attn_sharedkv_grad as gradients
from custom.dispatch.reference.delta_rule.chunk_kda import gate
from custom.dispatch.register import bind, overload
from custom.dispatch.registry import BY_NAME
from torch import Tensor

import custom

from ..support import layer_v4
from ..support.accuracy import assert_close_to_float64
from ..support.calls import mutated
from .build import Arguments, Garbage, build, in_one
from .draw import KIND, Case

Outputs = dict[str, Tensor]
# tables, where -1 is one way among others to say that nothing is there
_WITH_ABSENT = (
    "block_table", "sparse_indices", "indices", "cache_index", "ori_block_table",
    "cmp_block_table", "cmp_sparse_indices", "state_block_table", "select_idx",
)  # fmt: skip


def outputs(op: str, arguments: Arguments, garbage: Garbage) -> Outputs:
    """What a call returns and what it has written; the arguments are its own."""
    return _named(op, getattr(torch.ops.custom, op)(**arguments), arguments, garbage)


def _of_reference(op: str, arguments: Arguments, garbage: Garbage) -> Outputs:
    """The same of the reference's own function: the call under test has been checked."""
    spec = BY_NAME[op]
    found = backends.launcher(backends.REFERENCE, spec)
    assert found is not None
    given = bind(overload(spec)._schema, (), arguments)
    return _named(op, found.function(**given), arguments, garbage)


def _named(op: str, out: Any, arguments: Arguments, garbage: Garbage) -> Outputs:
    out = (out,) if isinstance(out, Tensor) else out or ()
    for x in out:
        if x.numel() == 0:
            continue  # it begins and steps nowhere
        assert x.is_contiguous() and x.storage_offset() == 0, f"strides {x.stride()} of an output"
    named = {f"output {number}": x for number, x in enumerate(out)}
    for name in mutated(BY_NAME[op]):
        if arguments.get(name) is not None:
            x = arguments[name].detach().cpu()
            named[name] = x.masked_fill(garbage[name], 0) if name in garbage else x
    return named


def each_tensor(arguments: Arguments, change: Callable[[str, Tensor], Tensor]) -> Arguments:
    return {n: change(n, x) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def _wider(name: str, x: Tensor) -> Tensor:
    return x.long() if x.dtype is torch.int32 else x


def _wild(x: Tensor, r: Random) -> Tensor:
    wild = [-1, -2, -(2**31), 2**31 - 1]
    picks = torch.tensor([r.choice(wild) for _ in range(x.numel())]).view(x.shape)
    return torch.where(x < 0, picks.to(x.dtype), x)


def _strided(x: Tensor, r: Random) -> Tensor:
    """The same numbers with other strides, among NaN; rows stay in one piece."""
    if x.ndim < 2:
        return x
    kind = r.randrange(3)
    if kind == 0 and x.ndim > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    dim = x.ndim - 1 if kind == 1 else 0
    wider = list(x.shape)
    wider[dim] = wider[dim] + 8 if kind == 1 else 2 * wider[dim]
    base = x.new_full(wider, float("nan") if x.is_floating_point() else -3)
    view = base[..., : x.shape[-1]] if kind == 1 else base[::2]
    return view.copy_(x)


def _offset(x: Tensor, r: Random) -> Tensor:
    """At an address that no allocator would give, with its strides kept."""
    steps = r.choice([1, 3, 8])
    if x.numel() == 0:
        return x
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    base = x.new_full((steps + reach,), float("nan") if x.is_floating_point() else -3)
    return base.as_strided(x.shape, x.stride(), steps).copy_(x)


def disguised(
    case: Case, arguments: Arguments, garbage: Garbage, device: torch.device
) -> Arguments:
    r = Random(case["seed"])
    chosen = case["disguises"]
    out = dict(arguments)
    if "garbage" in chosen:
        for name, where in garbage.items():
            if out[name].dtype.is_floating_point:
                out[name] = out[name].masked_fill(where, float("nan"))
    if "absent" in chosen:
        for name in (name for name in _WITH_ABSENT if name in out):
            out[name] = _wild(out[name], r)
    if "int64" in chosen:
        out = each_tensor(out, _wider)
    out = each_tensor(out, lambda _, x: x.to(device, copy=True))
    if "places" in case:  # alike where they are to share what is compiled
        r = Random(case["places"])
    for kind, change in (("strided", _strided), ("offset", _offset)):
        if kind in chosen:
            out = each_tensor(out, lambda _, x, f=change: f(x, r) if r.random() < 0.5 else x)
    return in_one(case["op"], out)


def _of_decays(q: Tensor, k: Tensor, exact: Outputs, eps: float) -> Tensor:
    """The gradient of a decay's log sums q dq - k dk over the tokens behind it; a factor of either
    product is rounded: [heads, K]."""
    terms = [x.double() * exact[f"output {n}"].double() for n, x in enumerate((q, k))]
    return eps * torch.cat([each.flatten(0, -3) for each in terms]).norm(dim=0)


def _of_roundings(
    op: str, x: Arguments, exact: Outputs, eps: float, names: Collection[str]
) -> dict[str, float]:
    """What a rounding of each number of these inputs does in float64: the most of eight draws."""
    signs = torch.Generator().manual_seed(0)

    def off(name: str, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        sign = torch.randint(2, t.shape, generator=signs) * 2 - 1
        return t.double() * (1 + eps * sign) if name in names else t.double()

    most = dict.fromkeys(exact, 0.0)
    for _ in range(8):
        came = _of_reference(op, each_tensor(x, off), {})
        for name, wanted in exact.items():
            if wanted.numel():
                most[name] = max(most[name], float((came[name] - wanted).abs().max()))
    return most


def _of_delta_gradients(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """Kernels round states, what a token adds to them (N) and its gradient (R) to the dtype."""
    names = ("value", "d_out", "initial_state", "d_final_state")
    off = _of_roundings("npu_chunk_gated_delta_rule_grad", x, exact, eps / 2, names)
    if x["g"] is not None and x["query"].numel():
        decays = _of_decays(x["query"], x["key"], exact, eps).norm(dim=-1)
        off["output 5"] = max(off["output 5"], float(decays.max()))
    return off


def _of_kda_gradients(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """Kernels keep the factors of what a token gives in the dtype: test_chunk_kda_grad.py
    derives these bounds."""
    v, beta, g = (x[name].double() for name in ("v", "beta", "g"))
    d_v, d_g = exact["output 2"].double(), exact["output 3"].double()
    of_beta = torch.ones(())
    if x["use_beta_sigmoid_in_kernel"]:
        of_beta = delta_rules.of_rate(beta, x["allow_neg_eigval"])
        beta = delta_rules.rate(beta, True, x["allow_neg_eigval"])
    R = (d_v / beta[..., None]).nan_to_num(0, 0, 0)
    by_value = (R * v).abs().sum(-1) * of_beta.nan_to_num(0)
    names = ("q", "k", "v", "d_out", "initial_state", "d_final_state")
    off = _of_roundings("npu_chunk_kda_grad", x, exact, eps / 2, names)
    out = {name: off[name] for name in ("output 0", "output 1", "output 2", "output 5")}
    out["output 4"] = eps * float(by_value.max()) if R.numel() else 0.0
    by_g = torch.ones(())
    if x["use_gate_in_kernel"]:
        _, by_g, by_A = gate(g, x["A_log"], x["dt_bias"], x["lower_bound"])
        of_A = (d_g * by_A / by_g).nan_to_num(0, 0, 0)
        # of a channel's factors some are its own, some are shared by a token's channels
        whole = torch.hypot(of_A.norm(), of_A.sum(-1).norm())
        out |= {"output 6": 2 * eps * float(whole), "output 7": 2 * eps * float(d_g.norm())}
    if g.numel():
        decays = _of_decays(x["q"], x["k"], exact, eps)
        out["output 3"] = float(by_g.abs().nan_to_num(0).max() * decays.max())
    return out


def _of_probabilities(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """A score that is summed in another order is off by a rounding of its terms' size, and the
    probability by as much of its own."""
    sides = [
        [x[f"{side}{part}"].double().abs() for side in ("query", "key")]
        for part in ("", "_rope")
        if x.get(f"query{part}") is not None
    ]
    terms = sum(torch.einsum("bnsd,btd->bnst", q, k) for q, k in sides) * x["scaling"]
    target = exact["output 1"].double().abs()
    sizes = [float(each.max()) if each.numel() else 0.0 for each in (terms, target)]
    return {"output 1": eps * sizes[0] * sizes[1]}


def _of_shared_kv_gradients(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """Kernels round P and dz to the dtype before the products that they go into: every term of
    d_q = sum of dz k, and of d_k = sum of dz q + P d_out, is off by a rounding of its own."""
    spec = BY_NAME["npu_sparse_attn_sharedkv_grad"]
    given = each_tensor(x, lambda _, t: t.double() if t.is_floating_point() else t)
    given = bind(overload(spec)._schema, (), given)
    q, do = (given[name].flatten(0, -3).square() for name in ("q", "d_out"))
    of_q, sums = torch.zeros(()), [torch.zeros(()) for _ in range(2)]
    kv = [given["ori_kv"], given["cmp_kv"]]
    terms = [None if each is None else selection.Sums(each, torch.float64) for each in kv]
    for each in gradients.blocks(**given):
        dz, p = each.dz.square(), each.p.square()
        if each.tokens.numel():
            of_q = torch.maximum(of_q, (dz @ each.k.square()).max())
        of_k = dz.mT @ q[each.tokens] + p.mT @ do[each.tokens]
        sizes = [slots.shape[1] for slots in each.slots]
        for kept, slots, part in zip(terms, each.slots, of_k.split(sizes, 1), strict=True):
            if kept is not None:
                kept.add(slots, part)
    for number, kept in enumerate(terms):
        if kept is not None and (whole := kept.rounded()).numel():
            sums[number] = whole.max()
    names = ("output 0", "output 1", "output 2")
    return {n: eps * float(most) ** 0.5 for n, most in zip(names, [of_q, *sums], strict=True)}


def _of_scores(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """Heads are summed in another order, in float32: a score is off by a rounding of its terms'
    size.  A product of int8 is exact, of fp8 a sum itself."""
    q, k = (x[name].double().flatten(0, -3) for name in ("query", "key"))
    fp8 = x["query"].dtype is torch.float8_e4m3fn
    dots = torch.einsum("tnd,pd->tnp", *((y.abs() if fp8 else y) for y in (q, k[:, 0]))).relu()
    by = (x["weights"].double() * x["query_dequant_scale"].double()).abs().flatten(0, -2)
    terms = torch.einsum("tnp,tn->tp", dots, by) * x["key_dequant_scale"].double().abs().flatten()
    return {
        "output 1": torch.finfo(torch.float32).eps * float(terms.max()) if terms.numel() else 0.0
    }


def _of_compressed_gradients(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """A sum in another order is that of numbers a rounding off, where a norm of few channels
    cancels."""
    return _of_roundings("npu_compressor_dense_grad", x, exact, eps, x)


def _of_indexer_gradients(x: Arguments, exact: Outputs, eps: float) -> dict[str, float]:
    """Kernels round ds = dy w to the dtype before the products d_q = ds k and d_k = ds q."""
    off = _of_roundings("npu_lightning_indexer_grad", x, exact, eps, ("weights",))
    return {name: off[name] for name in ("output 0", "output 1")}


# by op, and whether a kernel ran
_BEYOND = {
    ("npu_sparse_attn_sharedkv_grad", True): _of_shared_kv_gradients,
    ("npu_chunk_gated_delta_rule_grad", True): _of_delta_gradients,
    ("npu_chunk_kda_grad", True): _of_kda_gradients,
    ("npu_indexer_loss", False): _of_probabilities,
    ("npu_quant_lightning_indexer_scores", True): _of_scores,
    ("npu_compressor_dense_grad", False): _of_compressed_gradients,
    ("npu_lightning_indexer_grad", True): _of_indexer_gradients,
}


def _compare(
    case: Case, given: Arguments, got: Outputs, own: Outputs, exact: Outputs, single: Outputs
) -> None:
    assert got.keys() == exact.keys()
    dtype = getattr(torch, case["dtype"])
    by_kernel = _by_kernel(got)
    derived = _BEYOND.get((case["op"], by_kernel))
    step = torch.finfo(dtype if by_kernel else torch.float32).eps  # a CPU's sums are float32
    beyond = derived(given, exact, step) if derived else {}
    for name, wanted in exact.items():
        came, rounded = got[name].cpu(), own[name]
        assert came.shape == wanted.shape, f"{name}: {list(came.shape)}, not {list(wanted.shape)}"
        assert came.dtype is rounded.dtype, f"{name}: {came.dtype}, not {rounded.dtype}"
        if wanted.dtype in (torch.int8, torch.uint8):  # quantized: elsewhere a step apart
            assert by_kernel or torch.equal(came, rounded), name
            continue
        if not wanted.is_floating_point():
            # which of two keys that nearly tie comes first is rounding
            came, wanted = ((x >= 0).sum(-1) for x in (came, wanted))
            assert torch.equal(came, wanted), f"{name}: {came.tolist()}, not {wanted.tolist()}"
            continue
        summed = single[name].double()
        if "_indexer" in case["op"] and "_grad" not in case["op"]:
            came, rounded, wanted, summed = (
                x.sort(-1).values for x in (came, rounded, wanted, summed)
            )
        assert not came.isnan().any(), f"{name} has NaN"
        if by_kernel and came.dtype is torch.float32:  # its products are of the inputs' dtype
            came, rounded = came.to(dtype), rounded.to(dtype)
        if dtype is not torch.float64:
            # where numbers cancel, roundings of float32 are left, other ones for another order
            off = (summed - wanted).abs()
            most = float(off[off.isfinite()].max()) if off.isfinite().any() else 0.0
            left = (came.double() - wanted).abs() <= 16 * (torch.finfo(torch.float32).eps + most)
            came = torch.where(left, wanted.to(came.dtype), came)
        more = beyond.get(name, 0.0)
        assert_close_to_float64(name, came, rounded, wanted.double(), beyond=more)


def _assert_untouched(given: Arguments, kept: Arguments) -> None:
    for name, x in kept.items():
        after = given[name]
        assert torch.equal(x, after) or bool(((x == after) | (x.isnan() & after.isnan())).all()), (
            f"`{name}` was written"
        )


def _by_kernel(got: Outputs) -> bool:
    return config.backend != "auto" or any(not x.is_cpu for x in got.values())


def _like(wide: Tensor, x: Tensor) -> Tensor:
    """The numbers of `x` in the dtype of `wide`, whose tiles may have other columns."""
    return (
        x.to(wide.dtype)
        if x.shape == wide.shape
        else custom.to_nz(custom.from_nz(x).to(wide.dtype))
    )


def _called(case: Case, arguments: Arguments, garbage: Garbage, device: torch.device) -> Outputs:
    """Of the call in disguise: in less of one where the op asks for rows in one piece."""
    op = case["op"]
    given = disguised(case, arguments, garbage, device)
    kept = {n: x.clone() for n, x in given.items() if isinstance(x, Tensor)}
    try:
        got = outputs(op, given, garbage)
    except ValueError as error:
        disguised_so = {"strided", "offset"} & {*case["disguises"]}
        if not disguised_so or not re.search("contiguous|stride", str(error)):
            raise
        _assert_untouched(given, kept)
        other = [each for each in case["disguises"] if each not in disguised_so]
        return _called(case | dict(disguises=other), arguments, garbage, device)
    _assert_untouched(given, {n: x for n, x in kept.items() if n not in mutated(BY_NAME[op])})
    return got


def check(case: Case, device: torch.device) -> str:
    """ "right", or "refused" by the backend; fails otherwise."""
    op, dtype = case["op"], getattr(torch, case["dtype"])
    plain, garbage = build(case, dtype)
    # a rounding decides which of two neighbours an activation of 8 bits is: what is exact has none
    of_floats = bool(case.get("quant")) and dtype is not torch.float64

    def by_reference_in(kind: torch.dtype) -> Outputs:
        """Of the same numbers."""
        wide = build(case, kind)[0] if kind is not dtype else plain
        if KIND.get(op) != "layer":  # which rounds before it formats its weights
            wide = {n: _like(wide[n], x) if isinstance(x, Tensor) else x for n, x in plain.items()}
        if of_floats and kind is not dtype:
            wide = layer_v4.of_floats(wide, kind)
        with by_reference():  # ops that a reference calls
            return _of_reference(op, each_tensor(wide, lambda _, x: x.clone()), garbage)

    try:
        got = _called(case, plain, garbage, device)
    except NotSupported:
        return "refused"
    exact = by_reference_in(torch.float64)
    own = exact if dtype is torch.float64 else by_reference_in(dtype)
    single = by_reference_in(torch.float32) if _by_kernel(got) and not of_floats else exact
    _compare(case, plain, got, own, exact, single)
    return "right"
