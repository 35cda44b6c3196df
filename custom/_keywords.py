# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Calls whose arguments a function does not take: one sentence, with the name that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from .dispatch.error_messages import in_one_sentence

Public = TypeVar("Public", bound=Callable[..., Any])

# what the field calls one thing
SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("sm_scale", "softmax_scale", "scale", "scale_value", "scaling", "scale_factor"),
    ("q", "query", "query_states", "token_x"),
    ("k", "key", "key_states"),
    ("v", "value", "value_states"),
    ("x", "token_x", "hidden_states", "input"),
    ("g", "g_log", "log_decay", "decay"),
    ("gate", "z"),
    ("causal", "is_causal"),
    ("sinks", "learnable_sink", "attn_sink", "sink", "s_aux"),
    ("epsilon", "eps", "norm_eps", "layer_norm_eps", "rms_norm_eps", "variance_epsilon"),
    ("indices", "sparse_indices", "topk_indices", "topk_ids", "index"),
    ("sparse_count", "topk", "top_k", "k", "index_topk", "topk_tokens"),
    ("block_table", "block_tables", "page_table", "kv_page_indices"),
    ("ori_block_table", "state_block_table", "block_table", "block_tables", "page_table"),
    ("atten_mask", "attn_mask", "attention_mask", "mask"),
    ("rows", "k_cache", "kv_cache", "kv"),
    (
        *("return_lse", "return_softmax_lse", "return_attn_probs", "return_softmax"),
        "softmax_lse_flag",
    ),
    ("initial_state", "initial_states", "h0", "recurrent_state", "last_recurrent_state"),
    ("state", "initial_state", "ssm_state", "recurrent_state"),
    ("conv_states", "conv_state", "cache"),
    ("ssm_state_indices", "state_indices", "slot_indices"),
    ("conv_state_indices", "cache_indices", "state_indices"),
    ("state_layout", "state_v_first", "transpose_state_layout"),
    ("cache_index", "slot_mapping", "slots"),
    ("layout_key", "layout_kv", "layout"),
    ("layout_query", "input_layout", "layout"),
    ("activation", "act", "hidden_act"),
    ("query_rope", "q_rope", "q_pe"),
    ("key_rope", "k_rope", "k_pe", "kr"),
    ("sin", "rope_sin"),
    ("cos", "rope_cos"),
)
_SUMS = {
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "query_start_loc"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "actual_seq_qlen", "actual_seq_kvlen", "qo_indptr"),
}
_LENGTHS = {"cache_seqlens", "context_lens", "seqused_k", "seq_lens", "kv_lens", "seqlens_k"}
_OF_QUERIES = ("actual_seq_qlen", "actual_seq_lengths_query")
_OF_KEYS = (
    "actual_seq_kvlen",
    "actual_seq_klen",
    "actual_seq_lengths_kv",
    "actual_seq_lengths_key",
)
_ENDS = {"actual_seq_lengths", *_OF_QUERIES, *_OF_KEYS}
# ours, theirs, what it takes to go from one to the other
TURNED: tuple[tuple[str, Collection[str], str], ...] = (
    ("actual_seq_lengths", _SUMS, "It holds lengths: pass the prefix sums' .diff()."),
    *(
        (
            ours,
            ("cu_seqlens_q", "cu_seqlens", "query_start_loc", "qo_indptr", *_OF_QUERIES),
            "With layout 'TND' it holds prefix sums without the leading 0: pass [1:] of them.",
        )
        for ours in _OF_QUERIES
    ),
    *(
        (
            ours,
            (*_LENGTHS, "cu_seqlens_k", "cu_seqlens_kv", *_OF_KEYS),
            "It holds a length a request, or for layout 'TND' prefix sums without the leading 0.",
        )
        for ours in _OF_KEYS
    ),
    ("act_seqs", (*_LENGTHS, *_ENDS), "It holds a length a request."),
    *(
        (
            ours,
            (*_ENDS, "cu_seqlens", "query_start_loc", "cu_seqlens_kv", "cu_seq_lens_q"),
            "It holds prefix sums with a leading 0.",
        )
        for ours in ("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "query_start_loc")
    ),
    ("window", ("window_size", "sliding_window"), "Of FlashAttention's (w, 0) it is w + 1."),
    ("causal", ("sparse_mode",), "sparse_mode=3 is causal=True."),
    ("sparse_mode", ("causal", "is_causal"), "causal=True is sparse_mode=3."),
    ("state_layout", ("state_v_first",), 'state_v_first=True is state_layout="vk".'),
)
_LEAVE = "Leave it out"
# what no function here has, or only others
ABSENT = {
    **dict.fromkeys(
        ("max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"),
        f"{_LEAVE}: the prefix sums say it.",
    ),
    **dict.fromkeys(("dropout_p", "keep_prob"), f"{_LEAVE}: there is no dropout."),
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "atten_mask", "mask", "pse", "alibi_slopes"),
        "There are no masks and biases: pass causal=True, a window, or packed sequences.",
    ),
    "softcap": f"{_LEAVE}: logits are not capped.",
    "enable_gqa": f"{_LEAVE}: heads of `k` are shared by groups of heads of `q`.",
    "head_num": f"{_LEAVE}: the shapes say it.",
    "block_table": "Keys of this op are not paged: npu_sparse_flash_attention's may be.",
    "output_final_state": f"{_LEAVE}: the final state is always returned.",
    "use_qk_l2norm_in_kernel": (
        "Normalise before the call: torch.nn.functional.normalize(x.float(), dim=-1) of the "
        "queries and of the keys."
    ),
    **dict.fromkeys(
        ("use_gate_in_kernel", "A_log", "dt_bias"),
        "Make the gate before the call: g = -A_log.exp() * softplus(a.float() + dt_bias).",
    ),
    "head_first": f"{_LEAVE}: tokens come before heads.",
    **dict.fromkeys(
        ("tile_scheduler_metadata", "num_splits", "schedule_metadata", "max_model_len"),
        f"{_LEAVE}: a call plans itself.",
    ),
}


