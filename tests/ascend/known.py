# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What a configuration may show, and why: every other finding fails the run.

A kernel that a build refuses is never listed: every build compiles every shipped configuration.
An entry that meets nothing any more fails the run as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .toolchain import BUILDS, NEWEST

TIGHT = 160  # KiB of UB that the newest build may plan, of 192

# kinds of findings, and the builds on which they are judged
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "multiply": ("the multiply reads another tile than it was given", BUILDS),
    "index": ("a masked load through an index that is not clamped", BUILDS),
    "retry": ("compiled at the second attempt, without double buffering", BUILDS),
    "repeat": ("both vector sub-cores repeat the same vector work", BUILDS),
    # the older builds give every workspace one slot
    "turns": ("cube and vector take turns: a workspace of one slot", (NEWEST,)),
    # the older builds make loops of 64 bit compares as well
    "scalar": ("innermost loops that load or store single elements", (NEWEST,)),
    "tight": (f"more than {TIGHT} KiB of UB", (NEWEST,)),
}


@dataclass(frozen=True)
class Known:
    """Findings of `kind` in the configurations of `kernel` that hold all of `tiles`."""

    kernel: str
    kind: str
    reason: str
    builds: tuple[str, ...] = BUILDS
    tiles: tuple[tuple[str, int], ...] = ()

    @property
    def where(self) -> str:
        """The configurations and builds, in words; empty for all."""
        tiles = [f"{name}={value}" for name, value in self.tiles]
        builds = [] if self.builds == BUILDS else [f"({', '.join(self.builds)})"]
        return " ".join(tiles + builds)

    def covers(self, kernel: str, config: Any, kind: str, build: str) -> bool:
        values: Mapping[str, Any] = config.keywords
        return (
            (kernel, kind) == (self.kernel, self.kind)
            and build in self.builds
            and all(values.get(name) == value for name, value in self.tiles)
        )


