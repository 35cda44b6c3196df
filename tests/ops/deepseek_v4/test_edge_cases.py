# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The edges of DeepSeek-V4's ops, and where each is tested: on every backend that has the op by the
test named here, on Ascend by the cases that its compilers and the lowered form run."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
C, A, L, P = (
    "test_compressor",
    "test_sparse_attn_sharedkv",
    "test_sparse_attention_v4_pto",
    "test_sharedkv_prolog_pto",
)
# an edge, its tests, and its cases on Ascend
EDGES = {
    "p < m - 1: no entry yet, and window -1 has no rows": (
        [(C, "test_first_windows"), (A, "test_window_and_position"), (C, "test_visible_entries")],
        ["sparse_attn_sharedkv: chosen, 8 heads", "compressor: CSA, decode, ring"],
    ),
    "p = m - 1, m, 2m - 1": (
        [
            (C, "test_first_windows"),
            (A, "test_the_entry_that_closes_at_a_token_is_visible_to_it"),
            (C, "test_lengths_of_tokens_beyond_the_entries"),
        ],
        ["compressor: HCA, closing", "lightning_indexer: 4 tokens a key, 9 of a request"],
    ),
    "several closes in one call": (
        [(C, "test_rows_of_the_output_are_counted_from_the_first_window")],
        ["compressor: CSA, chunks longer than the ring", "compressor: packed"],
    ),
    "a close inside a rejected draft, closed again by other tokens": (
        [(C, "test_a_close_inside_a_draft_is_closed_again_by_other_tokens")],
        ["compressor: CSA, decode, ring"],  # a call that starts earlier is any call
    ),
    "rejection back across a close": ([(C, "test_rejected_drafts")], []),
    "a chunk that begins inside a window": (
        [(C, "test_ragged_requests"), (C, "test_prefix_hit")],
        ["compressor: HCA, a chunk", "compressor: CSA, chunks by page"],
    ),
    "a chunk longer than the ring": (
        [(C, "test_ragged_requests"), (C, "test_states_are_kv_and_z_in_float32")],
        [
            "compressor: CSA, chunks longer than the ring",
            "sparse_attention_v4_pto: CSA, a chunk longer than the ring",
        ],
    ),
    "a ring exactly at its bound": (
        [
            (C, "test_ragged_requests"),
            (C, "test_rejected_drafts"),
            (C, "test_a_ring_of_one_row_less_loses_a_draft"),
        ],
        ["compressor: CSA, decode, ring"],
    ),
    "seqused 0, s1, mixed": (
        [
            (C, "test_seqused"),
            (A, "test_every_layout"),
            (L, "test_seqused_of_none_all_and_mixed"),
            (P, "test_seqused_of_none_all_and_mixed"),
        ],
        ["sharedkv_prolog_pto: 2 of 3 tokens there, uneven", "compressor: beyond the tables"],
    ),
    "b = 0": (
        [
            (C, "test_no_requests_and_no_tokens"),
            (A, "test_no_requests_and_no_tokens"),
            (L, "test_no_requests"),
            (P, "test_no_requests"),
        ],
        [],  # launches nothing
    ),
    "act_seqs 0": (
        [
            (C, "test_seqused"),
            (A, "test_nothing_to_see"),
            (C, "test_visible_entries"),
            (L, "test_no_tokens"),
            (P, "test_no_tokens_yet"),
        ],
        ["sparse_attn_sharedkv: lengths 0, fewer than tokens"],
    ),
    "more tokens than act_seqs: positions below 0": (
        [
            (C, "test_tokens_before_position_0_are_absent"),
            (A, "test_every_layout"),
            (L, "test_tokens_before_the_first"),
        ],
        [
            "sharedkv_prolog_pto: before the first position",
            "lightning_indexer: 4 tokens a key, more tokens than keys",
        ],
    ),
    "-1 pages in each table": (
        [
            (C, "test_absent_pages"),
            (C, "test_pages_of_entries_absent_shared_and_apart"),
            (A, "test_pages_that_are_not_there"),
            (L, "test_pages_that_are_not_there"),
            (P, "test_pages_that_are_not_there"),
        ],
        [
            "compressor: beyond the tables",
            "sparse_attn_sharedkv: absent pages",
            "sparse_attn_sharedkv: absent pages, chosen",
            "sharedkv_prolog_pto: pages missing",
            "lightning_indexer: paged, a page missing",
        ],
    ),
    "p < W, p = W - 1, W": (
        [(A, "test_window_and_position")],
        ["sparse_attn_sharedkv: sliding, 8 heads", "sparse_attn_sharedkv: absent pages"],
    ),
    "P does not divide W": (
        [(A, "test_pages_that_do_not_divide_the_window"), (L, "test_windows")],
        ["sparse_attn_sharedkv: a window of 300, pages of 256"],
    ),
    "k above, at and below the number of entries": (
        [
            (C, "test_visible_entries"),
            (A, "test_more_indices_than_entries"),
            (L, "test_more_as_many_and_fewer_entries_than_are_chosen"),
        ],
        [
            "lightning_indexer: 4 tokens a key, k 512 of 4100",
            "lightning_indexer: 2 tokens a key, all keys",
            "sparse_attention_v4_pto: CSA, everything selected",
        ],
    ),
    "indices -1, at or behind the limit, equal, past the table": (
        [(A, "test_indices_that_name_nothing"), (A, "test_equal_indices_count_apart")],
        ["sparse_attn_sharedkv: chosen, 8 heads", "sparse_attn_sharedkv: int64, beyond 32 bits"],
    ),
    "sinks -inf, 1e4, +inf, None": (
        [(A, "test_sinks"), (L, "test_sinks")],
        [
            "sparse_attn_sharedkv: sinks of all sizes",
            "sparse_attn_sharedkv: no sinks, no lse",
        ],
    ),
    "score ties at 0": (
        [
            (C, "test_ties_at_0_go_to_the_first_entries"),
            (L, "test_equal_scores_choose_the_first_entries"),
        ],
        ["lightning_indexer: ties alone, two tiles"],
    ),
    "offsets past 2^31": (
        [
            (C, "test_offsets_past_2_to_the_31"),
            (A, "test_rows_behind_2_to_the_31"),
            (L, "test_offsets_past_2_to_the_31"),
            (P, "test_offsets_past_2_to_the_31"),
        ],
        [
            "compressor: pages far apart",
            "sparse_attn_sharedkv: pages far apart",
            "sparse_attn_sharedkv: pages far apart, chosen",
            "sharedkv_prolog_pto: pages far apart",
            "lightning_indexer: pages far apart",
        ],
    ),
    "a page stride above a page": (
        [
            (C, "test_pages_that_lie_apart"),
            (C, "test_pages_of_entries_absent_shared_and_apart"),
            (A, "test_every_layout"),
            (L, "test_caches_cut_from_one_pool"),
            (P, "test_pages_that_lie_apart_in_one_pool"),
        ],
        [
            "sparse_attn_sharedkv: pages apart",
            "sharedkv_prolog_pto: pages apart",
            "lightning_indexer: pages apart",
        ],
    ),
    "graph replay": (
        [
            (C, "test_a_graph_replays_with_other_lengths"),
            (C, "test_a_graph_of_the_indexer_replays_with_other_lengths"),
            (A, "test_a_graph_replays_with_other_lengths"),
            (L, "test_a_captured_step_whose_lengths_change"),
            (P, "test_equal_calls_give_equal_bits_and_a_replay_follows_its_lengths"),
        ],
        [],  # an NPU's graphs need the device
    ),
    "two requests share pages of entries": (
        [
            (C, "test_prefix_hit"),
            (C, "test_pages_of_entries_absent_shared_and_apart"),
            (A, "test_two_requests_share_the_pages_of_entries"),
            (L, "test_two_requests_share_pages_of_entries"),
        ],
        [],  # a request reads its own row of the table
    ),
    "m = 1, 2, 3": (
        [
            (C, "test_ragged_requests"),
            (C, "test_visible_entries"),
            (A, "test_ratios"),
            (L, "test_ratios"),
        ],
        [
            "compressor: m = 1",
            "compressor: m = 2, coff 2, halves, fp16",
            "compressor: m = 3, no rotation, no pages",
            "lightning_indexer: 3 tokens a key, page 8",
            "sparse_attn_sharedkv: a window of 1, ratio 1",
        ],
    ),
    "heads of a shard": (
        [
            (A, "test_heads_of_a_shard"),
            (L, "test_heads_of_a_shard"),
            (P, "test_heads_of_a_shard"),
        ],
        [
            "sparse_attn_sharedkv: sliding, 8 heads",
            "sparse_attn_sharedkv: all entries, 20 heads",
            "sparse_attn_sharedkv: chosen, 128 heads",
        ],
    ),
}


@pytest.mark.parametrize("edge", EDGES)
def test_an_edge_has_tests_on_every_backend(edge):
    tests, cases = EDGES[edge]
    assert tests
    for module, name in tests:
        test = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        assert {"device", "precision"} & {*inspect.signature(test).parameters}, name
    record = json.loads((ROOT / "ascend/results.json").read_text())["cases"]
    assert {*cases} <= record.keys(), {*cases} - record.keys()
