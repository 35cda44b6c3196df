# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Arguments that no caller means: of another type, None, overlapping, lengths beyond the tensors.

Each gets one sentence before anything is written, or counts as absent where the contract says so.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import traceback
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from custom.dispatch import error_messages, errors
from custom.dispatch.overlap import overlap
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME, SPECS, Spec
from custom.graph_mode import onnx, torchair
from custom.graph_mode.capture import Captured
from torch import Tensor

import custom
from custom.bench import __main__ as bench

from ..support.calls import assert_same, everything, mutated, outputs, tensors
from ..support.samples import sample

every_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
public = pytest.mark.parametrize(
    "spec", [s for s in SPECS if hasattr(custom, s.name)], ids=lambda s: s.name
)
UPDATE = "npu_fused_sigmoid_gating_delta_rule_update"
CHUNK = "npu_chunk_gated_delta_rule"
KL_LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"
BEYOND = [2**31 - 1, 2**62]


def of(name: str) -> dict[str, Any]:
    return sample(name, torch.device("cpu"), torch.float32)


def run(name: str, **changes: Any) -> Any:
    return getattr(torch.ops.custom, name)(**(of(name) | changes))


def refused(spec: Spec, function: Any, good: dict[str, Any], name: str, bad: Any) -> Exception:
    """The error of a call with one bad argument; nothing has been written, one sentence or two."""
    arguments = copy.deepcopy(good) | {name: bad}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        function(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{spec.name}: ") and "\n" not in message, message
    for cache in mutated(spec):
        if cache in good and cache != name:
            torch.testing.assert_close(arguments[cache], good[cache], rtol=0, atol=0)
    return caught.value


@every_spec
def test_none_for_a_tensor_that_is_required(spec):
    good, op = of(spec.name), overload(spec)
    required = [a.name for a in op._schema.arguments if str(a.type) == "Tensor"]
    assert required
    if len(tensors(good)) == 1:
        pytest.skip("without a tensor PyTorch finds no backend: the public function answers")
    for name in required:
        error = refused(spec, op, good, name, None)
        assert isinstance(error, TypeError) and f"`{name}` is None, expected a tensor" in str(error)


def steps_over_one(x: Tensor) -> Tensor:
    """The same numbers in the same places: the step over a dimension of one is odd."""
    steps = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    return x.as_strided(x.shape, (*(7 if n == 1 else step for step, n in steps), *x.stride()[-1:]))


@every_spec
@pytest.mark.parametrize("sizes", [dict(B=1, S=1), {}], ids=str)
def test_the_step_over_a_single_one_does_not_matter(spec, sizes, device):
    """Nobody takes it; `[:, :1]` and as_strided leave any."""
    good = sample(spec.name, device, torch.bfloat16, **sizes)
    odd = good | {name: steps_over_one(x) for name, x in tensors(good).items() if x.ndim}
    results = []
    for given in (copy.deepcopy(good), copy.deepcopy(odd)):
        out = outputs(overload(spec)(**given))
        results.append([*out, *(given[name] for name in mutated(spec) if name in given)])
    assert_same(*results)


@every_spec
def test_a_tensor_without_dimensions(spec):
    good = of(spec.name)
    for name, value in tensors(good).items():
        error = refused(spec, overload(spec), good, name, value.new_zeros(()))
        assert isinstance(error, ValueError) and f"`{name}`" in str(error)


@public
@pytest.mark.parametrize(
    ("came", "odd"), [("ndarray", np.zeros((2, 3))), ("list", [[1.0]]), ("float", 0.5)]
)
def test_something_that_is_no_tensor(spec, came, odd):
    good = of(spec.name)
    for name in tensors(good):
        error = refused(spec, getattr(custom, spec.name), good, name, odd)
        assert isinstance(error, TypeError), error
        assert f"`{name}` is of type {came}, expected Tensor" in str(error)


@public
def test_numbers_and_names_of_another_type(spec):
    good = of(spec.name)
    for argument in overload(spec)._schema.arguments:
        wanted = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if wanted in ("int", "SymInt", "float", "bool", "str"):
            odd = 3 if wanted == "str" else "three"
            error = refused(spec, getattr(custom, spec.name), good, argument.name, odd)
            assert isinstance(error, TypeError) and f"`{argument.name}` is of type" in str(error)


@public
def test_sparse_tensors(spec):
    good = of(spec.name)
    for name, value in tensors(good).items():
        error = refused(spec, getattr(custom, spec.name), good, name, value.to_sparse())
        assert isinstance(error, custom.NotSupported) and "SparseCPU" in str(error)


@public
def test_none_is_no_flag(spec):
    """PyTorch takes it for False, `rope_interleaved` too, whose default is True."""
    good = of(spec.name)
    function = getattr(custom, spec.name)
    own = inspect.signature(function).parameters
    flags = [n for n, p in own.items() if p.annotation == "bool" and p.default is True]
    if not flags:
        pytest.skip("None is False for all of its flags: none is on by default")
    for name in flags:
        error = refused(spec, function, good, name, None)
        assert f"`{name}` is None, expected a bool" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("attention_mode", 0, "0, expected 2 (absorbed latent attention)"),
        ("chunk_offset", -1, "-1, expected at least 0"),
        ("cmp_mask_mode", 0, "0, expected 3 (the entries"),
        ("cmp_ratio", 0, "0, expected at least 1"),
        ("cmp_ratio", -4, "-4, expected at least 1"),
        ("coff", 3, "3, expected one of 1, 2"),
        ("conv_mode", "pango", "'pango', expected one of None, 'default', 'pangu'"),
        ("group_size", 7, "7, expected a divisor of D="),
        ("hadamard_round", "fp16", "'fp16', expected one of 'bf16', 'fp32'"),
        ("hc_mult", 2, "2, expected 4"),
        ("hc_sinkhorn_iters", 0, "0, expected at least 1"),
        ("index_kind", "bf16", "'bf16', expected one of 'none', 'fp8', 'int8'"),
        ("layout", "PA_BSND", "'PA_BSND', expected one of 'BSND', 'TND'"),
        ("layout_q", "BNSD", "'BNSD', expected one of 'BSND', 'TND'"),
        ("layout_query", "SBH", "'SBH', expected one of "),
        ("next_tokens", 1, "1, expected its default"),
        ("ori_mask_mode", 3, "3, expected 4 (a window"),
        ("ori_win_left", -1, "-1, expected at least 0"),
        ("ori_win_right", 1, "1, expected 0"),
        ("pre_tokens", 0, "0, expected its default"),
        ("residual_connection", 2, "2, expected one of None, 0, 1"),
        ("rotary_mode", 3, "3, expected one of 1, 2"),
        ("row_layout", "rope", "'rope', expected one of 'nope_rope_scale', 'nope_scale_rope'"),
        ("run_mode", 2, "2, expected one of None, 0, 1"),
        ("scale_format", "fp16", "'fp16', expected one of 'ue8m0', 'fp32'"),
        ("sparse_block_size", 0, "0, expected at least 1"),
        ("sparse_count", 0, "0, expected at least 1"),
        ("sparse_mode", 1, "1, expected "),
        ("state_layout", "v", "'v', expected one of 'kv', 'vk'"),
        ("weight_format", "ND", "'ND', expected one of 'nz', 'nd', 'linear'"),
        ("weight_quant_mode", 7, "7, expected 0 (none)"),
        ("window", 0, "0, expected at least 1"),
    ],
)
def test_an_option_is_refused_alike_by_all_that_have_it(name, value, said):
    """Of two ops or more: what one of them alone has is in its own tests."""
    ops = [x for x in SPECS if any(a.name == name for a in overload(x)._schema.arguments)]
    assert len(ops) > 1
    for spec in ops:
        error = refused(spec, overload(spec), of(spec.name), name, value)
        assert isinstance(error, ValueError)
        assert str(error).startswith(f"{spec.name}: `{name}` is {said}")