def nearest(name: str, parameters: Sequence[str]) -> str:
    """What to do with a keyword that is none of the parameters."""
    for ours, theirs, how in TURNED:
        if name in theirs and ours in parameters:
            return f"Did you mean `{ours}`? {how}"
    for group in SYNONYMS:
        if name in group and (meant := [x for x in group if x in parameters]):
            return f"Did you mean `{meant[0]}`?"
    if name in ABSENT:
        return ABSENT[name]
    close = get_close_matches(name, parameters, 1)
    if close:
        return f"Did you mean `{close[0]}`?"
    return f"It takes {_listed(parameters)}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def refusal(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Why Python cannot bind a call to the parameters, or None."""
    parameters = signature.parameters
    by_place = [x.name for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    for keyword in kwargs:
        if keyword not in parameters:
            return f"{name}: `{keyword}` is no argument of it. {nearest(keyword, [*parameters])}"
    if len(args) > len(by_place):
        behind = [each for each in parameters if each not in by_place]
        more = f" Pass {_listed(behind)} by name." if behind else ""
        return (
            f"{name}: {len(args)} arguments came by position, expected at most {len(by_place)} "
            f"({_listed(by_place)}).{more}"
        )
    given = by_place[: len(args)]
    for keyword in kwargs:
        if keyword in given:
            return f"{name}: `{keyword}` came twice, by position and by name. Pass it once."
    missing = [
        x.name
        for x in parameters.values()
        if x.default is x.empty and x.name not in given and x.name not in kwargs
    ]
    if missing:
        is_, it = ("is", "It has") if len(missing) == 1 else ("are", "They have")
        return f"{name}: {_listed(missing)} {is_} missing. {it} no default: pass a value for each."
    return None


def raise_in_one_sentence(
    error: Exception,
    name: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> NoReturn:
    """What Python or PyTorch says of a call, in our words where there are some."""
    if said := refusal(name, signature, args, kwargs):
        raise TypeError(said) from None
    if refused := in_one_sentence(error):
        raise refused from error
    raise error


def worded(function: Public) -> Public:
    """Its arguments are refused in one sentence."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, RuntimeError) as error:
            raise_in_one_sentence(error, function.__name__, signature, args, kwargs)

    return public  # type: ignore[return-value]
