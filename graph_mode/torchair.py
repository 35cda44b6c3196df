# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our ops in torchair's GE mode (max-autotune, dynamo_export), as CANN's own operators.

npugraph_ex (reduce-overhead) needs nothing from here: it captures our kernels as they are, and is
the graph mode to prefer.  GE mode builds an Ascend IR graph, which holds CANN's operators only: an
op of ours that CANN has too is written as CANN's, which then runs CANN's kernel.  An argument that
CANN's operator lacks is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..dispatch.errors import NotSupported, need
from ..dispatch.op_spec import Spec
from ..dispatch.register import bind, overload
from ..dispatch.registry import BY_NAME, SPECS

_REMEDY = 'Compile with torch.compile(backend="npugraph_ex"), which runs our own kernel.'


@dataclass(frozen=True)
class Twin:
    """How CANN's operator `spec.ge` takes our arguments.

    `inputs` and `attrs` map CANN's names to ours, in CANN's order; `outputs` are CANN's names, an
    input's name for a cache that is updated in place, and `returns` picks ours among them; `fixed`
    lists what CANN's kernel computes with whatever the caller wants.
    """

    inputs: Mapping[str, str]
    outputs: Sequence[str]
    returns: Sequence[str]
    attrs: Mapping[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ()  # inputs that older CANN releases lack: left out where absent
    lacks: Sequence[str] = ()  # our arguments that CANN's operator does not take
    needs: Sequence[str] = ()  # our optional ones that it cannot do without
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # attribute: a tensor's size
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)  # attributes that are places
    rows: Mapping[str, int] = field(default_factory=dict)  # of a tensor, the only number it takes


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _positional(name: str) -> list[str]:
    arguments = overload(BY_NAME[name])._schema.arguments
    return [argument.name for argument in arguments if not argument.kwarg_only]


def _fused_convolution(out: str) -> Twin:
    return Twin(
        inputs=_same(
            "x",
            "weight",
            "conv_states",
            "query_start_loc",
            "cache_indices",
            "initial_state_mode",
            "bias",
            "num_accepted_tokens",
            "num_computed_tokens",
            "block_idx_first_scheduled_token",
            "block_idx_last_scheduled_token",
            "initial_state_idx",
        ),
        attrs={"activation_mode": "activation"}
        | _same(
            "pad_slot_id",
            "run_mode",
            "max_query_len",
            "residual_connection",
            "block_size",
            "conv_mode",
        ),
        words={"activation_mode": ("None", "silu", "swish"), "conv_mode": ("default", "pangu")},
        outputs=("conv_states", out),
        returns=(out,),
    )


# what an operator of 16 bits and those of 8 bits have alike
_MLA_INPUTS = (
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
    "rope_sin",
    "rope_cos",
    "kv_cache",
    "kr_cache",
    "cache_index",
)
_MLA_OUTPUTS = (
    "query",
    "query_rope",
    "kv_cache",
    "kr_cache",
    "dequant_scale_q_nope",
    "query_norm",
    "dequant_scale_q_norm",
)
_INDEXER_OPTIONS = (
    "layout_query",
    "layout_key",
    "sparse_count",
    "sparse_mode",
    "pre_tokens",
    "next_tokens",
)
_ATTENTION_OPTIONS = (
    "sparse_block_size",
    "layout_query",
    "layout_kv",
    "sparse_mode",
    "pre_tokens",
    "next_tokens",
    "attention_mode",
)

