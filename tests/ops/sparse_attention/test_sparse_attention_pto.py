# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_pto, and its forms for shared selections, against the layer's formulas, one
query token at a time."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from custom.dispatch.register import bind, overload
from custom.dispatch.registry import BY_NAME
from torch import Tensor

import custom

from ...support.accuracy import assert_close_to_float64, every_dtype, skip_unless_taken
from ...support.golden import Golden, Layer
from ...support.prologs import refuse
from ...support.ragged import run, shuffled_table
from ...support.samples import sample

OP = "npu_sparse_attention_pto"
SELECTING, SHARED = "npu_sparse_attention_indices_pto", "npu_sparse_attention_shared_pto"
INDEXER = ("w_idx_qb", "w_idx_k", "w_idx_proj", "in_gamma_k", "in_beta_k", "index_k_cache")
PAGE = 16
CPU = torch.device("cpu")
# what the public kernel has fixed
PUBLIC = dict(
    softmax_scale=64**-0.5, rms_norm_eps=1e-5, layer_norm_eps=1e-6, index_rope_interleaved=True
)


class Step:
    """One call: S new tokens of each request, whose earlier keys lie in the caches."""

    def __init__(self, lengths, S, dtype, random_slots=False, Dr=16):
        self.lengths, self.S, self.dtype = lengths, S, dtype
        self.layer = Layer.draw(Dr=Dr).to(dtype).to(torch.float64)
        B = len(lengths)
        self.x, self.sin, self.cos = (
            torch.randn(B, S, size).to(dtype).double() for size in (80, Dr, Dr)
        )
        self.table, self.pages = shuffled_table(lengths)
        self.caches = {
            name: torch.randn(self.pages, PAGE, 1, size).to(dtype).double()
            for name, size in (("kv_cache", 48), ("kr_cache", Dr), ("index_k_cache", 32))
        }
        if random_slots:  # anywhere, as in public tests: also into other requests' keys
            self.slots = torch.randperm(self.pages * PAGE)[: B * S].view(B, S)
        else:
            self.slots = torch.full((B, S), -1)
            for b, length in enumerate(lengths):
                for j in range(S):
                    position = length - S + j
                    if position >= 0:
                        self.slots[b, j] = self.slot(b, position)
        self.slots = self.slots.to(torch.int32)

    def slot(self, b: int, position: int) -> int:
        return int(self.table[b, position // PAGE]) * PAGE + position % PAGE

    def arguments(self, device) -> dict:
        def move(x: Tensor) -> Tensor:
            return x.to(device, self.dtype)

        w = self.layer
        weights = {
            name: custom.to_nz(getattr(w, name).to(self.dtype)).to(device)
            for name in ("w_dq", "w_uq_qr", "w_dkv_kr", "w_idx_qb", "w_idx_k", "w_idx_proj")
        }
        vectors = {
            name: move(getattr(w, name))
            for name in ("w_uk", "gamma_cq", "gamma_ckv", "in_gamma_k", "in_beta_k")
        }
        return dict(
            x=move(self.x),
            sin=move(self.sin),
            cos=move(self.cos),
            cache_index=self.slots.to(device),
            block_table=self.table.to(device),
            act_seqs=torch.tensor(self.lengths, dtype=torch.int32, device=device),
            **weights,
            **vectors,
            **{name: move(cache) for name, cache in self.caches.items()},
        )

    def solved(
        self,
        precision: torch.dtype,
        count: int,
        softmax_scale: float | None = None,
        rms_norm_eps: float = 1e-6,
        layer_norm_eps: float = 1e-6,
        rope_interleaved: bool = True,
        index_rope_interleaved: bool = False,
        given: Tensor | None = None,
    ) -> Tensor:
        """[B, S, N, R]: all tokens write before the first reads; `given` [B, S, K] are attended to
        instead of those that score highest."""
        golden, B = Golden(self.layer, precision), len(self.lengths)
        wide, head = golden.wide, self.layer.w_uk.shape[1] + self.sin.shape[-1]
        scale = head**-0.5 if softmax_scale is None else softmax_scale
        kv, kr, ki = (cache.to(wide).flatten(0, 2).clone() for cache in self.caches.values())
        prepared = {}
        for b in range(B):
            for j in range(self.S):
                at = b, j
                q, q_rope, c, k, k_rope = golden.mla_prolog(
                    self.x[at],
                    self.sin[at],
                    self.cos[at],
                    rms_norm_eps,
                    rms_norm_eps,
                    rope_interleaved,
                )
                q_index, weight, k_index = golden.indexer_prolog(
                    self.x[at],
                    c,
                    self.sin[at],
                    self.cos[at],
                    layer_norm_eps,
                    index_rope_interleaved,
                )
                prepared[at] = q, q_rope, q_index, weight
                slot = int(self.slots[at])
                if slot >= 0:
                    kv[slot], kr[slot], ki[slot] = k, k_rope, k_index
        out = torch.zeros(B, self.S, *prepared[0, 0][0].shape, dtype=wide)
        for (b, j), (q, q_rope, q_index, weight) in prepared.items():
            limit = self.lengths[b] - (self.S - 1 - j)
            slots = [self.slot(b, position) for position in range(limit)]
            if not slots:
                continue
            score = (weight[:, None] * torch.relu(q_index @ ki[slots].T)).sum(0)
            best = score.topk(min(count, limit)).indices
            if given is not None:
                best = given[b, j][(given[b, j] >= 0) & (given[b, j] < limit)].long()
                if not len(best):
                    continue
            keys, keys_rope = kv[slots][best], kr[slots][best]
            z = (q @ keys.T + q_rope @ keys_rope.T) * scale
            out[b, j] = torch.softmax(z, -1) @ keys
        return golden.rnd(out)


def check_all_selected(device, backend, dtype, lengths, S, **options):
    """With every key selected no near-tie of the scores can tell two right answers apart."""
    step = Step(lengths, S, dtype, options.pop("random_slots", False), options.pop("Dr", 16))
    arguments = step.arguments(device)
    out = run(OP, backend, **arguments, sparse_count=128, **options)
    assert out.dtype is dtype and out.is_contiguous()
    plain = step.solved(dtype, 128, **options)
    exact = step.solved(torch.float64, 128, **options)
    assert_close_to_float64("out", out, plain, exact)


LENGTHS = [(1,), (33, 2, 16), (0, 47, 1, 64, 5)]


@pytest.mark.parametrize("S", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@every_dtype
def test_formulas(device, backend, dtype, lengths, S):
    """Lengths below S among them, and empty requests."""
    skip_unless_taken(dtype, device, backend)
    check_all_selected(device, backend, dtype, lengths, S)


@every_dtype
def test_public_conventions_through_the_keywords(device, backend, dtype):
    skip_unless_taken(dtype, device, backend)
    check_all_selected(device, backend, dtype, (33, 7), 2, random_slots=True, **PUBLIC)


@every_dtype
def test_without_rotary_part(device, backend, dtype):
    skip_unless_taken(dtype, device, backend)
    check_all_selected(device, backend, dtype, (0, 47, 5), 2, Dr=0)


@pytest.mark.parametrize("lengths", [(40, 100, 9)], ids=str)
@pytest.mark.parametrize("options", [{}, PUBLIC, dict(rope_interleaved=False)], ids=str)
def test_selection_in_float64(lengths, options):
    """Where there are no near-ties: 8 of up to 100 keys."""
    step = Step(lengths, 2, torch.float64)
    out = run(OP, "reference", **step.arguments(CPU), sparse_count=8, **options)
    torch.testing.assert_close(out, step.solved(torch.float64, 8, **options))


@pytest.mark.parametrize("S", [1, 3])
@every_dtype
def test_equals_its_four_stages(device, backend, dtype, S):
    """The same numbers as a caller who runs the stages apart, in caches and output."""
    skip_unless_taken(dtype, device, backend)
    whole = Step((40, 100, 9), S, dtype).arguments(device)
    apart = {name: tensor.clone() for name, tensor in whole.items()}
    out = run(OP, backend, **whole, sparse_count=16)
    a = apart
    shared = dict(rope_sin=a["sin"], rope_cos=a["cos"], cache_index=a["cache_index"])
    query, query_rope, query_norm = custom.npu_mla_prolog_pto(
        a["x"],
        a["w_dq"],
        a["w_uq_qr"],
        a["w_uk"],
        a["w_dkv_kr"],
        a["gamma_cq"],
        a["gamma_ckv"],
        kv_cache=a["kv_cache"],
        kr_cache=a["kr_cache"],
        **shared,
    )
    query_index, weights = custom.npu_indexer_prolog_pto(
        a["x"],
        query_norm,
        a["w_idx_qb"],
        a["w_idx_k"],
        a["w_idx_proj"],
        a["in_gamma_k"],
        a["in_beta_k"],
        index_k_cache=a["index_k_cache"],
        **shared,
    )
    indices, _ = custom.npu_lightning_indexer(
        query_index,
        a["index_k_cache"],
        weights,
        actual_seq_lengths_key=a["act_seqs"],
        block_table=a["block_table"],
        layout_key="PA_BSND",
        sparse_count=16,
    )
    out_apart, _, _ = custom.npu_sparse_flash_attention(
        query,
        a["kv_cache"],
        None,
        indices,
        32**-0.5,
        actual_seq_lengths_kv=a["act_seqs"],
        block_table=a["block_table"],
        query_rope=query_rope,
        key_rope=a["kr_cache"],
        layout_kv="PA_BSND",
    )
    for name in ("kv_cache", "kr_cache", "index_k_cache"):
        assert torch.equal(whole[name], apart[name]), name
    torch.testing.assert_close(out, out_apart)


def without_indexer(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if name not in INDEXER}


@pytest.mark.parametrize("S", [1, 3])
@every_dtype
def test_selecting_and_sharing_equal_the_whole(device, backend, dtype, S):
    """The selection is the indexer's, and another call with it gives the same output and caches."""
    skip_unless_taken(dtype, device, backend)
    whole = Step((40, 100, 0, 9), S, dtype).arguments(device)
    selecting, sharing = ({n: x.clone() for n, x in whole.items()} for _ in range(2))
    out = run(OP, backend, **whole, sparse_count=16)
    again, indices = run(SELECTING, backend, **selecting, sparse_count=16)
    assert torch.equal(again, out)
    assert (indices.dtype, indices.shape) == (torch.int32, (4, S, 1, 16))
    for b, length in enumerate((40, 100, 0, 9)):
        for j in range(S):
            limit = max(0, length - (S - 1 - j))
            kept = indices[b, j, 0].tolist()
            count = min(16, limit)
            assert kept[count:] == [-1] * (16 - count)
            assert kept[:count] == sorted(set(kept[:count])) and all(p < limit for p in kept)
    shared = run(SHARED, backend, **without_indexer(sharing), sparse_indices=indices)
    torch.testing.assert_close(shared, out)
    for name in ("kv_cache", "kr_cache", "index_k_cache"):
        assert torch.equal(selecting[name], whole[name]), name
        if name != "index_k_cache":
            assert torch.equal(sharing[name], whole[name]), name


@pytest.mark.parametrize("options", [{}, dict(softmax_scale=0.2, rms_norm_eps=1e-3)], ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@every_dtype
def test_given_positions(device, backend, dtype, integer, options):
    """In any order, some absent, some behind what the token sees; a row may have none at all."""
    skip_unless_taken(dtype, device, backend)
    lengths, S, K = (40, 100, 0, 9), 3, 20
    step = Step(lengths, S, dtype)
    given = torch.stack([torch.randperm(max(n, K) + 8)[:K] for n in lengths for _ in range(S)])
    given = given.view(len(lengths), S, K)
    given[:, :, ::5] = -1
    given[1, 1] = -1
    arguments = without_indexer(step.arguments(device))
    indices = given[:, :, None].to(device, integer)
    out = run(SHARED, backend, **arguments, sparse_indices=indices, **options)
    plain = step.solved(dtype, K, given=given, **options)
    exact = step.solved(torch.float64, K, given=given, **options)
    assert (out[1, 1] == 0).all() and (out[2] == 0).all()
    assert_close_to_float64("out", out, plain, exact)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(sparse_indices=torch.zeros(2, 2, 16).int()),
            ValueError,
            "`sparse_indices` has shape",
        ),
        (dict(sparse_indices=torch.zeros(2, 2, 1, 16)), TypeError, "`sparse_indices` is float32"),
        (dict(act_seqs=torch.zeros(3).int()), ValueError, "`act_seqs` has shape .* B=2"),
        (dict(kr_cache=torch.zeros(9, 16, 1, 16)), ValueError, "`kr_cache` .* pages=8"),
        (dict(rms_norm_eps=-1.0), ValueError, "`rms_norm_eps` is -1.0"),
    ],
)
def test_errors_of_a_shared_selection(change, error, message):
    refuse(SHARED, change, error, message)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(act_seqs=torch.zeros(3).int()), ValueError, "`act_seqs` has shape .* B=2"),
        (dict(act_seqs=torch.zeros(2)), TypeError, "`act_seqs` is float32, expected int32"),
        (dict(block_table=torch.zeros(2)), TypeError, "`block_table` is float32"),
        (dict(block_table=torch.zeros(3, 2).int()), ValueError, "`block_table` has shape .* B=2"),
        (dict(index_k_cache=torch.zeros(9, 16, 1, 32)), ValueError, "`index_k_cache` .* pages=8"),
        (dict(index_k_cache=torch.zeros(8, 32, 1, 32)), ValueError, "`index_k_cache` .* P=16"),
        (dict(in_gamma_k=torch.zeros(32).half()), TypeError, "`in_gamma_k` has dtype"),
        (dict(w_idx_proj=torch.zeros(64, 8)), ValueError, "`w_idx_qb` has shape"),
        (dict(w_uk=torch.zeros(3, 16, 32)), ValueError, r"`w_uq_qr` has .* N\*\(Dn\+Dr\)/8"),
    ],
)
def test_errors(change, error, message):
    refuse(OP, change, error, message)