@pytest.mark.parametrize(
    ("op", "name", "value", "wanted"),
    [
        ("npu_sparse_attention_pto", "sparse_count", 2**70, "an int of 64 bits"),
        ("npu_causal_conv1d", "activation", "\udc80", "a string that UTF-8 can write"),
    ],
)
def test_values_beyond_their_type(op, name, value, wanted):
    error = refused(BY_NAME[op], getattr(custom, op), of(op), name, value)
    assert f"`{name}` is out of PyTorch's range, expected {wanted}" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("backend", "bogus", "'bogus', expected one of 'auto', 'reference', 'cuda', 'npu'"),
        ("backend", None, "None, expected one of 'auto'"),
        ("debug", "0", "'0', expected one of False, True"),
        ("cache_dir", 3, "3, expected a string"),
    ],
)
def test_settings_are_refused_where_they_are_made(name, value, said):
    kept = getattr(custom.config, name)
    with pytest.raises(ValueError, match=rf"^custom\.config\.{name} is {said}"):
        setattr(custom.config, name, value)
    assert getattr(custom.config, name) == kept
    with pytest.raises(AttributeError, match="no `bakend`, expected one of backend, log"):
        custom.config.bakend = "cuda"


@public
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_subclasses(spec):
    good = of(spec.name)
    for name, value in tensors(good).items():
        jagged = torch.nested.nested_tensor([value, value], layout=torch.jagged)
        error = refused(spec, getattr(custom, spec.name), good, name, jagged)
        assert isinstance(error, custom.NotSupported) and "plain tensors" in str(error)


