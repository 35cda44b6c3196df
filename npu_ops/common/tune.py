# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every tile configuration that ships, by kernel.  tests/ascend runs and compiles each of them.

`tiles` are constexpr arguments of the kernel, `options` are those of the Ascend compiler; each is
a constexpr parameter of its kernel as well, since triton-ascend 3.2.0 prints a warning at keywords
that are none, and takes it from there all the same.  A launcher takes the only configuration, the
one that covers its size, or ranks some of the table itself.
Chosen by what compiles inside the memories with double buffering; none was timed on a device.

The compiler is the machine's, and another build may refuse a configuration.  The launcher then
begins anew, or the stage of it does, and its choice falls on the next one: see `retrying`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

from ...dispatch import log
from ...dispatch.errors import NotSupported
from . import refusals


@dataclass(frozen=True)
class Config:
    tiles: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    # of one that was chosen: the kernel, and what else decides about its size
    kernel: str = ""
    shape: tuple[Any, ...] = ()

    def __str__(self) -> str:
        both = {**self.tiles, **self.options}
        return " ".join(f"{name}={value}" for name, value in both.items()) or "no tile"

    @property
    def title(self) -> str:
        """What a refusal is remembered by."""
        return " ".join((self.kernel, str(self), *(("for", str(self.shape)) if self.shape else ())))

    @property
    def keywords(self) -> dict[str, Any]:
        """What a launch takes that follows at once: if it does not compile, this is to blame."""
        call = _call.get()
        if call is not None:
            call.launching = self if self.kernel else None  # None: it was not chosen here
        return {**self.tiles, **self.options}


# of a product that leaves L0C, a second sum: the cube makes the next one while it is stored
_SUMS_TWICE = {"limit_auto_multi_buffer_of_local_buffer": "no-limit"}


def _of_heads(tiles: tuple[int, ...], keys: int, slots: int) -> tuple[Config, ...]:
    """A tile of heads by one of keys."""
    options = {"set_workspace_multibuffer": slots}
    return tuple(Config({"HEAD_TILE": heads, "KEY_TILE": keys}, options) for heads in tiles)


def _weigh(slots: int) -> tuple[Config, ...]:
    """Of attention in two passes; no square tile: build 1.2.0 dies of it."""
    return tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": keys}, {"set_workspace_multibuffer": slots})
        for heads, keys in ((8, 64), (16, 64), (32, 64), (64, 128), (128, 64))
    )


def _accumulate(slots: int) -> tuple[Config, ...]:
    """Of those that load as little the first is taken."""
    return tuple(
        Config(
            {"HEAD_TILE": heads, "KEY_TILE": 128, "PIECES": pieces, "PARTS": 8},
            {"set_workspace_multibuffer": slots},
        )
        for pieces, most in ((2, 128), (4, 32))
        for heads in (128, 64, 32, 16, 8)
        if heads <= most
    )