_SUMS = "the sums of a row come out of UB one by one; the row itself moves in bulk"
_CHUNK = "one number a chunk of 64 tokens, whose tiles move in bulk"
_STARTS = "prefix sums, each once a core, beside whole rows"
_SCALAR = {
    "indexer_loss.row_loss": _SUMS,
    "indexer_loss_backward.row_grad": _SUMS,
    "sparse_lightning_indexer_grad_kl_loss.row_loss": _SUMS,
    "lightning_indexer.scores": "the page of a tile of keys, which is one copy",
    "block_indexer.scores": "the page of a tile of keys, which is one copy; one count a head",
    "lightning_indexer.collect": "one count a tile of scores",
    "lightning_indexer.topk": "one count a tile of scores",
    "lightning_indexer.values": "one score an index: there is no gather of single elements",
    "lightning_indexer.tail": "a row's open entry, one number behind those that move in bulk",
    "lightning_indexer_grad.spread": "the request of a token, beside tiles of slots",
    "localize_indices.localize": "what is taken is read again by its slot, one load each",
    "lightning_indexer_grad.grad_query": "the length of a request, beside tiles of keys",
    "sparse_flash_attention.resolve": "the page of an index is looked up, one load each",
    "sparse_flash_attention.gather": "one index a row, and the row is one copy",
    "quantized_rows.query_heads": "one scale a token, beside tiles of heads",
    "quantized_rows.index_heads": "one scale a token, beside tiles of heads",
    "sparse_flash_attention.collect": "two indices a copy of two rows",
    "sparse_flash_attention.attend": "the length of a token's selection, beside a tile of keys",
    "sparse_flash_attention.merge": "one maximum and one sum a head, whose parts move in bulk",
    "blocks_in_place.note": "what a token sees, a few numbers each",
    "blocks_in_place.weigh": "the place of a run of keys, which is one copy",
    "blocks_in_place.accumulate": "the place of a run of keys, which is one copy",
    "fused_infer_attention_score_v2.note": "what a token sees, a few numbers each",
    "fused_infer_attention_score_v2.weigh": "the page of a tile of keys, which is one copy",
    "fused_infer_attention_score_v2.accumulate": "the page of a tile of keys, which is one copy",
    "sparse_attn_sharedkv.note": "what a token sees, a few numbers each",
    "sparse_attn_sharedkv.collect": "two slots a copy of two rows",
    "sparse_attn_sharedkv.attend": "the run of a tile of keys, which is one copy",
    "sparse_attn_sharedkv.weigh": "the run of a tile of keys, which is one copy",
    "sparse_attn_sharedkv.accumulate": "the run of a tile of keys, which is one copy",
    "index_cache_write.write": "one slot a token, whose row is one copy",
    "latent_cache_write.write": "one slot a token, and each part of its row is one copy",
    "indexer_loss.gather": "two indices a copy of two rows",
    "gated_rms_norm.normalise": _SUMS,
    "gated_rms_norm_grad.through": _SUMS,
    "causal_conv1d.convolve": _STARTS,
    "causal_conv1d.finish": _STARTS,
    "causal_conv1d_grad.walk": _STARTS,
    "fused_causal_conv1d.push": _STARTS,
    "fused_causal_conv1d.fill": _STARTS,
    "causal_conv1d_update.update": "a sequence's slot and row, a token's parent, beside whole rows",
    "fused_sigmoid_gating_delta_rule_update.update": "a head's gates, about 16 numbers a token",
    "chunk_gated_delta_rule.walk": _CHUNK,
    "chunk_gated_delta_rule_grad.walk_states": _CHUNK,
    "chunk_gated_delta_rule_grad.walk_grads": _CHUNK,
    "chunk_gated_delta_rule_grad.crosses": _CHUNK,
    "chunk_gated_delta_rule_grad.dots": _CHUNK,
    "chunk_kda_grad.squares": _CHUNK,
    "chunk_kda_grad.crosses": _CHUNK,
    "chunk_kda_grad.gates": _CHUNK,
    "compressor.finish": "the window and the page of an entry, whose row moves in bulk",
    "before_attention.tokens": "what a token sees, a few numbers each",
    "before_attention.heads": "the window and the page of an entry, the page of a token, a tile of"
    " heads' length, whose rows move in bulk",
    "compressor.keep": "the request and the page of a token, whose state moves in bulk",
}
# the state of a chunk is needed by the next one: nothing runs ahead
_CHAIN = "a chunk needs the state of the one before: there is nothing to work on meanwhile"
_TURNS = {
    "chunk_gated_delta_rule.walk": _CHAIN,
    "chunk_kda.walk": _CHAIN,
    "chunk_kda_grad.walk_states": _CHAIN,
    "chunk_kda_grad.walk_grads": _CHAIN,
    "chunk_gated_delta_rule_grad.walk_states": _CHAIN,
    "chunk_gated_delta_rule_grad.walk_grads": _CHAIN,
    "sparse_flash_attention.attend": "a core has one tile: there is no other to have under way",
}