@public
def test_vmap_over_what_is_written(spec):
    good = of(spec.name)
    if not mutated(spec):
        pytest.skip("it writes nothing: test_transforms.py holds vmap against a loop")
    name = next(n for n in tensors(good) if n not in mutated(spec))

    def over(**arguments):
        def one(x):
            return getattr(custom, spec.name)(**(arguments | {name: x}))

        return torch.vmap(one)(arguments[name])

    error = refused(spec, over, good, name, torch.stack([good[name]] * 2))
    assert isinstance(error, custom.NotSupported) and "torch.vmap" in str(error)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("row_layout", "rope", "is 'rope', expected one of"), ("kv_cache_dtype", 1, "expected None")],
)
def test_options_of_rows_beside_latents(name, value, said):
    with pytest.raises(ValueError, match=f"^npu_mla_prolog_pto: `{name}` .*{said}"):
        run("npu_mla_prolog_pto", **{name: value})


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("npu_sparse_attention_pto", "rms_norm_eps"),
        ("npu_sparse_attention_pto", "layer_norm_eps"),
        ("npu_mla_prolog_pto", "rmsnorm_epsilon_cq"),
        ("npu_mla_prolog_pto", "rmsnorm_epsilon_ckv"),
        ("npu_indexer_prolog_pto", "ln_epsilon"),
    ],
)
@pytest.mark.parametrize("value", [-1e-6, float("nan")])
def test_epsilons_are_not_negative(op, name, value):
    with pytest.raises(ValueError, match=rf"^{op}: `{name}` is {value}, expected at least 0"):
        run(op, **{name: value})


@public
def test_numbers_are_finite(spec):
    arguments = [a for a in overload(spec)._schema.arguments if "float" in str(a.type)]
    if not arguments:
        pytest.skip("no argument is a number with a fraction")
    for argument in arguments:
        for value in (float("nan"), float("inf"), float("-inf")):
            error = refused(spec, getattr(custom, spec.name), of(spec.name), argument.name, value)
            assert f"`{argument.name}` is {value}, expected" in str(error)


def test_caches_without_slots_in_a_page():
    caches = {
        name: of("npu_sparse_attention_pto")[name][:, :0]
        for name in ("kv_cache", "kr_cache", "index_k_cache")
    }
    with pytest.raises(ValueError, match="pages of 0 slots, expected a multiple of 16"):
        run("npu_sparse_attention_pto", **caches)


@pytest.mark.parametrize(
    "op",
    [
        "npu_lightning_indexer_grad",
        "npu_sparse_flash_attention_grad",
        "npu_sparse_lightning_indexer_grad_kl_loss",
    ],
)
@pytest.mark.parametrize("layout", ["", "bsnd", "BNSD"])
def test_layouts_are_spelled_as_they_are(op, layout):
    with pytest.raises(ValueError, match=rf"^{op}: `layout` is '{layout}', expected one of 'BSND'"):
        run(op, layout=layout)