TABLE: dict[str, tuple[Config, ...]] = {
    # a depth of 128 for those that 512 does not divide, and for short ones; one weight alone may
    # have tiles of 10 and 11 panels
    "product.nz_products": (
        *(
            Config({"ROWS": rows, "PANELS": panels, "DEPTH": depth})
            for rows in (16, 32, 64)
            for panels, depth in ((8, 512), (4, 512), (4, 128), (11, 512), (10, 512))
        ),
        *(Config({"ROWS": 128, "PANELS": panels, "DEPTH": 256}) for panels in (8, 4, 11, 10)),
        # int8: panels of 32 columns; the last depth takes what the other does not divide
        *(
            Config({"ROWS": rows, "PANELS": 4, "DEPTH": depth, "WIDE": 32})
            for rows in (16, 32, 64, 128)
            for depth in (512, 128)
        ),
    ),
    # without double buffers: the panels of a tile take turns
    "product.held_products": tuple(
        Config({"ROWS": rows, "PANELS": panels}, {"multibuffer": False})
        for rows, most in ((16, (2,)), (128, (4, 2)))
        for panels in most
    ),
    # 256 bytes of a row: of 16 bits, and of int8
    "product.nd_product": tuple(
        Config({"ROWS": rows, "COLUMNS": 128, "DEPTH": depth})
        for depth in (128, 256)
        for rows in (16, 32, 64, 128)
    ),
    "absorption.absorb": tuple(
        Config({"ROWS": rows, "COLUMNS": columns, "DEPTH": 128, "HEAD_TILE": 16})
        for rows, columns in ((16, 256), (32, 128), (64, 128), (128, 128))
    ),
    "rows.finish": (Config({"WIDTH": 2048}), Config({"WIDTH": 4096}, {"multibuffer": False})),
    "rows.rotate_heads": tuple(Config({"HEAD_TILE": heads}) for heads in (8, 16, 32)),
    # the key tile is a page of 128, or the largest of these that divides a page; several tokens of
    # a request share it where their heads fill a tile
    "lightning_indexer.scores": tuple(
        Config(
            {"HEAD_TILE": heads, "TOKENS": tokens, "KEY_TILE": keys},
            {"set_workspace_multibuffer": 5} | _SUMS_TWICE,
        )
        for tokens, keys, all_heads in (
            (1, 128, (16, 32, 64)),
            (1, 64, (16, 32, 64)),
            (1, 32, (16, 32, 64)),
            (1, 16, (16, 32, 64)),
            (2, 128, (64,)),
            (4, 128, (16, 32)),
            (4, 64, (64,)),
        )
        for heads in all_heads
    ),
    "block_indexer.scores": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": keys}, {"set_workspace_multibuffer": 6})
        for keys in (16, 128)
        for heads in (16, 64)
    ),
    "lightning_indexer.collect": (
        Config({"TILE": 1024, "FEW": 128, "QUARTER": 1024, "EACH": 8, "COUNT_TILE": 4096}),
    ),
    "lightning_indexer.topk": (Config({"COUNT_TILE": 1024, "SORT_TILE": 1024}),),
    "lightning_indexer.values": (Config({"PIECE": 1024}),),
    "lightning_indexer.tail": (Config({"PIECE": 1024}),),
    # positions come in tiles of HIGH_TILE rows of 128; the oldest build has no room for 64 slots
    "lightning_indexer_grad.spread": (Config({"HIGH_TILE": 64, "SLOTS": 32}),),
    "lightning_indexer_grad.grad_keys": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 32, 64)
    ),
    "lightning_indexer_grad.grad_query": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 32, 64)
    ),
    # one row of indices at a time, in pieces
    "sparse_flash_attention.resolve": (Config({"PIECE": 1024}),),
    # rows that are copied back to back
    "sparse_flash_attention.gather": (Config({"ROWS": 32}),),
    "sparse_flash_attention.collect": (Config({"ROWS": 16, "PIECE": 1024}),),
    "sparse_flash_attention.weigh": _weigh(4),
    "sparse_flash_attention.accumulate": _accumulate(4),
    "sparse_flash_attention.attend": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128, "COLUMNS": 128}) for heads in (16, 32, 64, 128)
    ),
    "sparse_flash_attention.merge": (Config({"PARTS": 16}),),
    "blocks_in_place.note": (Config({"PIECE": 256}),),
    "blocks_in_place.weigh": _of_heads((8, 16), 128, 4),
    "blocks_in_place.accumulate": tuple(
        Config(
            {"HEAD_TILE": heads, "KEY_TILE": 128, "PIECES": pieces, "PARTS": 8},
            {"set_workspace_multibuffer": 8},
        )
        for pieces in (2, 4)
        for heads in (16, 8)
    ),
    "fused_infer_attention_score_v2.note": (Config({"PIECE": 64}),),
    # a row is one of a head; keys of small pages, and those that several tokens share,
    # come in runs of 64
    "fused_infer_attention_score_v2.weigh": tuple(
        Config({"ROW_TILE": rows, "KEY_TILE": keys}, {"set_workspace_multibuffer": 4})
        for rows, keys in ((8, 64), (16, 64), (32, 64), (64, 128), (64, 32), (128, 64), (128, 32))
    ),
    "fused_infer_attention_score_v2.accumulate": tuple(
        Config(
            {"ROW_TILE": rows, "KEY_TILE": keys, "PIECES": pieces, "PARTS": 8},
            {"set_workspace_multibuffer": 8},
        )
        for keys in (128, 64)
        for pieces, most in ((2, keys), (4, 32))
        for rows in (128, 64, 32, 16, 8)
        if rows <= most
    ),
    "fused_infer_attention_score_v2.merge": (Config({}),),
    "sparse_attn_sharedkv.note": (Config({"PIECE": 128}),),
    "sparse_attn_sharedkv.collect": (Config({"ROWS": 32, "PIECE": 1024}),),
    # more heads or keys: no UB is left for what 1.0.0 and 1.2.0 hold of the output
    "sparse_attn_sharedkv.attend": tuple(
        Config(
            {"HEAD_TILE": heads, "KEY_TILE": 64},
            {"set_workspace_multibuffer": 3, "tile_mix_vector_loop": 1} | _SUMS_TWICE,
        )
        for heads in (32, 16)
    ),
    "sparse_attn_sharedkv.weigh": _weigh(4),
    "sparse_attn_sharedkv.accumulate": _accumulate(4),
    "index_cache_write.write": (Config({}),),
    "latent_cache_write.write": (Config({}),),
    "quantize_index_query.quantized": (Config({"HEAD_TILE": 32}),),
    # a core has few tokens: nothing to gain from double buffering
    "quantized_rows.latents": tuple(
        Config({"MOST": rank}, {"multibuffer": False}) for rank in (1536, 2048)
    ),
    "quantized_rows.index_keys": (Config({}),),
    "quantized_rows.query_heads": tuple(Config({"HEAD_TILE": heads}) for heads in (8, 16, 32)),
    "quantized_rows.index_heads": tuple(Config({"HEAD_TILE": heads}) for heads in (8, 32)),
    "quantize.activations": (Config({"PIECE": 1024}),),
    "sparse_flash_attention_grad.row_sums": (Config({"HEAD_TILE": 16}),),
    "sparse_flash_attention_grad.grad_query": _of_heads((16, 32), 64, 2),
    "sparse_flash_attention_grad.grad_keys": _of_heads((16, 32), 32, 2),
    # the widest that divides the value channels and fits UB next to the key channels
    "fused_sigmoid_gating_delta_rule_update.update": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "kda_layer_decode.advance": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule.products": (Config({}),),
    # elimination in UB, which loads and stores little: nothing to gain from double buffering
    "chunk_gated_delta_rule.triangles": (Config({}, {"multibuffer": False}),),
    "chunk_gated_delta_rule.weights": (Config({}),),
    "chunk_gated_delta_rule.walk": tuple(
        Config({"VALUE_TILE": channels}) for channels in (128, 64, 32, 16)
    ),
    "chunk_gated_delta_rule.outputs": tuple(
        Config({"VALUE_TILE": channels}) for channels in (128, 64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.places": (Config({}),),
    "chunk_gated_delta_rule_grad.walk_states": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.walk_grads": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.crosses": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.dots": (Config({"ROWS": 8}),),
    "chunk_gated_delta_rule_grad.pairs": (Config({"ROWS": 16}),),
    "chunk_gated_delta_rule_grad.inputs": tuple(
        Config({"KEY_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_gated_delta_rule_grad.gates": (Config({"HEAD_TILE": 16}),),
    "chunk_kda.factors": (Config({}, {"multibuffer": False}),),
    "chunk_kda.products": (Config({}),),
    "chunk_kda.triangles": (Config({}, {"multibuffer": False}),),
    "chunk_kda.crosses": (Config({}),),
    "chunk_kda.walk": tuple(Config({"VALUE_TILE": channels}) for channels in (128, 64, 32, 16)),
    "chunk_kda.outputs": tuple(Config({"VALUE_TILE": channels}) for channels in (128, 64, 32, 16)),
    "chunk_kda_grad.places": (Config({}),),
    "chunk_kda_grad.walk_states": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_kda_grad.walk_grads": tuple(
        Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)
    ),
    "chunk_kda_grad.squares": tuple(Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)),
    "chunk_kda_grad.crosses": tuple(Config({"VALUE_TILE": channels}) for channels in (64, 32, 16)),
    "chunk_kda_grad.inputs": (Config({"ROWS": 8}),),
    "chunk_kda_grad.totals": (Config({"ROWS": 16}),),
    "chunk_kda_grad.gates": (Config({"ROWS": 16}),),
    "causal_conv1d.convolve": tuple(Config({"CHANNEL_TILE": channels}) for channels in (256, 1024)),
    "causal_conv1d.finish": (Config({"CHANNEL_TILE": 1024}),),
    "causal_conv1d_grad.walk": tuple(Config({"CHANNEL_TILE": channels}) for channels in (256, 512)),
    # the widest that leaves no core idle
    "causal_conv1d_update.update": tuple(
        Config({"CHANNEL_TILE": channels}) for channels in (1024, 512, 128)
    ),
    "fused_causal_conv1d.push": (Config({"CHANNEL_TILE": 1024}),),
    "fused_causal_conv1d.fill": (Config({"CHANNEL_TILE": 1024}),),
    # the most rows that UB holds
    "gated_rms_norm.normalise": tuple(Config({"ROWS": rows}) for rows in (16, 4, 1)),
    "gated_rms_norm_grad.through": tuple(Config({"ROWS": rows}) for rows in (16, 8, 2, 1)),
    "fused_attention.number": (Config({"ROWS": 128}),),
    # head sizes up to 128, 256 of sequences that fill a tile of rows; of others up to 64, 128, 256
    "fused_attention.attend": tuple(
        Config({"Q_TILE": rows, "KEY_TILE": keys})
        for rows, keys in ((128, 64), (64, 64), (64, 96), (32, 128), (32, 64))
    ),
    "fused_attention_backward.row_sums": (Config({"ROWS": 32}),),
    # both accumulators, S and P's gradient share L0C
    "fused_attention_backward.grad_keys": (
        Config({"Q_TILE": 128, "KEY_TILE": 64}, {"set_workspace_multibuffer": 4}),
        Config({"Q_TILE": 64, "KEY_TILE": 64}, {"set_workspace_multibuffer": 4}),
        Config({"Q_TILE": 64, "KEY_TILE": 32}, {"set_workspace_multibuffer": 2}),
    ),
    # one square tile for every head size: others are not shared by the vector units
    "fused_attention_backward.grad_query": (Config({"Q_TILE": 64, "KEY_TILE": 64}),),
    "indexer_loss.gather": (Config({"ROWS": 32}),),
    "indexer_loss.log_sums": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": keys})
        for heads, keys in ((16, 128), (64, 128), (128, 64))
    ),
    "indexer_loss.head_sums": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": keys})
        for heads, keys in ((16, 128), (64, 128), (128, 64))
    ),
    "indexer_loss.row_loss": (Config({"WIDTH": 512}), Config({"WIDTH": 2048})),
    "indexer_loss_backward.row_grad": (Config({"WIDTH": 512}), Config({"WIDTH": 2048})),
    "sparse_lightning_indexer_grad_kl_loss.targets": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 64)
    ),
    "sparse_lightning_indexer_grad_kl_loss.scores": tuple(
        Config({"HEAD_TILE": heads, "KEY_TILE": 128}) for heads in (16, 64)
    ),
    "sparse_lightning_indexer_grad_kl_loss.row_loss": (
        Config({"WIDTH": 512}),
        Config({"WIDTH": 2048}),
    ),
    "merge_states.merge": (Config({"WIDTH": 512}), Config({"WIDTH": 2048})),
    "merge_topk.choose": (Config({"TILE": 512}),),
    "localize_indices.localize": (Config({"TILE": 1024}),),
    "hc_post.blend": (Config({"WIDTH": 2048}),),
    # the shallow ones leave room for the streams that are made
    "hc_pre.mix": tuple(
        Config({"TOKENS": tokens, "DEPTH": depth})
        for tokens, depth in ((16, 256), (64, 64), (16, 128), (32, 64))
    ),
    "hc_pre.gates": tuple(Config({"LANES": lanes, "WIDTH": 1024}) for lanes in (8, 32)),
    "sharedkv_prolog_pto.of_tokens": (Config({"WIDTH": 2048}),),
    "sharedkv_prolog_pto.of_heads": tuple(Config({"HEAD_TILE": heads}) for heads in (16, 8)),
    "grouped_o_proj_pto.turn_back": tuple(Config({"HEAD_TILE": heads}) for heads in (32, 8)),
    "grouped_o_proj_pto.group_products": (
        *(
            Config({"ROWS": rows, "PANELS": panels, "DEPTH": 512})
            for rows in (16, 32, 64)
            for panels in (8, 4, 11)
        ),
        *(Config({"ROWS": 128, "PANELS": panels, "DEPTH": 256}) for panels in (8, 4, 11)),
    ),
    # NZ tiles, and those of the compressors' rows
    "before_attention.sums": tuple(
        Config({"ROWS": rows, "PANELS": 4, "DEPTH": depth, "COLUMNS": 128, "STEP": 256})
        for rows, depths in ((16, (512, 128)), (32, (512, 128)), (64, (512, 128)), (128, (256,)))
        for depth in depths
    ),
    "before_attention.tokens": tuple(
        Config({"WIDTH": 2048, "ROWS": rows, "CHANNELS": 128, "PIECE": 128}) for rows in (4, 8)
    ),
    "before_attention.heads": (Config({"HEAD_TILE": 8, "WIDTH": 512}),),
    "compressor.project": tuple(
        Config({"ROWS": rows, "COLUMNS": 128, "DEPTH": 256}) for rows in (16, 32, 64, 128)
    ),
    # windows of few tokens, and of many
    "compressor.pool": tuple(Config({"ROWS": rows, "CHANNELS": 128}) for rows in (4, 8)),
    "compressor.finish": (Config({}),),
    "compressor.normalise": (Config({}),),
    "compressor.keep": (Config({"WIDTH": 1024}),),
}