TWINS: dict[str, Twin] = {
    "npu_sparse_attention_pto": Twin(
        inputs={
            f"x{number}": name
            for number, name in enumerate(_positional("npu_sparse_attention_pto"))
        },
        outputs=("x10", "x11", "x19", "y0"),
        returns=("y0",),
        fixed=dict(
            softmax_scale=576**-0.5,
            rms_norm_eps=1e-5,
            layer_norm_eps=1e-6,
            sparse_count=2048,
            rope_interleaved=True,
            index_rope_interleaved=True,
            weight_format="nz",
            weight_quant_mode=0,
            index_weight_quant_mode=0,
            kv_kind="none",
            index_kind="none",
        ),
    ),
    "npu_mla_prolog_pto": Twin(
        inputs=_same(*_MLA_INPUTS),
        outputs=_MLA_OUTPUTS,
        returns=("query", "query_rope", "query_norm"),
        attrs=_same("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv"),
        constants=dict(cache_mode="PA_BSND", query_norm_flag=True),
        # of 8 bits: npu_mla_prolog_v3, whose outputs are CANN's
        fixed=dict(
            rope_interleaved=True,
            weight_format="nz",
            weight_quant_mode=0,
            kv_cache_quant_mode=0,
            query_quant_mode=0,
            ckvkr_repo_mode=0,
            quant_scale_repo_mode=0,
            tile_size=128,
            row_layout="nope_rope_scale",
            scale_format="ue8m0",
        ),
        lacks=(
            "dequant_scale_x",
            "dequant_scale_w_dq",
            "dequant_scale_w_uq_qr",
            "dequant_scale_w_dkv_kr",
            "smooth_scales_cq",
            "k_nope_clip_alpha",
            "kv_cache_dtype",
        ),
        needs=("weight_dq", "rmsnorm_gamma_cq"),
    ),
    "npu_mla_prolog_v3": Twin(
        inputs=_same(
            *_MLA_INPUTS,
            "dequant_scale_x",
            "dequant_scale_w_dq",
            "dequant_scale_w_uq_qr",
            "dequant_scale_w_dkv_kr",
            "quant_scale_ckv",
            "quant_scale_ckr",
            "smooth_scales_cq",
            "actual_seq_len",
            "k_nope_clip_alpha",
        ),
        attrs=_same(
            "rmsnorm_epsilon_cq",
            "rmsnorm_epsilon_ckv",
            "cache_mode",
            "query_norm_flag",
            "weight_quant_mode",
            "kv_cache_quant_mode",
            "query_quant_mode",
            "ckvkr_repo_mode",
            "quant_scale_repo_mode",
            "tile_size",
            "qc_qr_scale",
            "kc_scale",
        ),
        lacks=("kv_cache_dtype",),
        outputs=_MLA_OUTPUTS,
        returns=(
            "query",
            "query_rope",
            "dequant_scale_q_nope",
            "query_norm",
            "dequant_scale_q_norm",
        ),
    ),
    "npu_lightning_indexer": Twin(
        inputs=_same(
            "query",
            "key",
            "weights",
            "actual_seq_lengths_query",
            "actual_seq_lengths_key",
            "block_table",
        ),
        attrs=_same(*_INDEXER_OPTIONS) | {"return_values": "return_value"},
        fixed={"cmp_ratio": 1, "select_tail": False},
        outputs=("sparse_indices", "sparse_values"),
        returns=("sparse_indices", "sparse_values"),
    ),
    "npu_sparse_flash_attention": Twin(
        inputs=_same(
            "query",
            "key",
            "value",
            "sparse_indices",
            "block_table",
            "actual_seq_lengths_query",
            "actual_seq_lengths_kv",
            "query_rope",
            "key_rope",
            "sinks",
        ),
        optional=("sinks",),
        attrs=_same(
            "scale_value",
            *_ATTENTION_OPTIONS,
            "return_softmax_lse",
        ),
        outputs=("attention_out", "softmax_max", "softmax_sum"),
        returns=("attention_out", "softmax_max", "softmax_sum"),
    ),
    "npu_quant_lightning_indexer": Twin(
        inputs=_same(
            "query",
            "key",
            "weights",
            "query_dequant_scale",
            "key_dequant_scale",
            "actual_seq_lengths_query",
            "actual_seq_lengths_key",
            "block_table",
        ),
        attrs=_same(
            "query_quant_mode",
            "key_quant_mode",
            *_INDEXER_OPTIONS,
        ),
        lacks=("query_dtype", "key_dtype"),
        fixed={"cmp_ratio": 1, "select_tail": False},
        needs=("query_dequant_scale",),
        outputs=("sparse_indices",),
        returns=("sparse_indices",),
    ),
    "npu_kv_quant_sparse_flash_attention": Twin(
        inputs=_same(
            "query",
            "key",
            "value",
            "sparse_indices",
            "key_dequant_scale",
            "value_dequant_scale",
            "block_table",
            "actual_seq_lengths_query",
            "actual_seq_lengths_kv",
            "sinks",
        ),
        optional=("sinks",),
        attrs=_same(
            "scale_value",
            "key_quant_mode",
            "value_quant_mode",
            *_ATTENTION_OPTIONS,
            "quant_scale_repo_mode",
            "tile_size",
            "rope_head_dim",
        ),
        fixed=dict(row_layout="nope_rope_scale", rope_head_dim=64),
        lacks=("key_dtype", "value_dtype"),
        outputs=("attention_out",),
        returns=("attention_out",),
    ),
    "npu_lightning_indexer_grad": Twin(
        inputs=_same(
            "query",
            "key",
            "dy",
            "sparse_indices",
            "weights",
            "actual_seq_lengths_query",
            "actual_seq_lengths_key",
        ),
        attrs=dict(
            layout="layout",
            sparseMode="sparse_mode",
            preTokens="pre_tokens",
            nextTokens="next_tokens",
        ),
        constants=dict(determinstic=False),  # CANN spells it so
        sizes=dict(headNum=("query", -2)),
        outputs=("dq", "dk", "dweights"),
        returns=("dq", "dk", "dweights"),
    ),
    "npu_sparse_lightning_indexer_grad_kl_loss": Twin(
        inputs=_same("query", "key", "query_index", "key_index")
        | {"weight": "weights"}
        | _same("sparse_indices", "softmax_max", "softmax_sum", "query_rope", "key_rope")
        | dict(
            actual_seq_lengths_query="actual_seq_qlen", actual_seq_lengths_key="actual_seq_klen"
        ),
        attrs=_same("scale_value", "layout", "sparse_mode", "pre_tokens", "next_tokens"),
        constants=dict(deterministic=False),
        # the lengths are lists of the host here, and tensors there
        lacks=("actual_seq_qlen", "actual_seq_klen", "sinks"),
        outputs=("d_query_index", "d_key_index", "d_weight", "loss"),
        returns=("d_query_index", "d_key_index", "d_weight", "loss"),
    ),
    "npu_recurrent_gated_delta_rule": Twin(
        inputs=_same(
            "query",
            "key",
            "value",
            "beta",
            "state",
            "actual_seq_lengths",
            "ssm_state_indices",
            "g",
            "gk",
            "num_accepted_tokens",
        ),
        attrs={"scale_value": "scale"},
        needs=("beta", "scale", "actual_seq_lengths", "ssm_state_indices"),
        outputs=("out", "state"),
        returns=("out",),
    ),
    "npu_hc_pre": Twin(
        inputs=_same("x", "hc_fn", "hc_scale", "hc_base"),
        attrs=_same("hc_mult", "hc_sinkhorn_iters", "hc_eps", "norm_eps"),
        lacks=("norm_weight",),
        rows=dict(hc_fn=24),  # none of a head
        outputs=("y", "post", "comb_frag"),
        returns=("y", "post", "comb_frag"),
    ),
    "npu_hc_post": Twin(
        inputs=_same("x", "residual", "post", "comb"), outputs=("y",), returns=("y",)
    ),
    "npu_fused_causal_conv1d": _fused_convolution("y"),
    # x is none of the op's results: torchair wants one
    "npu_fused_causal_conv1d_v2": _fused_convolution("x"),
}