@pytest.mark.parametrize("pool", ["initial_state_source", "intermediate_states"])
def test_states_that_share_memory_are_refused(pool):
    one = torch.zeros(1, 4, 16, 8)
    changes: dict[str, Any] = {"initial_state_source": one.expand(5, -1, -1, -1)}
    if pool == "intermediate_states":
        rows = torch.tensor([0, 1])
        changes = dict(intermediate_states=one.expand(3, 2, 4, 16, 8))
        changes |= dict(intermediate_state_indices=rows)
    with pytest.raises(ValueError, match=rf"^{UPDATE}: `{pool}` has strides .* overlap"):
        run(UPDATE, **changes)
    # steps before rows, and gaps: any order in which no two states meet
    gaps = torch.zeros(2, 3, 2, 4, 16, 8)[:, :, 0].transpose(0, 1)
    run(UPDATE, intermediate_states=gaps, intermediate_state_indices=torch.tensor([2, 0]))


def laid(pair: list[Tensor], ahead: int, gap: int = 0) -> list[Tensor]:
    """Copies in one allocation: rows of the one, and `ahead` bytes behind their beginning rows of
    the other; or one page of each by turns, `gap` bytes apart."""
    sizes = [x[0].nbytes if gap else x.nbytes for x in pair]
    count = max(len(x) for x in pair) if gap else 1
    pool = torch.zeros(count * (gap or ahead + sizes[1]) + 16, dtype=torch.uint8)
    made = []
    for x, at in zip(pair, (0, ahead), strict=True):
        items = pool[at : at + (len(pool) - at) // x.itemsize * x.itemsize].view(x.dtype)
        strides = [gap // x.itemsize if gap else x.stride(0), *x.stride()[1:]]
        made.append(items.as_strided(x.shape, strides, items.storage_offset()).copy_(x))
    return made


@pytest.mark.parametrize("spec", [s for s in SPECS if len(mutated(s)) > 1], ids=lambda s: s.name)
def test_caches_that_share_memory_are_refused(spec):
    """Also behind calls that are alike but for where their caches lie."""
    good = of(spec.name)
    names = [n for n in mutated(spec) if good.get(n) is not None]
    if len(names) < 2:
        pytest.skip("the sample has one of them alone")
    for one, other in itertools.combinations(names, 2):
        pair = [good[one].contiguous(), good[other].contiguous()]
        behind = -(-pair[0].nbytes // 16) * 16
        wanted = everything(spec, overload(spec), good | {one: pair[0], other: pair[1]})
        for _ in range(2):
            apart = dict(zip((one, other), laid(pair, behind), strict=True))
            arguments = copy.deepcopy(good) | apart
            out = overload(spec)(**arguments)
            assert_same([*outputs(out), *(arguments[n] for n in names)], wanted)
        together = dict(zip((one, other), laid(pair, behind - 16), strict=True))
        kept = {n: x.clone() for n, x in together.items()}
        with pytest.raises(ValueError, match=rf"^{spec.name}: `{one}` and `{other}` overlap"):
            overload(spec)(**(copy.deepcopy(good) | together))
        assert all(torch.equal(together[n], kept[n]) for n in kept)


@pytest.mark.parametrize("spec", [s for s in SPECS if mutated(s)], ids=lambda s: s.name)
def test_an_input_in_the_memory_of_a_cache_is_refused(spec):
    """Also behind calls that are alike but for where their tensors lie, on both sides."""
    op, good = overload(spec), of(spec.name)
    caches = [n for n in mutated(spec) if good.get(n) is not None]
    inputs = [n for n, x in tensors(good).items() if n not in caches and x.ndim and x.numel()]
    for cache, name in itertools.product(caches, inputs):
        for first, second in ((cache, name), (name, cache)):
            pair = [good[first].contiguous(), good[second].contiguous()]
            behind = -(-pair[0].nbytes // 16) * 16
            apart = dict(zip((first, second), laid(pair, behind), strict=True))
            op(**copy.deepcopy(good) | apart)
            met = dict(zip((first, second), laid(pair, behind - 16), strict=True))
            kept = {n: x.view(torch.uint8).clone() for n, x in met.items()}
            with pytest.raises(ValueError, match=f"^{spec.name}: `{name}` and `{cache}` overlap"):
                op(**copy.deepcopy(good) | met)
            assert all(torch.equal(met[n].view(torch.uint8), x) for n, x in kept.items())


@pytest.mark.parametrize("checked", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_memory_that_was_freed_is_refused(spec, checked, monkeypatch):
    """As FSDP frees a shard's, behind calls that are alike."""
    monkeypatch.setattr(custom.config, "debug", checked)
    good = of(spec.name)
    overload(spec)(**copy.deepcopy(good))
    for name, x in tensors(good).items():
        for ahead in (0, 16) if x.numel() else ():  # a shard lies anywhere in what was freed
            freed = x.new_empty(ahead + x.numel())[ahead:].view(x.shape)
            freed.untyped_storage().resize_(0)
            error = refused(spec, overload(spec), good, name, freed)
            assert f"the memory of `{name}` was freed" in str(error)


def test_caches_whose_pages_take_turns():
    """A row of states and a row of the convolution's in each slot of one pool."""
    op = "npu_gated_delta_layer_decode"
    good = of(op)
    names = ["conv_states", "states"]
    pair = [good[n].contiguous() for n in names]
    wide = [-(-x[0].nbytes // 16) * 16 for x in pair]
    wanted = everything(BY_NAME[op], overload(BY_NAME[op]), good)
    arguments = good | dict(zip(names, laid(pair, wide[0], sum(wide)), strict=True))
    out = run(op, **arguments)
    assert_same([*outputs(out), *(arguments[n] for n in names)], wanted)
    narrow = dict(zip(names, laid(pair, wide[0] - 16, sum(wide)), strict=True))
    with pytest.raises(ValueError, match=f"^{op}: `conv_states` and `states` overlap"):
        run(op, **narrow)


POOLED = "npu_sparse_attention_v4_pto"


def of_one_pool(good: dict[str, Any]) -> dict[str, Any]:
    """Every cache begins at page 0 of a pool, and each has every third page: those of its table."""
    page = 2 * max(x[0].nbytes for name, x in good.items() if name in mutated(BY_NAME[POOLED]))
    pool, made = torch.zeros(25, page, dtype=torch.uint8)[:24], dict(good)
    tables = ("ori_block_table", "state_block_table", "cmp_block_table")
    for number, (table, caches) in enumerate(zip(tables, BY_NAME[POOLED].tables, strict=True)):
        made[table] = torch.where(good[table] < 0, -1, 3 * good[table] + number)
        at = 0
        for name in caches:
            if (x := good.get(name)) is None:
                continue
            rows = pool[:, at : at + x[0].nbytes].view(x.dtype)
            made[name] = rows.unflatten(1, x.shape[1:])
            made[name][number : number + 3 * len(x) : 3] = x
            at += x[0].nbytes
    return made


def test_caches_with_tables_of_their_own_share_a_pool():
    """As an engine has them."""
    good = of(POOLED)
    wanted = everything(BY_NAME[POOLED], overload(BY_NAME[POOLED]), good)
    arguments = of_one_pool(good)
    out = run(POOLED, **arguments)
    number = {name: i for i, caches in enumerate(BY_NAME[POOLED].tables) for name in caches}
    kept = [
        arguments[name][number[name] : number[name] + 3 * len(good[name]) : 3]
        for name in mutated(BY_NAME[POOLED])
        if name in good
    ]
    assert_same([*outputs(out), *kept], wanted)


@pytest.mark.parametrize(
    ("other", "moved"), [("idx_k", 0), ("cmp_state", 1)], ids=["one table", "a page of two"]
)
def test_pages_that_a_table_does_not_keep_apart_are_refused(other, moved):
    """Of one table; or where a page of the one meets two of the other."""
    arguments = of_one_pool(of(POOLED))
    x, like = arguments["cmp_kv"], arguments[other]
    start = x.storage_offset() + moved * (x.stride(0) - 4)
    arguments[other] = x.as_strided(like.shape, like.stride(), start)
    with pytest.raises(ValueError, match=f"^{POOLED}: `.*` and `.*` overlap"):
        run(POOLED, **arguments)


@pytest.mark.parametrize("seed", range(8))
def test_overlap_is_that_of_the_bytes(seed):
    """Against sets of bytes; dimensions in any order, gaps, three sizes of numbers, some twice."""
    random, pool = Random(seed), torch.zeros(2**16, dtype=torch.uint8)

    def view() -> Tensor:
        items = pool.view(random.choice([torch.uint8, torch.int16, torch.float32]))
        shape, strides, least = [], [], 1
        for _ in range(random.randint(0, 4)):
            size = random.choice([1, 2, 3, 4])
            stride = max(least, random.choice([least, least + 1, 2 * least, 8, 12, 24]))
            stride = random.choice([stride] * 6 + [0, 1])
            shape.append(size)
            strides.append(stride)
            least = max(least, stride * size) if size > 1 else least
        order = random.sample(range(len(shape)), len(shape))
        at = random.randint(0, 60)
        return items.as_strided([shape[i] for i in order], [strides[i] for i in order], at)

    def touched(x: Tensor) -> set[int]:
        steps = zip(x.stride(), x.shape, strict=True)
        places = [[stride * i for i in range(size)] for stride, size in steps]
        first = (x.data_ptr() + sum(each) * x.itemsize for each in itertools.product(*places))
        return {at + byte for at in first for byte in range(x.itemsize)}

    found = set()
    for _ in range(300):
        a, b = view(), view()
        assert overlap(a, b) == overlap(b, a) == bool(touched(a) & touched(b))
        found.add(overlap(a, b))
    assert found == {True, False}


@pytest.mark.parametrize(
    ("name", "lengths", "layout"),
    [
        ("actual_seq_qlen", [6, 5], "BSND"),
        ("actual_seq_qlen", [-1, 5], "BSND"),
        ("actual_seq_klen", [9, 10], "BSND"),
        ("actual_seq_klen", [7, 5], "TND"),
        ("actual_seq_qlen", [2, 6], "TND"),
    ],
)
def test_lengths_on_the_host_are_always_checked(name, lengths, layout):
    good = of(KL_LOSS)
    if layout == "TND":
        good = {n: x[0] if isinstance(x, Tensor) else x for n, x in good.items()}
        good |= dict(layout="TND", actual_seq_qlen=[2, 5], actual_seq_klen=[4, 9])
    with pytest.raises(ValueError, match=rf"^{KL_LOSS}: `{name}` is \[.* from 0 to \d+\."):
        getattr(custom, KL_LOSS)(**(good | {name: lengths}))


# ------------------------------------------------------------ out of range is absent, not an error


@pytest.mark.parametrize("length", BEYOND)
def test_more_keys_than_the_table_reaches(length):
    good = of("npu_sparse_attention_pto")
    good["block_table"][0, 2] = 4  # every page that the table reaches is there
    whole = good | dict(act_seqs=torch.full((2,), 49), sparse_count=64)
    beyond = good | dict(act_seqs=torch.full((2,), length), sparse_count=64)
    op = custom.npu_sparse_attention_pto
    # of S = 2 queries and 49 "keys" both see the 48 that there are
    torch.testing.assert_close(
        op(**copy.deepcopy(beyond)), op(**copy.deepcopy(whole)), rtol=0, atol=0
    )


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize("op", [CHUNK, f"{CHUNK}_grad"])
def test_sequences_end_with_the_tokens(op, beyond):
    tokens = of(CHUNK)["query"].shape[0]
    lengths = [torch.tensor([40, last]) for last in (tokens - 40, beyond)]
    inside, outside = (run(op, actual_seq_lengths=x) for x in lengths)
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("beyond", BEYOND)
def test_sequences_of_a_decode_end_with_the_tokens(beyond):
    good = of(UPDATE)
    packed = {n: good[n].flatten(0, 1)[None] for n in ("q", "k", "v", "a", "b")}
    states, outputs = [], []
    for last in (4, beyond):
        state = good["initial_state_source"].clone()
        cut = dict(cu_seqlens=torch.tensor([0, 1, last]), initial_state_source=state)
        outputs.append(run(UPDATE, **(packed | cut)))
        states.append(state)
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("index", [2**62, -(2**62), 2**61 + 1])
def test_an_index_far_out_of_range_does_not_come_back_in(index):
    """Times a block of 4 keys, 2 ** 62 is 0 in 64 bits."""
    op = "npu_sparse_flash_attention"
    selected = torch.tensor([0, 2, index]).expand(2, 3, 1, 3)
    absent = torch.tensor([0, 2, -1]).expand(2, 3, 1, 3)
    for a, b in zip(
        run(op, sparse_indices=selected, sparse_block_size=4, sparse_mode=0),
        run(op, sparse_indices=absent, sparse_block_size=4, sparse_mode=0),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---------------------------------------------------------------------------- CUSTOM_DEBUG=1


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)


@pytest.mark.usefixtures("debug")
@every_spec
def test_debug_accepts_what_is_right(spec):
    overload(spec)(**of(spec.name))


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("page", [-1, 8])
def test_debug_finds_a_page_that_is_not_there(page):
    good = of("npu_sparse_attention_pto")
    table = good["block_table"]
    unused = table.clone()
    unused[0, 2] = page  # request 0 has 20 positions, which two pages hold
    run("npu_sparse_attention_pto", block_table=unused)
    table[0, 1] = page
    message = rf"`block_table` has the pages \[3, {page}\] for the 20 positions of request 0 \("
    with pytest.raises(ValueError, match=message):
        run("npu_sparse_attention_pto", block_table=table)
    with pytest.raises(ValueError, match=message):
        custom.npu_lightning_indexer(
            torch.zeros(2, 2, 4, 32),
            good["index_k_cache"],
            torch.zeros(2, 2, 4),
            actual_seq_lengths_key=good["act_seqs"],
            block_table=table,
            layout_key="PA_BSND",
        )


@pytest.mark.usefixtures("debug")
def test_debug_finds_states_written_twice():
    twice = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="`initial_state_indices` names a slot twice"):
        run(UPDATE, initial_state_indices=twice)
    # read twice is right, and so are slots that do not exist
    run(UPDATE, initial_state_indices=twice, disable_state_update=True)
    run(UPDATE, initial_state_indices=torch.tensor([99, 99]))
    good = of(UPDATE)
    packed = {n: good[n].flatten(0, 1)[None] for n in ("q", "k", "v", "a", "b")}
    tokens = packed["q"].shape[1]
    # as engines pad a captured batch: a request without tokens keeps what it had
    run(UPDATE, **packed, cu_seqlens=torch.tensor([0, tokens, tokens]), initial_state_indices=twice)
    with pytest.raises(ValueError, match="`intermediate_state_indices` names a slot twice"):
        run(
            UPDATE,
            intermediate_states=torch.zeros(3, 2, 4, 16, 8),
            intermediate_state_indices=twice,
        )


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("prefix", [[-1, 5], [0, 3, 2], [0, 8]])
def test_debug_looks_at_prefix_sums(prefix):
    q, right = torch.zeros(7, 2, 16), torch.tensor([1, 7])
    sums = torch.tensor(prefix, dtype=torch.int32)
    for cut in (dict(cu_seqlens_q=sums), dict(cu_seqlens_k=sums)):
        other = torch.zeros_like(sums)
        arguments = dict(cu_seqlens_q=other, cu_seqlens_k=other) | cut
        with pytest.raises(ValueError, match="expected prefix sums that never fall, from 0 to at"):
            custom.npu_fused_attention(q, q, q, **arguments)
    custom.npu_fused_attention(q, q, q, cu_seqlens_q=right, cu_seqlens_k=right)
    good = of(UPDATE)
    packed = {n: good[n].flatten(0, 1)[None] for n in ("q", "k", "v", "a", "b")}
    with pytest.raises(ValueError, match="`cu_seqlens` is"):
        run(UPDATE, **packed, cu_seqlens=sums, initial_state_indices=sums[1:] - 99)


@pytest.mark.usefixtures("debug")
def test_debug_looks_at_the_lengths_of_the_chunked_rule():
    for lengths in ([70, 36], [-1, 5]):
        with pytest.raises(ValueError, match="`actual_seq_lengths` adds up to"):
            run(CHUNK, actual_seq_lengths=torch.tensor(lengths))


# ------------------------------------------------------ captured graphs, optional packages, bench


class Graph:
    """Counts replays."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_sentence_keeps_where_an_op_inside_an_op_failed():
    def inner(x: Any) -> Any:
        return torch.ops.custom.npu_merge_states(x, x)

    with pytest.raises(TypeError, match=r"^npu_merge_states: `outs` is of type str") as caught:
        error_messages.call(inner, "no tensor")
    shown = "".join(traceback.format_exception(caught.value))
    assert "in inner" in shown and shown.rstrip().endswith("torch.as_tensor().")


def test_a_captured_call_refuses_before_it_copies():
    x, caches, graph = torch.zeros(2), [torch.zeros(3), {"k": torch.zeros(1)}], Graph()
    captured = Captured(graph, (x, caches, 7), "outputs")
    ones = [torch.ones(3), {"k": torch.ones(1)}]
    for args, message in (
        ((torch.ones(2), ones), "2 arguments came, expected the 3 captured"),
        ((torch.ones(2), ones, 8), "argument 2 is 8, 7 was captured"),
        ((torch.ones(2), ones, torch.ones(1)), "argument 2 is tensor"),
        ((torch.ones(2), [torch.ones(4), ones[1]], 7), r"argument 1 has shape \[4\]"),
        ((torch.ones(2), [torch.ones(3).long(), ones[1]], 7), "argument 1 has .* torch.int64"),
        ((torch.ones(2), [torch.ones(3)], 7), "argument 1 is list of 1 .* list of 2"),
    ):
        with pytest.raises(ValueError, match=f"^capture: {message}"):
            captured(*args)
    assert not graph.replays and not x.any() and not caches[0].any()
    assert captured(torch.ones(2), ones, 7) == "outputs"
    assert graph.replays == 1 and x.all() and caches[0].all() and caches[1]["k"].all()


def test_an_optional_package_that_is_missing_says_who_needs_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(errors, "import_module", missing)
    for call, message in (
        (
            lambda: onnx.export(torch.nn.Identity(), (torch.ones(1),), os.devnull),
            "pip install onnx onnx",
        ),
        (torchair.register, "needs torchair, which is not installed: pip install torch_npu"),
        (lambda: bench.main(["npu_indexer_loss", "--plot", "x.png"]), "--plot needs matplotlib"),
    ):
        with pytest.raises(custom.BackendUnavailable, match=message):
            call()


def test_a_package_that_lacks_something_itself_is_not_called_missing(monkeypatch):
    def broken(name):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(errors, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'numpy'$"):
        errors.need("onnx", "a test", "onnx")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shape", "b"], "--shape is 'b', expected sizes such as b=32,n=128"),
        (["--against", "nowhere.csv"], "--against: there is no file nowhere.csv"),
    ],
)
def test_bench_refuses_before_it_measures(argv, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(["npu_indexer_loss", *argv])
    assert message in capsys.readouterr().err


def test_bench_names_a_device_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cuda: none is here"):
        bench.main(["npu_indexer_loss", "--device", "cuda"])


@pytest.mark.parametrize("tile", [0, None, 1.5])
def test_tiles_of_the_tutorial_are_integers(tile):
    q = torch.zeros(1, 1, 2, 16)
    with pytest.raises(ValueError, match=r"^attention: `BM` is .*, expected an integer from 1 on"):
        custom.attention(q, q, q, True, 1.0, tile, 64)


@pytest.mark.parametrize(
    "op, name",
    [
        ("npu_lightning_indexer", "sparse_count"),
        ("npu_sparse_attention_pto", "sparse_count"),
        ("npu_merge_topk", "k"),
    ],
)
def test_counts_are_below_what_a_position_can_be(op, name):
    for bad in (2**31, 2**62):
        with pytest.raises(
            ValueError, match=rf"^{op}: `{name}` is {bad}, expected at most 2147483"
        ):
            run(op, **{name: bad})


def test_a_block_longer_than_the_keys_ends_with_them():
    op = "npu_sparse_flash_attention"
    wanted = run(op, sparse_block_size=21)
    for far in (2**31, 2**62):
        torch.testing.assert_close(run(op, sparse_block_size=far), wanted, rtol=0, atol=0)
