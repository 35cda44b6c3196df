# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Mechanical mistakes, one at a time, in every kernel and launcher: does a case notice?

A mutant is caught if a case of an op that uses its file fails, crashes or raises: the one that did
before is asked first, then those that caught others of the same function, then the cheapest.  Cases
whose launches stay the same (text, grid, arguments) are not run.  What a few cases do not notice is
asked of all of them at the end, unless `_WITHOUT_EFFECT` has the reason why it changes no result.
What none notices survives, and must be there.

mutants.json keeps the verdicts: a catch for as long as the mutated function and the case that made
it are the same, a survival for as long as all the cases are.
"""

from __future__ import annotations

import ast
import builtins
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from custom.dispatch import backends, register
from custom.dispatch.common import memory as launcher_memory
from custom.dispatch.registry import BY_NAME
from custom.npu_ops.common import tiling
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..mutate.changes import Planted, difference, shifted
from ..support import places, verdict_file
from . import controls, isolated, limits, memory, sources
from .case import Case, Inputs
from .driver import Launch, recorder
from .examine import call, measure, prepare
from .lowered import CpuKernel
from .toolchain import ROOT, digest

RESULTS = ROOT / "tests/ascend/mutants.json"
LIMITS = "limits"  # what a launcher is asked before all cases
_PATIENCE = 60  # seconds of one case's own work
_FEW = 6  # cases at first
# what a part of a larger whole is told by
_PARTS = ("first", "start", "before", "begin", "offset", "written")
# tables and budgets: the table of configurations holds each of them to the compiler
_LEFT_OUT = ("__init__", "tune", "tiling", "cores", "entry", "tuples", "front_end", "refusals")

# why nothing changes, and under it the mutants: a function and words of a title ($ is its end)
_WITHOUT_EFFECT = """\
the sizes only name what is remembered of a refusal
    before_attention.launch: prolog.index_size, prolog.size)
    fused_attention.forward: *sizes, varlen, masked)
    fused_infer_attention_score_v2._weighing: rows), rotary, size)
    indexer_loss.forward: heads, rope, size)
    lightning_indexer._tiles: query.dtype, size)
    quantized_rows.of_index_heads: wanted, rotary, size)
    quantized_rows.of_latents: latent, rank, rotary)
    quantized_rows.of_latents: rank, rotary, latent)
    quantized_rows.of_query_heads: heads, rotary, size)
    product._held: found, weights, depth)
    sparse_flash_attention.in_passes: heads, ROTARY, size)
    sparse_flash_attention.few_tokens: heads, rotary, size)
    sparse_flash_attention_grad._queries: heads, rotary, latent)
    sparse_lightning_indexer_grad_kl_loss._losses: heads, rope, size)
    two_passes.weighing: 'HEAD_TILE', heads), rotary, size)
what divides both is the same whichever comes first
    block_indexer.forward: _step(block, page)
the lowest score stays itself
    block_indexer.scores: z >= _LOWEST
    lightning_indexer.scores: score >= _LOWEST
a row without a key takes the other branch
    blocks_in_place.accumulate: total >= 0 (2)
a block of one run is a block as well
    blocks_in_place.attend: each >= 1
each run has sums of its own, whichever core's
    blocks_in_place.attend: head_tile, tiles, runs * RUN, RUN)
the keys lie in pages, which neither finds
    blocks_in_place.note: table, start, request, limit