def _refuse_what_cann_lacks(spec: Spec, twin: Twin, arguments: Mapping[str, Any]) -> None:
    for name in twin.lacks:
        if arguments[name] is not None:
            raise NotSupported(
                f"{spec.name}: `{name}` is given, which CANN's {spec.ge} does not take. {_REMEDY}"
            )
    for name in twin.needs:
        if arguments[name] is None:
            raise NotSupported(
                f"{spec.name}: `{name}` is None, which CANN's {spec.ge} does not take. Pass it, "
                f"or: {_REMEDY}"
            )
    for name, count in twin.rows.items():
        came = arguments[name].symsize[0]
        if came != count:
            raise NotSupported(
                f"{spec.name}: `{name}` has {came} rows, and CANN's {spec.ge} takes {count}. "
                f"{_REMEDY}"
            )
    for name, only in twin.fixed.items():
        came = arguments[name]
        equal = math.isclose(came, only) if isinstance(came, float) else came == only
        if not equal:
            raise NotSupported(
                f"{spec.name}: CANN's {spec.ge} computes with `{name}` = {only!r} only, and "
                f"{came!r} came. Pass {name}={only!r}, or: {_REMEDY}"
            )


def _attribute(spec: Spec, name: str, value: Any) -> Any:
    from torchair.ge import attr

    kinds = {bool: attr.Bool, int: attr.Int, float: attr.Float, str: attr.Str}
    if type(value) not in kinds:
        raise NotSupported(
            f"{spec.name}: `{name}` is symbolic, expected a constant: it is an attribute of CANN's "
            f"{spec.ge}. Keep it out of the compiled function's arguments. {_REMEDY}"
        )
    return kinds[type(value)](value)