# build 1.0.0 shares no masked store of a mixed kernel between the vector units
_TAIL = "the last rows of a request are stored with a mask"
# with and without masks, transposes, an initial state; linked to the other tiles or not
_CARRIED = "a state that a loop carries, beside other stored tiles, is shared in no form tried"
# expanded or loaded as equal columns, with and without the masks
_VECTOR = "a loaded vector along the side that 1.2.0 shares, which shares no tile without one"
_OLDEST = {
    "lightning_indexer.scores": "the last keys of a row are stored with a mask; 1.2.0 shares no"
    " store without one",
    "block_indexer.scores": "the maxima of a block leave its loop and are stored with a mask",
    "fused_infer_attention_score_v2.weigh": "the masks of several tokens, made of a vector of rows",
    "fused_attention.attend": _TAIL + ": packed sequences, and rows that fill no tile",
    "chunk_gated_delta_rule.walk": _CARRIED,
    "chunk_gated_delta_rule.outputs": _TAIL,
    "chunk_kda.walk": _CARRIED,
    "chunk_kda_grad.walk_states": _CARRIED,
    "chunk_kda_grad.walk_grads": _CARRIED,
    "chunk_gated_delta_rule_grad.walk_states": _CARRIED,
    "chunk_gated_delta_rule_grad.walk_grads": _CARRIED,
    "fused_attention_backward.grad_keys": _VECTOR,
    "fused_attention_backward.grad_query": _VECTOR
    + "; the tiles without masks apart, which save the others' compares, are not shared either",
    "lightning_indexer_grad.grad_keys": _VECTOR,
    "lightning_indexer_grad.spread": "tiles made of vectors of slots alone, in every order tried",
    "sparse_flash_attention_grad.grad_query": "the mask of keys, with any other mask or compare as"
    " well; none is needed only if absent rows were zeros",
    "sparse_flash_attention_grad.grad_keys": _VECTOR,
    "indexer_loss.head_sums": "whole tiles, loaded and stored without a mask, are not shared",
}
_REPEAT = (
    Known(
        "absorption.absorb",
        "repeat",
        "pairs that lie side by side are not shared; the rotation hides behind the cube's weights,"
        " and would be a launch of its own",
    ),
    *(Known(kernel, "repeat", reason, ("1.0.0",)) for kernel, reason in _OLDEST.items()),
    *(
        Known(
            "lightning_indexer.scores",
            "repeat",
            "the sums of several tokens, as slices of a tile as well, are shared by 1.2.0 alone",
            ("1.1.0",),
            (("TOKENS", tokens),),
        )
        for tokens in (2, 4)
    ),
    Known(
        "sparse_flash_attention.attend",
        "repeat",
        "weights of 128 heads and 128 keys that the cube reads are shared by the newer builds",
        ("1.0.0",),
        (("HEAD_TILE", 128),),
    ),
    Known(
        "lightning_indexer_grad.grad_query",
        "repeat",
        "the gradient of the weights leaves the loop; stored inside it, 1.2.0 is wrong",
        ("1.0.0", "1.1.0"),
    ),
    Known(
        "hc_pre.mix",
        "repeat",
        "the squares of a tile, summed over a loop beside its product, are shared by 1.2.0 alone",
        ("1.0.0", "1.1.0"),
    ),
    *(
        Known(
            kernel,
            "repeat",
            "weights of scores out of memory: those of keys by heads are shared by 1.2.0 alone (by"
            " 1.1.0 in a square tile as well), those of heads by keys by the older ones alone",
            ("1.0.0", "1.1.0"),
        )
        for kernel in (
            "blocks_in_place.accumulate",
            "sparse_flash_attention.accumulate",
            "sparse_attn_sharedkv.accumulate",
            "fused_infer_attention_score_v2.accumulate",
        )
    ),
)
_UPDATE = "fused_sigmoid_gating_delta_rule_update.update"
_HALF = "half of the state's tile plans nearly as much, with twice the gates and norms"
_SPREAD = (
    "the plan spreads what UB holds: half of the keys plan as much, and with half of the rows D96"
    " takes a fifth longer by the estimate"
)
_TIGHT = (
    *(Known(_UPDATE, "tight", _HALF, tiles=(("VALUE_TILE", size),)) for size in (64, 32)),
    Known(
        "quantized_rows.latents",
        "tight",
        "a query latent of 2048 and its int8 form; where it did not fit, memory would be shared",
        tiles=(("MOST", 2048),),
    ),
    Known(
        "chunk_gated_delta_rule.triangles",
        "tight",
        "a chunk's squares beside the rows that are eliminated: 177 to 191 KiB, and one is left",
    ),
    Known(
        "before_attention.heads",
        "tight",
        "heads of 512 and index keys beside them; half of the heads take half as long again",
    ),
    *(
        Known(
            "fused_attention.attend", "tight", _SPREAD, tiles=(("Q_TILE", rows), ("KEY_TILE", 64))
        )
        for rows in (128, 64)
    ),
)

KNOWN = (
    *_REPEAT,
    *_TIGHT,
    *(Known(kernel, "scalar", reason) for kernel, reason in _SCALAR.items()),
    *(Known(kernel, "turns", reason) for kernel, reason in _TURNS.items()),
)

_met: set[Known] = set()


def expected(kernel: str, config: Any, kind: str, build: str) -> Known | None:
    """The entry that lists this finding, or None."""
    for entry in KNOWN:
        if entry.covers(kernel, config, kind, build):
            _met.add(entry)
            return entry
    return None


def wrong(kernel: str, kind: str, build: str) -> bool:
    """Whether no configuration of the kernel may show this with this build."""
    listed = any((x.kernel, x.kind) == (kernel, kind) and build in x.builds for x in KNOWN)
    return build in KINDS[kind][1] and not listed


def unused() -> list[str]:
    """After all rows were looked at: the entries that met nothing."""
    return [f"known.py: {x.kernel} {x.kind} {x.where}" for x in KNOWN if x not in _met]