@dataclass
class _Call:
    """One call of an op: what the compiler refused in it, and the launch that is under way."""

    refused: dict[str, str] = field(default_factory=dict)
    launching: Config | None = None
    stages: int = 0  # that have run
    crashed: set[str] = field(default_factory=set)  # what triton-ascend's adapter died of


_call: ContextVar[_Call | None] = ContextVar("call", default=None)


class _Exhausted(Exception):
    """No configuration is left for this kernel."""


def choose(kernel: str, candidates: Sequence[Config], *shape: Any) -> Config:
    """The first of `candidates` that the compiler takes.  `shape` is what decides about the memory
    of the kernel beside its tiles.

    A refusal that was remembered only moves a configuration to the end: should the memory be wrong,
    it costs time and no answer.
    """
    call, known = _call.get(), refusals.known()
    refused = call.refused if call is not None else {}
    last = None
    for config in candidates:
        chosen = replace(config, kernel=kernel, shape=shape)
        # a title is made only where there is something to compare it with
        if refused and chosen.title in refused:
            continue
        if not known or chosen.title not in known:
            return chosen
        last = last or chosen
    if last is None:
        raise _Exhausted(kernel)
    return last


def only(kernel: str, *shape: Any) -> Config:
    """For a kernel whose launcher has no say: the first of its configurations."""
    return choose(kernel, TABLE[kernel], *shape)