def _as_twin(spec: Spec, twin: Twin) -> Callable[..., Any]:
    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        from torchair import ge

        arguments = bind(overload(spec)._schema, args, kwargs)
        _refuse_what_cann_lacks(spec, twin, arguments)
        if spec.name == "npu_sparse_flash_attention" and arguments["value"] is None:
            arguments["value"] = arguments["key"]  # CANN's operator wants both
        inputs = {theirs: arguments[ours] for theirs, ours in twin.inputs.items()}
        for name in twin.optional:
            if inputs[name] is None:
                del inputs[name]
        defaults = bind(overload(spec)._schema, (), {})
        values = {
            theirs: defaults[ours] if arguments[ours] is None else arguments[ours]
            for theirs, ours in twin.attrs.items()
        } | twin.constants
        values |= {name: words.index(values[name]) for name, words in twin.words.items()}
        values |= {name: arguments[of].symsize[at] for name, (of, at) in twin.sizes.items()}
        attrs = {name: _attribute(spec, name, value) for name, value in values.items()}
        made = ge.custom_op(spec.ge, inputs=inputs, outputs=list(twin.outputs), attrs=attrs)
        if len(twin.outputs) == 1:
            return made  # no list
        by_name = dict(zip(twin.outputs, made, strict=True))
        chosen = tuple(by_name[name] for name in twin.returns)
        return chosen if len(chosen) > 1 else chosen[0]

    return convert


# ----------------------------------------------- attention: CANN's operator and a few beside it

_FLASH_LACKS = ("cu_seqlens_q", "cu_seqlens_k", "window", "grad_lse")
_REPEATED = 8  # CANN keeps each row's maximum and sum eight times


def _mask_of_modes() -> Any:
    """What CANN's sparse modes read: one tile of a causal mask."""
    import numpy
    from torchair import ge

    mask = numpy.triu(numpy.ones((2048, 2048), dtype=bool), 1)
    return ge.Const(mask, dtype=ge.DataType.DT_BOOL, readable=False)