an address is the sum of both
    causal_conv1d.piece_of: -> left(n, starts,
    causal_conv1d_update.update: -> left(n, starts,
    compressor.normalise: _added(at, product,
    fused_sigmoid_gating_delta_rule_update.update: -> left(n, starts,
    index_cache_write.write: -> placed(row, slots,
    latent_cache_write.write: -> placed(row, slots,
    rows._latent_rows: _summed(d, at,
    sharedkv_prolog_pto._window_rows: _summed(p, at,
what a wider one alone uses is loaded as well, and dropped by the front end
    causal_conv1d.convolve: W > 2 -> W >= 2$
    causal_conv1d.convolve: W > 2 -> W >= 2 (3)
    causal_conv1d.convolve: W > 3 -> W >= 3$
    causal_conv1d_grad.walk: W > 2 -> W >= 2$
    causal_conv1d_grad.walk: W > 3 -> W >= 3$
    causal_conv1d_grad.walk: W > 2 -> W >= 2 (5)
    causal_conv1d_grad.walk: W > 3 -> W >= 3 (5)
at 0 nothing is copied
    causal_conv1d.row: position <= 0 (2)
    causal_conv1d_update.value_at: position <= 0 (2)
a part without a token begins at the end
    causal_conv1d_grad.walk: begin <= stop$
a part without a token stores no gradient of one
    causal_conv1d_grad.walk: begin <= stop (2)
column 0 lies at 0 whatever the stride; lanes past the channels are not stored
    causal_conv1d_grad.walk: W - 4, ended, d, f_stride.column, count)
a column is stored where it was read
    causal_conv1d_update.update: size >= 0
    causal_conv1d_update.update: position > -reach
the first step has no parent, and before it is -1 as well
    causal_conv1d_update.update: -> position > 0
what the two hold is only ever summed
    chunk_gated_delta_rule.forward: allow_neg_eigval, use_beta_sigmoid_in_kernel)
    chunk_gated_delta_rule.outputs: -> _length(n, lengths,
    chunk_gated_delta_rule.products: -> _length(n, lengths,
    chunk_gated_delta_rule.triangles: -> _length(n, lengths,
    chunk_gated_delta_rule.walk: -> _length(n, lengths,
    chunk_gated_delta_rule.weights: -> _length(n, lengths,
    chunk_gated_delta_rule_grad.backward: gate, lengths, finer, inverse,
    chunk_gated_delta_rule_grad.backward: k, v, lengths, finer, inverse,
    chunk_gated_delta_rule_grad.backward: actual_seq_lengths, finer, inverse,
    chunk_gated_delta_rule_grad.places: -> _length(n, lengths,
    chunk_gated_delta_rule_grad.walk_grads: -> _length(n, lengths,
    chunk_gated_delta_rule_grad.walk_states: -> _length(n, lengths,
    chunk_kda.forward: allow_neg_eigval, use_beta_sigmoid_in_kernel)
    chunk_kda.laid_out: seen, finer, solved,
    chunk_kda.fill: x.bounds, x.finer, x.solved,
    chunk_kda_grad.backward: allow_neg_eigval, use_beta_sigmoid_in_kernel)
    chunk_kda_grad.backward: x.bounds, x.finer, x.solved,
    fused_infer_attention_score_v2._weighing: ['KEY_TILE'], rotary, size)
    fused_infer_attention_score_v2.unsupported: rope, rank)
    sparse_flash_attention.unsupported: rotary, latent)
    two_passes.weighing: ['KEY_TILE'], rotary, size)
as many numbers, whose rows the kernels count themselves
    chunk_gated_delta_rule.forward: -> space(key_size, value_size
    chunk_gated_delta_rule_grad.backward: -> space(2, value_size, CHUNK.value)
    chunk_gated_delta_rule_grad.backward: -> space(value_size, CHUNK.value)
    chunk_gated_delta_rule_grad.backward: -> space(key_size, value_size)
    chunk_kda.laid_out: -> space(key_size, CHUNK.value
    chunk_kda.laid_out: -> space(ROWS.value, CHUNK.value
    chunk_kda_grad.backward: -> space(value_size, side)
    chunk_kda_grad.backward: -> space(key_size, side,
    chunk_kda_grad.backward: -> space(key_size, value_size)
    quantized_prolog.both: -> new(index_heads, tokens)
    quantized_prolog.both: -> new(rank, tokens)
rows of a second chunk that is not there are not stored
    chunk_gated_delta_rule.outputs: -> tl.load(of_far)
tokens of a single head are one number apart
    chunk_gated_delta_rule.triangles: VALUE_HEADS >= 1
the two are only multiplied, number by number
    chunk_gated_delta_rule_grad.backward: rates, grads, states, of_rest
    chunk_kda.outputs: of.most, head, value_heads, False)
    chunk_kda.crosses: _place(pair, of.most, head,
    chunk_kda.walk: since, most, head, value_heads, False)
    chunk_kda_grad.backward: of_rest, own, back,
    chunk_kda_grad.backward: x.total, of_rest, x.units,
    chunk_kda_grad.backward: of_rest, grads, states,
    lightning_indexer.scores: of_query, of_scale, of_weights,
crosses of pairs are not asked for: both stand for nothing
    chunk_gated_delta_rule_grad.backward: k, qk, kk, kk, qk,
    chunk_gated_delta_rule_grad.backward: lengths, qk, kk, kk, qk,
which of the two rows a round begins with is all the same
    chunk_kda.forward: state, *here, goes, came,
    chunk_kda_grad.backward: *here, goes, came, value_heads
rooms of one size, and each is used as what it is called
    chunk_kda.laid_out: near_seen, near_alike, total,
    chunk_kda.laid_out: near_seen, units, total,
    chunk_kda.laid_out: alike, solved, seen,
    chunk_kda.laid_out: lower, keys, queries,
    chunk_kda.laid_out: queries, left, keys,
    chunk_kda.laid_out: total, scaled, units,
where no channel goes far, what is added has a weight of 0
    chunk_kda.factors: tl.max(strong, 0) >= 0
at the limit either anchors are right
    chunk_kda.factors: propagate_nan=ALL) <= -REACH
both begin as zeros
    chunk_kda.factors: on_q, on_k, 0, KEY)
the rate of a token that is not there is not stored
    chunk_kda_grad.inputs: i <= count (3)
rounds of heads and rounds of chunks make the same
    chunk_kda_grad.backward: at_once * group > _FEWEST
where all is one round the states are copied for nothing
    chunk_kda_grad.backward: most <= count
another core begins, with the same work
    compressor._products: -> tiles * parts
    product._held_panels: -> tiles
    product.panel_tiles: -> tiles * parts
    rows.finish: first + rows -> rows
    rows.rotated: -> rows * tiles
    sharedkv_prolog_pto._turn_heads: -> (rows * tiles + each - 1)
a token behind all requests is behind the last one's as well
    compressor.keep: -> request <= requests$
    ragged.visible: request <= requests
as many tokens each: there is no token behind them
    compressor.keep: -> request <= requests (2)
a tile is a row: nothing of it is masked
    compressor.normalise: d <= SIZE
a window before the first position has no history
    compressor.pool: base + begin -> base
a page of which nothing is history is read for no token
    compressor.pool: own >= begin
which sequences are there is asked of packed ones alone
    fused_attention.piece_of: n >= 0 -> n > 0
fewer keys go without a mask, which hides none of them
    fused_attention.keys_of: -> shift (2)
keys that are out of a window's sight are hidden by the mask as well
    fused_attention.keys_of: -> shift (4)
a sequence that fills one tile is done again, by the second launch
    fused_attention.attend: count_q <= below
a tile that is not masked uses neither
    fused_attention.attend: count_k, start, window, row_max, total, (2)
    fused_attention.attend: start, window, count_k, row_max, total, acc, sc (2)
    fused_attention.attend: -> shift (2)
    fused_attention.attend: CAUSAL, KEY_TILE, WINDOW, False)
    fused_attention.attend: KEY_TILE, WINDOW, CAUSAL, False)
    fused_attention_backward.grad_query: lse, of_delta, acc, sca (2)
    fused_attention_backward.grad_query: lse, of_delta, ac (2)
    fused_attention_backward.grad_query: lse, of_delt (2)
keys that a row does not see are masked behind the exponential as well
    fused_attention_backward.row_sums: known >=
the only tile is square
    fused_attention_backward.grad_query: WINDOW, KEY_TILE, Q_TILE)
a block that begins with the tokens ends behind their first
    fused_causal_conv1d.fill: boundary > 0
without a token the block ends before the first one
    fused_causal_conv1d.fill: size >= 0
a row that is full and no longer stays where it is
    fused_causal_conv1d.push: counted + size > L
without a sequence or a channel neither is used
    fused_causal_conv1d.forward: outputs(x, bias, weight, None,
the logarithm of a sum of 0 is not taken
    fused_infer_attention_score_v2.accumulate: total >= 0 (2)
    sparse_attn_sharedkv.accumulate: total >= 0 (2)
a copy of the same queries
    fused_infer_attention_score_v2.forward: each >= 1$
the result is copied to itself
    fused_infer_attention_score_v2.forward: each >= 1 (4)
only their sum counts, and both name what is refused
    fused_infer_attention_score_v2.forward: heads, rope, rank)
a group that sees no key has a run of none
    fused_infer_attention_score_v2.runs_of: limit >= begin
a step that names itself finds none before it, and begins anew
    fused_sigmoid_gating_delta_rule_update._parent: parent <= t
a sequence without a token stores the state that it loaded
    fused_sigmoid_gating_delta_rule_update.update: end >= start
tiles that are listed already, once more at the end
    grouped_o_proj_pto._config: config.tiles['ROWS'] <= least
    product._cut: config.tiles['ROWS'] <= least
a tile of fewer heads turns them the same
    grouped_o_proj_pto._turning: tile > cores.vector()
    grouped_o_proj_pto._turning: rotary < _NARROW
rows behind the products are zeros: the sum of squares comes after, the rest is not read
    hc_pre.mix: acc, mask=(m < COUNT)[:, None]) ->
    hc_pre.mix: m <= COUNT (2)
a head has no rows of post, which another scale is for
    hc_pre.gates: C.COUNT > 4 -> C.COUNT >= 4$
of a row without a slot nothing is taken
    indexer_loss.distributions: total_e >= 0
a row without a slot has no share
    indexer_loss.log_sums: total >= 0
of a slot that is none both shares are 0
    indexer_loss.row_loss: ok >= 0
    sparse_lightning_indexer_grad_kl_loss.row_loss: ok >= 0
as many tokens as cores are whole rounds already
    indexer_loss.forward: cores.cube() <= at_once < tokens
of a place that is none both shares are 0
    indexer_loss_backward.row_grad: ok >= 0
only whether they are one tensor is asked, where they are
    kv_quant_sparse_flash_attention.unsupported: LATENT), value, key,
by 1 nothing is divided
    lightning_indexer.scores_of: RATIO >= 1
    lightning_indexer.scores: RATIO >= 1
what lies there without one is written next
    lightning_indexer.tail: one <= more
    lightning_indexer.tail: tl.int32) + last)
    lightning_indexer.tail: p <= there$
    lightning_indexer.tail: p <= there (3)
what does not count adds 0 anywhere
    lightning_indexer_grad.spread: ok >= 0 (2)
a request without a token of this launch adds zeros
    lightning_indexer_grad.grad_keys: high >= low
    sparse_flash_attention_grad.grad_keys: high >= low
the answer is that of the whole row, with its candidates or without
    lightning_indexer._candidates: 2 * room < reach
    lightning_indexer.collect: requests, reach, tokens
    lightning_indexer.collect: n >= tl.maximum(room,
    lightning_indexer.collect: written <= chosen
    lightning_indexer.collect: written >= room
a tile as long as a page divides it already
    lightning_indexer._tiles: page <= config
a tile of which nothing is taken stores nothing
    lightning_indexer.collect: -> taken >= 0
    lightning_indexer.topk: taken >= 0
    localize_indices.localize: taken >= 0
a tile is packed as well by its whole width
    lightning_indexer.collect: -> taken < FEW
the lesser of both is what counts
    lightning_indexer.first_group: groups_of(rows, tokens
    lightning_indexer.request_at: groups_of(rows, tokens
the bracket's end becomes itself
    lightning_indexer.narrower: key <= high
the search is over
    lightning_indexer.narrower: count <= wanted
tokens of a key each are as many, and keys are counted before
    lightning_indexer.out_of_reach: cmp_ratio >= 1
packed requests have lengths: both are true
    lightning_indexer.request_at: tokens, Q_LENGTHS, Q_TND)
only groups without work have another request
    lightning_indexer.request_at: first, tokens, rows, Q_TND,
a number of tokens is true, and not used otherwise
    lightning_indexer.request_at: rows, Q_TND, tokens, TOKENS)
of two equal scores either is the highest
    lightning_indexer.sampled: v >= highest
scores of a group without a token, which nobody reads
    lightning_indexer.scores: left >= 0
the same queries, loaded again for every tile of keys
    lightning_indexer.scores: HEADS >= HEAD_TILE
what lies behind the keys that a row sees is not read
    lightning_indexer.scores: -> tl.store(rows_of, score)
    lightning_indexer.scores: -> (to + position + r, score)
    lightning_indexer.scores: r <= inside
only whether each of them is dense is asked
    lightning_indexer.select: q, of_query, w)
the room of the candidates comes in whole tiles
    lightning_indexer.topk: p <= known - s
where as many are there as are wanted, all are taken either way
    lightning_indexer.topk: most >= wanted
a row that is taken as a whole is counted first, for nothing
    lightning_indexer.topk: n >= chosen
a guess may narrow less; the passes by keys find the same
    lightning_indexer.topk: least, key2, key1, key3
    lightning_indexer.topk: least, key1, key3, key2
a bracket of one key is not narrowed by another pass
    lightning_indexer.topk: high - low >= 1
another guess, and the search ends at the same key
    lightning_indexer.topk: guess <= halved
where as many tie as are wanted, the cut leaves them all
    lightning_indexer.topk: here >= ties
position 0 is looked up at 0 either way
    lightning_indexer.values: position > 0 (2)
where exactly k lie above, none of the next ones is wanted
    merge_topk.choose: sum(above, 0) > k
where none is wanted, the search ends at -1 as well
    merge_topk.choose: ties >= 0
the least score stays itself
    merge_topk._tile: score >= LEAST_SCORE
no indexer of an NPU gives a position so far
    merge_topk._tile: position <= LONGEST
other tiles make the same products
    product._cut: config.tiles['PANELS'] < 8
    product._held: < tiling.A3.l1
a tile's first panel is there, and where all are whole another lies behind its depth
    product.panel_tiles: acc0, WHOLE_K, WHOLE_N)
both are one tensor
    sharedkv_prolog_pto.of_heads: _turn_heads(to_query, query,
    sharedkv_prolog_pto.of_heads: _turn_heads(to_index, index,
the lesser of both rows is stored first, and that is row 0
    sparse_attn_sharedkv.copies: other > 0 (3)
the entry behind the piece is found again, as the next one's first
    sparse_flash_attention._pages: at <= PIECE
a piece of rows more is copied, which nobody reads
    sparse_flash_attention.gather: piece <= (end + KEY_TILE
    sparse_flash_attention.collect: i <= (end + C.SPAN
a position so far is behind every key
    sparse_flash_attention_grad._by_position: rows >= ragged.LONGEST // block
a row that saw nothing has no slot, and no key counts it
    sparse_flash_attention_grad.row_sums: s >= 0
    sparse_lightning_indexer_grad_kl_loss._log_sums: peak >= -torch.inf
a tile more, which nobody reads
    sparse_lightning_indexer_grad_kl_loss.scores: start <= tl.load(last
    sparse_lightning_indexer_grad_kl_loss.targets: start <= tl.load(last
what a head that is not there has loaded is not used
    sparse_lightning_indexer_grad_kl_loss.targets: lse + token * heads + h)
    sparse_lightning_indexer_grad_kl_loss.targets: h <= heads (2)
"""


def _by_function(text: str) -> dict[str, list[tuple[str, str]]]:
    """Words and reasons of each function."""
    found: dict[str, list[tuple[str, str]]] = {}
    reason = ""
    for line in text.splitlines():
        if line.startswith(" "):
            function, words = line.strip().split(": ", 1)
            found.setdefault(function, []).append((words, reason))
        else:
            reason = line
    return found


_REASONS = _by_function(_WITHOUT_EFFECT)


@dataclass(frozen=True)
class Mutant(Planted):
    made: str = field(repr=False)  # digest of the mutated function's tree
    text: str = field(repr=False)  # the whole file

    @property
    def reason(self) -> str | None:
        """Why it changes no result."""
        words = _REASONS.get(f"{self.file}.{self.function}", ())
        return next((reason for word, reason in words if word in f"{self.title}$"), None)

    @property
    def place(self) -> str:
        return f"{self.file}.{self.function}"


Change = tuple[str, ast.expr]  # kind, what takes the place
_ours: set[str] = set()  # modules of ours that the file at hand imports


def _dropped_part(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for part, rest in ((node.left, node.right), (node.right, node.left)):
            if isinstance(part, ast.Name) and part.id in _PARTS:
                yield "a part dropped", rest


def _swapped(node: ast.expr) -> Iterator[Change]:
    """Neighbours in a call of a kernel or of a helper of ours; those of tl and torch have types."""
    if not isinstance(node, ast.Call):
        return
    function = node.func
    helper = isinstance(function, ast.Name) and not hasattr(builtins, function.id)
    launch = isinstance(function, ast.Subscript)
    base = function.value if isinstance(function, ast.Attribute) else None
    if not (helper or launch or (isinstance(base, ast.Name) and base.id in _ours)):
        return
    given = node.args
    for i in range(len(given) - 1):
        pair = given[i : i + 2]
        names = all(isinstance(x, ast.Name | ast.Attribute) for x in pair)
        if names and ast.unparse(pair[0]) != ast.unparse(pair[1]):
            swapped = [*given[:i], *pair[::-1], *given[i + 2 :]]
            yield "swapped", ast.Call(node.func, swapped, node.keywords)


def _moved_epsilon(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("sqrt") and node.args:
        inside = node.args[0]
        if isinstance(inside, ast.BinOp) and "eps" in ast.unparse(inside.right):
            outside = ast.Call(node.func, [inside.left, *node.args[1:]], node.keywords)
            yield "an epsilon moved", ast.BinOp(outside, ast.Add(), inside.right)
            yield "an epsilon dropped", outside


def _dropped_mask(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.load", "tl.store"):
        kept = [x for x in node.keywords if x.arg not in ("mask", "other")]
        if len(kept) < len(node.keywords):
            yield "a mask dropped", ast.Call(node.func, node.args, kept)


_CHANGES: tuple[Callable[[ast.expr], Iterator[Change]], ...] = (
    shifted,
    _dropped_part,
    _swapped,
    _moved_epsilon,
    _dropped_mask,
)


def mutants_of(file: str, text: str) -> list[Mutant]:
    """In the order of the text; only inside of functions."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()
    found: list[Mutant] = []
    counted: dict[tuple[str, ...], int] = {}
    tree = ast.parse(text)
    _ours.clear()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            _ours.update(alias.name for alias in node.names)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef):
            continue
        assert function.end_lineno is not None
        first, last = starts[function.lineno - 1], starts[function.end_lineno]
        for statement in function.body:
            for node in ast.walk(statement):
                if not isinstance(node, ast.expr):
                    continue
                for kind, place in (x for change in _CHANGES for x in change(node)):
                    assert node.end_lineno is not None and node.end_col_offset is not None
                    low = starts[node.lineno - 1] + node.col_offset
                    high = starts[node.end_lineno - 1] + node.end_col_offset
                    # as many lines as before: the kernels below stay the ones that were lowered
                    lines_kept = b"\n" * data.count(b"\n", low, high)
                    new = f"({ast.unparse(place)}".encode() + lines_kept + b")"
                    whole = data[:low] + new + data[high:]
                    function_text = data[first:low] + new + data[high:last]
                    made = digest(ast.dump(ast.parse(function_text)))  # its layout is no part
                    words = difference(ast.unparse(node), ast.unparse(place))
                    name = (function.name, kind, *words)
                    nth = counted.get(name, 0)
                    counted[name] = nth + 1
                    mutant = Mutant(file, *name, nth, made, whole.decode())
                    found.append(mutant)
    return found


@cache
def files_of(op: str) -> set[str]:
    """The files of npu_ops/ that the op's launcher is made of; none where no NPU runs it.  Nothing
    is imported: a mistake is planted before."""
    seen: set[str] = set()
    waiting = {BY_NAME[op].file} & places.files().keys()
    while waiting:
        seen |= waiting
        waiting = {x for file in waiting for x in places.imported(file)} - seen
    return seen - set(_LEFT_OUT)


@cache
def names_called() -> dict[str, set[str]]:
    """What each jitted function (file.function) calls, by the last name."""
    found: dict[str, set[str]] = {}
    for path in places.files().values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                calls = (x.func for x in ast.walk(node) if isinstance(x, ast.Call))
                names = {ast.unparse(x).rpartition(".")[2] for x in calls}
                found[f"{path.stem}.{node.name}"] = names
    return found


def kernels_with(title: str) -> set[str] | None:
    """The jitted functions that this one is part of, and itself; None: it belongs to a launcher."""
    if title not in names_called():
        return None
    found, waiting = {title}, [title]
    while waiting:
        name = waiting.pop().partition(".")[2]
        callers = {caller for caller, called in names_called().items() if name in called} - found
        found |= callers
        waiting += callers
    return found


@dataclass(frozen=True)
class Usual:
    """A case without a mistake."""

    launched: list[tuple[Any, ...]]
    kernels: set[str]
    digest: str  # of the launches, of the arguments and of the op's reference
    seconds: float  # to draw the arguments and to launch


Lowered = dict[Any, tuple[str, str, None]]
_WORKSPACE = tiling.WORKSPACE


def _drawn(case: Case) -> tuple[Inputs, dict[str, Any]]:
    """With the usual workspace, unless the case itself has another: here it shares its process."""
    tiling.WORKSPACE = _WORKSPACE
    inputs = Inputs(case.dtype, case.seed)
    return inputs, case.make(inputs)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


class _Asked(TorchDispatchMode):
    """What a launcher asks of PyTorch, tensors by whose they are: `names`, by address, or which of
    the results before."""

    def __init__(self, names: dict[int, Any]) -> None:
        super().__init__()
        self.names = names
        self.calls: list[Any] = []
        self.made: dict[int, Tensor] = {}  # alive: no other lies where one was

    def _described(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        at = value.untyped_storage().data_ptr()
        whose = [*self.made].index(at) if at in self.made else self.names.get(at)
        return whose, value.dtype, value.shape, value.stride(), value.storage_offset()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        if not function.is_view:
            self.calls.append((str(function), *map(self._described, given)))
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            at = x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0
            if at and at not in self.names:
                self.made.setdefault(at, x)
        return result

    @contextmanager
    def within_calls(self) -> Iterator[None]:
        ready = backends.Runner.ready

        @contextmanager
        def noted(runner: backends.Runner, arguments: dict[str, Any]) -> Iterator[None]:
            with self, ready(runner, arguments):
                yield

        backends.Runner.ready = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            backends.Runner.ready = ready  # type: ignore[method-assign]


def _launched(case: Case, arguments: dict[str, Any]) -> tuple[list[tuple[Any, ...]], set[str]]:
    """What decides the result of the call, kernel by kernel, without running it: the lowered text
    and what it is called with, tensors by whose they are and where they begin; last, what is given
    back and what is asked of PyTorch.  And the kernels' names."""
    names: dict[int, Any] = {}
    found: list[tuple[Any, ...]] = []
    drawn: list[bytes] = []  # what the launcher made of its arguments by itself

    def empty(*given: Any) -> Tensor:
        made = memory.empty(*given)
        names[made.untyped_storage().data_ptr()] = len(names)
        return made

    def described(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        whose = names.get(value.untyped_storage().data_ptr())
        if whose is None:
            drawn.append(_bytes(value))
        return whose, value.dtype, value.shape, value.stride(), value.storage_offset()

    def observe(launch: Launch, given: list[Any]) -> None:
        found.append((launch.lowered_key, launch.grid, *map(described, given)))

    for name, value in arguments.items():
        if isinstance(value, Tensor):
            names[value.untyped_storage().data_ptr()] = name
    recorder.execute, recorder.observe, launcher_memory.empty = False, observe, empty
    recorder.cube_cores = case.cores[0]
    asked = _Asked(names)
    register.forget()  # of a call like an earlier one nothing is noted
    with asked.within_calls():
        outputs = call(case, arguments)
    recorder.execute, recorder.observe, launcher_memory.empty = True, None, memory.empty
    listed = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs or ())
    if found:
        found.append((*map(described, listed), digest(*drawn), digest(repr(asked.calls))))
    kernels = {launch.kernel for launch in recorder.launches}
    recorder.launches = []
    return found, kernels


def baseline(op: str, cases: list[Case]) -> tuple[dict[str, Usual], Lowered]:
    """By title, and what was lowered for it."""
    prepare()
    module = BY_NAME[op].module
    read = sources.of(*sources.path(module), f"custom.dispatch.reference.{module}")
    found = {}
    for case in cases:
        began = time.process_time()
        _, arguments = _drawn(case)
        drawn = [_bytes(x) if isinstance(x, Tensor) else repr(x) for x in arguments.values()]
        launched, kernels = _launched(case, arguments)
        both = digest(repr(launched[:-1]), read, *drawn)
        found[case.title] = Usual(launched, kernels, both, time.process_time() - began)
    return found, {key: (ttir, linalg, None) for key, (ttir, linalg, _) in recorder.lowered.items()}


def attempt(
    mutant: Mutant, number: int, cases: list[Case], usual: dict[str, Usual], asked: Any, most: int
) -> str | None:
    """What the first case that notices says, or nothing; `asked[number]` is the case at work.  None
    when `most` cases ran and there are more."""
    controls.plant_text(mutant.file, mutant.text)
    prepare()
    CpuKernel.effort = "-O1"  # what is built runs once
    # a kernel without an end listens to no handler: the signal ends the process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    mutated = kernels_with(f"{mutant.file}.{mutant.function}")
    asked[number] = len(cases)
    if mutated is None and (broken := limits.broken()):
        return broken[0]
    for at, case in enumerate(cases):
        asked[number] = at
        if mutated is not None and mutated.isdisjoint(usual[case.title].kernels):
            continue
        if not most:
            return None
        signal.setitimer(signal.ITIMER_PROF, _PATIENCE)
        before = usual[case.title].launched
        if before and before == _launched(case, _drawn(case)[1])[0]:
            continue
        share, findings = measure(case, *_drawn(case))
        if share > 1:
            return f"{case.name}: {findings[0]}"
        most -= 1
    return ""


def planted_in(files: Iterable[str]) -> list[Mutant]:
    return [
        mutant
        for file in sorted(files)
        for mutant in mutants_of(file, places.files()[file].read_text())
    ]


def _asked(
    calls: list[tuple[Any, ...]], every: dict[str, str], records: dict[str, Verdict], jobs: int
) -> Iterator[tuple[Any, ...]]:
    """Fills in `records`; yields what is to be asked once more."""
    began = time.time()
    for done, (given, said) in enumerate(isolated.each(attempt, calls, jobs), 1):
        mutant, number, order, usual, asked, _ = given
        if said is None and mutant.reason is None:
            yield given[:-1]
        else:
            said = said or ""
            case = [*(case.title for case in order), LIMITS][asked[number]] if said else ""
            by = usual[case].digest if said else every[mutant.file]
            said = " ".join(str(said)[:120].split())
            records[mutant.title] = Verdict(mutant.file, mutant.kind, mutant.made, by, case, said)
            if not said and mutant.reason is None:
                print(f"SURVIVES {mutant.title}", flush=True)
        if done % 20 == 0 or done == len(calls):
            left = (time.time() - began) / done * (len(calls) - done) / 60
            print(f"{done} of {len(calls)}, {left:.0f} minutes left", flush=True)
            verdict_file.write(RESULTS, records)


def run(cases: list[Case], changed: bool, sample: int, seed: int, jobs: int) -> int:
    """Plant, tell, and write mutants.json; 1 if one survives that nobody explained."""
    records = verdict_file.read(RESULTS, Verdict)
    by_file: dict[str, list[Case]] = {}
    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
        for file in files_of(case.op):
            by_file.setdefault(file, []).append(case)
    # a file that other ops use as well is left to the run of them all
    others = {file for op in BY_NAME.keys() - by_op.keys() for file in files_of(op)}
    planted = planted_in(by_file.keys() - others)
    of_all = len(planted)
    if changed:
        planted = [x for x in planted if x.title not in records or records[x.title].made != x.made]
    if sample:
        planted = random.Random(seed).sample(planted, min(sample, len(planted)))
    usual: dict[str, Usual] = {}
    for (op, _), answer in isolated.each(baseline, list(by_op.items()), jobs):
        if isinstance(answer, isolated.Crash):
            sys.exit(f"{op} without a mistake: {answer}")
        usual |= answer[0]
        recorder.lowered |= answer[1]  # every process of a mutant begins with these
    usual[LIMITS] = Usual([], set(), digest(sources.of(limits.__name__)), 0)
    every = {
        file: digest(*(usual[case.title].digest for case in of_file), usual[LIMITS].digest)
        for file, of_file in by_file.items()
    }
    for file, of_file in by_file.items():
        text = places.files()[file].read_text()
        unchanged = Mutant(file, "", "nothing", "", "", 0, "", text)
        first = min(of_file, key=lambda case: usual[case.title].seconds)
        for _, answer in isolated.each(attempt, [(unchanged, 0, [first], usual, [0], 1)], 1):
            if answer:
                sys.exit(f"without a mistake in {file}: {answer}")
    names_called()  # once, before the processes part
    caught = Counter((title.partition(": ")[0], x.case) for title, x in records.items() if x.said)
    asked = multiprocessing.RawArray("i", len(planted))
    calls: list[tuple[Any, ...]] = []
    for mutant in planted:
        before = records.get(mutant.title)
        first = before.case if before else ""
        if before and before.made == mutant.made:
            by = usual[first].digest if first in usual else every[mutant.file]
            if before.by == by:
                continue
        order = sorted(
            by_file[mutant.file],
            key=lambda case: (
                case.title != first,
                -caught[f"{mutant.file}.{mutant.function}", case.title],
                usual[case.title].seconds,
            ),
        )
        calls.append((mutant, len(calls), order, usual, asked))
    print(f"{len(planted)} of {of_all} mistakes, {len(calls)} without a verdict", flush=True)
    random.Random(seed).shuffle(calls)  # a run that is stopped has asked a sample
    for most in (_FEW, len(cases)):
        calls = list(_asked([(*call, most) for call in calls], every, records, jobs))
    found = [records[mutant.title] for mutant in planted]
    survivors = [m for m, x in zip(planted, found, strict=True) if not x.said]
    unexplained = [mutant.title for mutant in survivors if mutant.reason is None]
    wrong = [m.title for m, x in zip(planted, found, strict=True) if x.said and m.reason]
    print(f"{len(planted) - len(survivors)} of {len(planted)} caught")
    for title in unexplained:
        print(f"FAIL survives: {title}")
    for title in wrong:
        print(f"FAIL explained, but caught: {title}")
    if not sample and not changed and not others:
        verdict_file.write(RESULTS, {mutant.title: records[mutant.title] for mutant in planted})
    return bool(unexplained or wrong)


@dataclass(frozen=True)
class Verdict:
    file: str
    kind: str
    made: str  # digest of the mutated function's tree
    by: str  # digest of the case that noticed, or of all of them
    case: str  # title; empty: it survived
    said: str


def _mutated_files() -> set[str]:
    return {file for op in BY_NAME for file in files_of(op)}


def unmatched() -> list[str]:
    """Reasons that explain nothing which is planted, and reasons of what a case catches."""
    records = verdict_file.read(RESULTS, Verdict)
    planted = planted_in(_mutated_files())
    used = {
        (function, word)
        for function, words in _REASONS.items()
        for word, _ in words
        for x in planted
        if f"{x.file}.{x.function}" == function and word in f"{x.title}$"
    }
    listed = [(function, word) for function, words in _REASONS.items() for word, _ in words]
    gone = [f"mutants.py explains what nobody plants: {x}" for x in listed if x not in used]
    caught = [
        f"mutants.py explains what is caught: {x.title}"
        for x in planted
        if x.reason and x.title in records and records[x.title].said
    ]
    return gone + caught


def table() -> list[str]:
    """Markdown, of the verdicts on today's kernels."""
    records = verdict_file.read(RESULTS, Verdict)
    planted = planted_in(_mutated_files())
    known = [
        (x, records[x.title])
        for x in planted
        if x.title in records and records[x.title].made == x.made
    ]
    kinds = sorted({x.kind for x, _ in known})
    lines = ["| file | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds)]
    for file in sorted({x.file for x, _ in known}):
        cells = []
        for kind in kinds:
            here = [bool(verdict.said) for x, verdict in known if (x.file, x.kind) == (file, kind)]
            cells.append(f"{sum(here)} of {len(here)}" if here else "")
        lines.append(f"| {file} | " + " | ".join(cells) + " |")
    silent = [x for x, verdict in known if not verdict.said]
    caught, left = len(known) - len(silent), len(planted) - len(known)
    without_effect = sum(x.reason is not None for x in silent)
    lines += [
        "",
        f"Of {len(planted)}: {caught} caught, {without_effect} without effect,"
        f" {len(silent) - without_effect} survive, {left} not asked anew since their function"
        " changed.  Those that no case notices:",
        "",
    ]
    lines += [f"- `{x.title}`: {x.reason or 'survives'}" for x in silent]
    return lines