def test_debug_checks_the_lengths(monkeypatch):
    monkeypatch.setattr(custom.config, "debug", True)
    refuse(OP, dict(act_seqs=torch.tensor([20, 49])), ValueError, "lengths from 0 to 48")
    custom.npu_sparse_attention_pto(**sample(OP, CPU, torch.float32))


def test_weights_that_are_parameters_need_no_grad():
    arguments = sample(OP, CPU, torch.float32)
    arguments["w_dq"] = torch.nn.Parameter(arguments["w_dq"])
    with pytest.raises(RuntimeError, match=f"^{OP}: `w_dq` requires grad"):
        custom.npu_sparse_attention_pto(**arguments)
    with torch.inference_mode():
        custom.npu_sparse_attention_pto(**arguments)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("op", ["attention", "attention_indices", "attention_shared"])
def test_sizes_that_fit_no_gpu_are_refused_before_a_cache_is_written(op, monkeypatch):
    """The layer asks its stages with the queries that it is going to make."""
    spec = BY_NAME[f"npu_sparse_{op}_pto"]
    module = importlib.import_module(f"custom.cuda_ops.{spec.module}")
    from custom.cuda_ops.common import gpu

    x = torch.empty(2, 1, 64, dtype=torch.bfloat16)
    given = dict(
        x=x,
        w_uk=x.new_empty(16, 32, 512),
        w_idx_qb=x.new_empty(64, 4 * 32),
        gamma_cq=x.new_empty(64),
        sin=x.new_empty(2, 1, 64),
        in_gamma_k=x.new_empty(32),
        kv_cache=x.new_empty(4, 16, 1, 512),
        index_k_cache=x.new_empty(4, 16, 1, 32),
        block_table=torch.zeros(2, 2, dtype=torch.int32),
        sparse_count=16,
        sparse_indices=torch.zeros(2, 1, 1, 16, dtype=torch.int32),
    )
    arguments = bind(overload(spec)._schema, (), sample(spec.name, CPU, torch.bfloat16))
    arguments |= {name: value for name, value in given.items() if name in arguments}
    assert module.unsupported(**arguments) is None
    monkeypatch.setattr(gpu, "shared_memory", lambda device: 32 * 1024)
    assert "fits into this GPU's 32 KiB" in module.unsupported(**arguments)
