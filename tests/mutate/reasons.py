# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Why a mistake that no test notices changes nothing that anybody could notice."""

from __future__ import annotations

from .changes import Mutant

_TIME = "only how long it takes changes"
_TORCHAIR = "torchair alone calls what it puts in place (make test-torchair)"
_NUMBERS = "numbers of barriers: each has its own all the same"
_ORDER = "only which of two wrong arguments is named changes"

# by place, words of a mutant's title ($ is its end)
REASONS: dict[str, tuple[tuple[str, str], ...]] = {
    "cuda_ops/delta_rule/chunk_gated_delta_rule_grad.py: <module>": (
        ("(_BLOCK_V, _BLOCK_K) = 64, 64", "both are 64"),
    ),
    "cuda_ops/attention/hopper/fused_attention.py: _config": (("NC=2 if rows <= 1025", _TIME),),
    "cuda_ops/indexer/topk.py: topk": (
        ("WHOLE=width % BLOCK == 1", "rows of scores have no gap behind them: a mask more"),
    ),
    "cuda_ops/indexer/hopper/indexer_loss.py: supports": (
        ("(D, DR) = query.shape[- -> (DR, D)", "both have the same limits"),
    ),
    "cuda_ops/sparse_attention/hopper/mla_consumers.py: <module>": (
        ("(RIGHT, LEFT, LEFT_FREE, RIGHT_FREE", _NUMBERS),
    ),
    "cuda_ops/delta_rule/chunk_gated_delta_rule_grad.py: walk_tile": (
        ("size <= 129", "sizes are powers of two"),
    ),
    "dispatch/reference/common/selection.py: Sums.__init__": (
        ("key.shape[:-2].numel()", "keys have one head"),
    ),
    "dispatch/reference/convolution/causal_conv1d_update.py: forward": (
        ("tokens.position <= steps", "the check wants a step for each token"),
    ),
    "dispatch/reference/deepseek_v4/rows_and_entries.py: _blocks": (
        ("max(2, selection.BLOC", "only how many tokens are computed at a time changes"),
    ),
    "dispatch/versions.py: <module>": (
        ("(ImportError, RuntimeError, OSError", "what is caught has no order"),
    ),
    "dispatch/ops/caches/latent_cache_write.py: check": (
        (
            "quantized.V4, quantized.NOPE_SCALE_ROPE)",
            "only a sentence's order changes",
        ),
    ),
    "dispatch/reference/delta_rule/recurrent_gated_delta_rule.py: forward": (
        ("state_indices.new_full([1], -1)", "of two that stand for none one is read"),
    ),
    "dispatch/ops/delta_rule/fused_sigmoid_gating_delta_rule_update.py: pool_of_states": (
        ("for (size, want, got) in", "they are compared with each other"),
    ),
    "dispatch/ops/delta_rule/fused_sigmoid_gating_delta_rule_update.py: check": (
        ("('dt_bias', dt_bias), ('a', a), ('b', b)", _ORDER),
    ),
    "cuda_ops/runtime/launches.py: <module>": (("_SETTLED = 4 -> _SETTLED = 5", _TIME),),
    "cuda_ops/runtime/launches.py: SideStream.__init__": (
        ("self._joined, self._forked)", "two events, each new"),
    ),
    "cuda_ops/runtime/launches.py: _begin": (
        ("Thread(target=part)", "what these threads do ends by itself within a second"),
    ),
    "graph_mode/torchair.py: register": (("_take_absent_caches() -> ", _TORCHAIR),),
    "cuda_ops/runtime/launches.py: _plan": (("torch.int8,", "a piece of memory is bytes"),),
}


def words(mutant: Mutant) -> list[str]:
    """Those that explain it."""
    listed = REASONS.get(mutant.place, ())
    return [word for word, _ in listed if word in f"{mutant.title}$"]


def reason(mutant: Mutant) -> str | None:
    found = words(mutant)
    return dict(REASONS[mutant.place])[found[0]] if found else None