def ranked(configs: Sequence[Config], name: str, size: int) -> list[Config]:
    """Those whose tile `name` covers `size`, then the others from the largest down; where a WIDTH
    holds a row at once, it must cover it, and the largest is all there is instead."""
    covering = [config for config in configs if config.tiles[name] >= size]
    smaller = [config for config in configs if config.tiles[name] < size]
    others = sorted(smaller, key=lambda config: -config.tiles[name])
    if name == "WIDTH":
        return covering or others[:1]
    return covering + others


def at_least(kernel: str, name: str, size: int, *shape: Any) -> Config:
    """The first configuration whose tile `name` covers `size`, or the largest one."""
    return choose(kernel, ranked(TABLE[kernel], name, size), *shape)


def retrying(op: str, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`launcher`, begun anew where the compiler refuses the tiles of a kernel.

    What it has written until then it writes again, the same; where a kernel reads what it writes
    for good, the launcher is made of stages, see `stage`.  Kernels compile in the first call, which
    precedes every capture of a graph.
    """

    @wraps(launcher)
    def run(**arguments: Any) -> Any:
        call = _Call()
        token = _call.set(call)
        try:
            return _until_it_compiles(call, launcher, (), arguments)
        except _Exhausted as exhausted:
            raise _none_fits(op, str(exhausted), call, arguments) from None
        finally:
            _call.reset(token)

    return run


def stage(part: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a part of a launcher, which is begun anew by itself.  Once it has run, nothing that it is
    a part of begins anew: a launcher whose kernel pushes a state on launches in stages alone."""
    call = _call.get()
    if call is None:
        return part(*arguments, **named)
    out = _until_it_compiles(call, part, arguments, named)
    call.stages += 1
    return out


def _until_it_compiles(
    call: _Call, part: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    before = call.stages
    while True:
        call.launching = None
        try:
            return part(*arguments, **named)
        except _Exhausted:
            raise
        except Exception as error:
            tiles, refused = call.launching, refusals.said(error)
            if tiles is None or call.stages != before:
                raise
            if refused is not None:
                _refuse(call, tiles, *refused)
            elif refusals.crashed(error) and tiles.title not in call.crashed:
                call.crashed.add(tiles.title)
                log.once(
                    ("crashed", tiles.title),
                    f"triton-ascend's adapter crashed over {tiles.title}; it is run once more.",
                )
            else:
                raise


def _refuse(call: _Call, config: Config, why: str, always: bool) -> None:
    call.refused[config.title] = why
    refusals.add(config.title, why, always)
    log.once(
        ("refused", config.title),
        f"{refusals.compiler()} refuses {config.title} ({why}); the next tiles are tried.",
    )


def _none_fits(op: str, kernel: str, call: _Call, arguments: Mapping[str, Any]) -> NotSupported:
    each = "; ".join(
        f"{title.removeprefix(kernel).strip()}: {why}"
        for title, why in call.refused.items()
        if title.split(" ")[0] == kernel
    )
    return NotSupported(
        f"{op}: {refusals.compiler()} refuses every tile configuration of {kernel} ({each}) for "
        f"{log.describe(arguments)}. Install the CANN that belongs to this triton-ascend "
        "(python -m custom.info), or set CUSTOM_BACKEND=reference."
        + (" What the call writes has changed already." if call.stages else "")
    )