def _flash(spec: Spec, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(optional inputs, attributes) that CANN's attention and its gradient share."""
    q, k, v = (arguments[name] for name in "qkv")
    for name in _FLASH_LACKS:
        if arguments.get(name) is not None:
            raise NotSupported(
                f"{spec.name}: `{name}` is given, which CANN's {spec.ge} does not take as ours "
                f"does. {_REMEDY}"
            )
    if q.dtype != v.dtype:
        raise NotSupported(
            f"{spec.name}: `v` is of another dtype than `q`, which CANN's {spec.ge} does not take. "
            f"{_REMEDY}"
        )
    attrs = dict(
        head_num=q.symsize[1],
        input_layout="BNSD",
        scale_value=arguments["sm_scale"],
        keep_prob=1.0,
        inner_precise=0,
        sparse_mode=0,
    )
    if attrs["scale_value"] is None:
        attrs["scale_value"] = q.symsize[3] ** -0.5
    absent = ("padding_mask", "drop_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen")
    inputs: dict[str, Any] = dict.fromkeys((*absent, "q_start_idx", "kv_start_idx", "atten_mask"))
    if arguments["causal"]:
        if q.symsize[2] > k.symsize[2]:  # where sizes are dynamic, a guard
            raise NotSupported(
                f"{spec.name}: `causal` with `q` longer than `k`: what CANN's {spec.ge} gives a "
                f"query that sees no key is not known. {_REMEDY}"
            )
        # mode 3 is aligned at the last key, as ours
        inputs["atten_mask"] = _mask_of_modes()
        attrs["sparse_mode"] = 3
    return inputs, {name: _attribute(spec, name, value).value for name, value in attrs.items()}


def _flash_attention(spec: Spec, arguments: Mapping[str, Any]) -> Any:
    from torchair._ge_concrete_graph import ge_apis as ge

    inputs, attrs = _flash(spec, arguments)
    q, k, v = (arguments[name] for name in "qkv")
    top, total, _, out = ge.FlashAttentionScore(q, k, v, real_shift=None, **inputs, **attrs)
    # softmax's maximum and sum make the log-sum-exp
    return out, ge.ReduceMax(ge.Add(top, ge.Log(total)), ge.Const([-1]))


def _flash_attention_backward(spec: Spec, arguments: Mapping[str, Any]) -> Any:
    from torchair._ge_concrete_graph import ge_apis as ge

    inputs, attrs = _flash(spec, arguments)
    q, k, v = (arguments[name] for name in "qkv")
    # exp(s - maximum) / sum is exp(s - lse) with `lse` as the maximum and 1 as the sum
    lse = ge.Tile(ge.Unsqueeze(arguments["lse"], axes=[-1]), ge.Const([1, 1, 1, _REPEATED]))
    return ge.FlashAttentionScoreGrad(
        q,
        k,
        v,
        arguments["grad_o"],
        pse_shift=None,
        softmax_max=lse,
        softmax_sum=ge.OnesLike(lse),
        softmax_in=None,
        attention_in=arguments["o"],
        **inputs,
        **attrs,
    )[:3]


_INFER_SAME = ("query", "query_rope", "block_table", "learnable_sink")
_INFER_ABSENT = (
    *("pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2"),
    *("quant_offset2", "antiquant_scale", "antiquant_offset", "query_padding_size"),
    *("kv_padding_size", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale"),
    *("value_antiquant_offset", "key_shared_prefix", "value_shared_prefix"),
    *("actual_shared_prefix_len", "key_rope_antiquant_scale", "dequant_scale_query"),
    *("q_start_idx", "kv_start_idx"),
)
_INFER_ATTRS = dict(
    num_heads="num_query_heads",
    scale="softmax_scale",
    **_same("input_layout", "num_key_value_heads", "sparse_mode", "inner_precise"),
)


def _infer_attention(spec: Spec, a: Mapping[str, Any]) -> Any:
    """Latents as [pages, P, R]: of four dimensions CANN takes the second for heads."""
    from torchair import ge
    from torchair._ge_concrete_graph import ge_apis

    if a["return_softmax_lse"]:
        raise NotSupported(
            f"{spec.name}: `return_softmax_lse` is True: what CANN's {spec.ge} gives a row that "
            f"sees no key is not known. {_REMEDY}"
        )
    sink = a["learnable_sink"]
    if sink is not None and sink.dtype != ge.DataType.DT_BF16:
        raise NotSupported(
            f"{spec.name}: `learnable_sink` is not bfloat16, all that CANN's {spec.ge} takes. "
            f"{_REMEDY}"
        )

    def pages(x: Any) -> Any:
        if x is None or x.rank == 3:
            return x
        return ge_apis.Squeeze(x, axis=[2 if x.symsize[2] == 1 else 1])

    def lengths(x: Any) -> Any:
        return None if x is None else ge_apis.Cast(x, dst_type=ge.DataType.DT_INT64)

    values = {theirs: a[ours] for theirs, ours in _INFER_ATTRS.items()}
    size = a["key"].symsize
    values["block_size"] = size[1] if len(size) == 3 or size[2] == 1 else size[2]
    values |= {n: min(a[n], 2**31 - 1) for n in ("pre_tokens", "next_tokens")}
    key = pages(a["key"])
    return ge_apis.FusedInferAttentionScore(
        key=[key],
        value=[key],
        key_rope=pages(a["key_rope"]),
        atten_mask=_mask_of_modes() if a["sparse_mode"] else None,
        actual_seq_lengths=lengths(a["actual_seq_qlen"]),
        actual_seq_lengths_kv=lengths(a["actual_seq_kvlen"]),
        **{name: a[name] for name in _INFER_SAME},
        **dict.fromkeys(_INFER_ABSENT),
        **{name: _attribute(spec, name, value).value for name, value in values.items()},
    )


# ----------------------------- DeepSeek-V4's attention: behind what deals its work out to the cores

_SHAREDKV = (
    "q",
    "ori_kv",
    "cmp_kv",
    "ori_sparse_indices",
    "cmp_sparse_indices",
    "ori_block_table",
    "cmp_block_table",
    "cu_seqlens_q",
    "cu_seqlens_ori_kv",
    "cu_seqlens_cmp_kv",
    "seqused_q",
    "seqused_kv",
    "sinks",
)
_SHAREDKV_ATTRS = (
    "softmax_scale",
    "cmp_ratio",
    "ori_mask_mode",
    "cmp_mask_mode",
    "ori_win_left",
    "ori_win_right",
    "layout_q",
    "layout_kv",
    "return_softmax_lse",
)
_OF_SHAREDKV = Twin(
    inputs=_same(*_SHAREDKV),
    outputs=("attn_out", "softmax_lse"),
    returns=("attn_out", "softmax_lse"),
    # its statistics are of another shape, and documented as not valid
    fixed=dict(layout_kv="PA_ND", indices_are_slots=False, return_softmax_lse=False),
    lacks=(
        "ori_sparse_indices",
        "cu_seqlens_ori_kv",
        "cu_seqlens_cmp_kv",
        "ori_topk_length",
        "cmp_topk_length",
    ),
)


def _sharedkv_metadata(spec: Spec, a: Mapping[str, Any]) -> Any:
    """How CANN deals the work of a call out: made of its lengths, on the device.  What the caller
    gave as `metadata` is not read, as by our own kernels."""
    import torch
    from torchair import ge

    npu = getattr(torch, "npu", None)
    if npu is None:
        raise NotSupported(
            f"{spec.name}: there is no torch.npu, and CANN's {spec.ge}Metadata is told the NPU's "
            "cores. Convert where the NPU is that runs the graph."
        )
    q, lengths = a["q"], ("cu_seqlens_q", "seqused_q", "seqused_kv")
    batch, steps = q.symsize[:2]
    if a["layout_q"] == "TND":
        batch, steps = a["cu_seqlens_q"].symsize[0] - 1, q.symsize[0]
    cores = npu.get_stream_limit(npu.current_stream())
    table, entries, chosen = (
        a[name] for name in ("ori_block_table", "cmp_kv", "cmp_sparse_indices")
    )
    values = dict(
        num_heads_q=q.symsize[-2],
        num_heads_kv=1,
        head_dim=q.symsize[-1],
        batch_size=batch,
        max_seqlen_q=steps,
        max_seqlen_kv=table.symsize[1] * a["ori_kv"].symsize[1],
        ori_topk=0,
        cmp_topk=0 if chosen is None else chosen.symsize[-1],
        cmp_ratio=-1 if entries is None else a["cmp_ratio"],
        has_ori_kv=True,
        has_cmp_kv=entries is not None,
        soc_version=npu.get_device_properties().name,
        aic_core_num=cores["cube_core_num"],
        aiv_core_num=cores["vector_core_num"],
        **{n: a[n] for n in _SHAREDKV_ATTRS if n.startswith(("ori_", "cmp_mask", "layout"))},
    )
    return ge.custom_op(
        f"{spec.ge}Metadata",
        inputs={name: a[name] for name in lengths},
        outputs=["metadata"],
        attrs={name: _attribute(spec, name, value) for name, value in values.items()},
    )


def _sharedkv(spec: Spec, arguments: Mapping[str, Any]) -> Any:
    from torchair import ge

    _refuse_what_cann_lacks(spec, _OF_SHAREDKV, arguments)
    a = dict(arguments)
    a["softmax_scale"] = a["softmax_scale"] or a["q"].symsize[-1] ** -0.5
    inputs = {name: a[name] for name in _SHAREDKV}
    return ge.custom_op(
        spec.ge,
        inputs=inputs | dict(metadata=_sharedkv_metadata(spec, a)),
        outputs=list(_OF_SHAREDKV.outputs),
        attrs={name: _attribute(spec, name, a[name]) for name in _SHAREDKV_ATTRS},
    )


COMPOSED: dict[str, Callable[[Spec, Mapping[str, Any]], Any]] = {
    "npu_sparse_attn_sharedkv": _sharedkv,
    "npu_fused_infer_attention_score_v2": _infer_attention,
    "npu_fused_attention": _flash_attention,
    "npu_fused_attention_backward": _flash_attention_backward,
}


def _composed(spec: Spec) -> Callable[..., Any]:
    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        return COMPOSED[spec.name](spec, bind(overload(spec)._schema, args, kwargs))

    return convert


# CANN has an operator of the name, which does something else
_UNLIKE = {
    "npu_compressor": "CANN's Compressor takes page 0 of a table for none, and stores no entries",
}


def _refusing(spec: Spec) -> Callable[..., Any]:
    lacking = _UNLIKE.get(spec.name) or (
        f"no GE form of CANN's {spec.ge} is public"
        if spec.ge
        else "it has no conversion to an operator of CANN's"
    )

    def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
        raise NotSupported(f"{spec.name}: {lacking}. {_REMEDY}")

    return convert


class _Absent:
    """What torchair 2.13 lacks for an operand that an op may write and that is not there: it has
    the operand itself as None, and asks None to be copied back."""

    def regenerate_ge_view(self, bases: Any, symbols: Any = None) -> None:
        return None

    def view_copy(self, bases: Any, **_: Any) -> None:
        return None


def _take_absent_caches() -> None:
    """In torchair's converter of ops that write, which looks this function of torch up by name."""
    name = "torchair._ge_concrete_graph.auto_functionalized_v2"
    if find_spec(name) is None:  # an older one has another way
        return
    theirs: Any = import_module(name)
    torch_s: Any = import_module("torch._higher_order_ops.auto_functionalize")
    convert, read = theirs.conveter_auto_functionalize_v2, torch_s.read_view_information_from_args
    if hasattr(convert, "takes_absent_caches"):
        return

    def with_absent(*args: Any) -> dict[str, Any]:
        return {name: _Absent() if view is None else view for name, view in read(*args).items()}

    def converted(*args: Any, **kwargs: Any) -> Any:
        torch_s.read_view_information_from_args = with_absent
        try:
            return tuple(out for out in convert(*args, **kwargs) if out is not None)
        finally:
            torch_s.read_view_information_from_args = read

    converted.takes_absent_caches = True  # type: ignore[attr-defined]
    theirs.conveter_auto_functionalize_v2 = converted


def register() -> None:
    """Teach torchair our ops; call once, after `import torchair`.

    From torch_npu 2.13 on, with a CANN that has the package `ge`, GE would call an op that has no
    converter back in Python, on a stream of its own.  triton-ascend cannot launch there (507011:
    it passes arguments from the host), so that such an op is refused by name here as well.

    Raises:
        BackendUnavailable: torchair is not installed.
    """
    need("torchair", "custom.graph_mode.torchair", "torch_npu")
    from torchair import register_fx_node_ge_converter

    _take_absent_caches()
    for spec in SPECS:
        twin = TWINS.get(spec.name)
        if twin is not None:
            register_fx_node_ge_converter(overload(spec))(_as_twin(spec, twin))
        elif spec.name in COMPOSED:
            register_fx_node_ge_converter(overload(spec))(_composed(spec))
        else:
            register_fx_node_ge_converter(overload(spec))(_refusing(spec))
