# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our schemas beside torch_npu's of the same name: a script moves by changing the prefix.

torch_npu_schemas.txt holds torch_npu 2.13.0's, as tests/torchair/schema_checks.py finds them.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from custom.dispatch.register import overload
from custom.dispatch.registry import BY_NAME, SPECS

import custom

TEXT = (Path(__file__).parents[1] / "records" / "torch_npu_schemas.txt").read_text()
THEIRS = {
    schema.name.removeprefix("npu::"): schema
    for schema in map(torch._C.parse_schema, TEXT.splitlines())
}
# 0 is torch_npu's default, and its kernel takes 2 alone
CHANGED = {
    ("npu_sparse_flash_attention", "attention_mode"): (0, 2),
    ("npu_sparse_flash_attention_grad", "attention_mode"): (0, 2),
}
# scales may be in the weights; and what ours takes beyond theirs, behind all of theirs
OPTIONAL = {("npu_quant_lightning_indexer", "query_dequant_scale")}
# theirs are lists, as torchair's are not; our function takes both
DENSE = "npu_fused_infer_attention_score_v2"
TENSORS = {(DENSE, "actual_seq_qlen"), (DENSE, "actual_seq_kvlen")}
MORE = {
    "npu_lightning_indexer": ["cmp_ratio", "select_tail"],
    "npu_quant_lightning_indexer": ["cmp_ratio", "select_tail"],
    "npu_kv_quant_sparse_flash_attention": ["sinks", "row_layout"],
    "npu_sparse_flash_attention_grad": ["d_softmax_sum"],
    "npu_chunk_gated_delta_rule": ["use_beta_sigmoid_in_kernel", "allow_neg_eigval"],
}


def _ours(name: str, argument: str, kind: str) -> str:
    if (name, argument) in TENSORS:
        assert kind == "Optional[List[int]]"
        return "Optional[Tensor]"
    return f"Optional[{kind}]" if (name, argument) in OPTIONAL else kind


def described(schema: torch.FunctionSchema) -> list[tuple]:
    return [
        (
            argument.name,
            str(argument.type),
            argument.kwarg_only,
            argument.default_value if argument.has_default_value() else "required",
        )
        for argument in schema.arguments
    ]


def test_every_op_of_the_same_name_is_there():
    assert set(THEIRS) == {
        "npu_lightning_indexer",
        "npu_lightning_indexer_grad",
        "npu_sparse_flash_attention",
        "npu_sparse_flash_attention_grad",
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "npu_chunk_gated_delta_rule",
        "npu_quant_lightning_indexer",
        "npu_kv_quant_sparse_flash_attention",
        "npu_recurrent_gated_delta_rule",
        "npu_fused_causal_conv1d",
        "npu_fused_causal_conv1d_v2",
        "npu_mla_prolog_v3",
        DENSE,
    }
    assert set(THEIRS) <= {spec.name for spec in SPECS}


@pytest.mark.parametrize("name", list(THEIRS))
def test_names_order_types_and_defaults_are_torch_npu_s(name):
    ours = overload(BY_NAME[name])._schema
    wanted = [
        (
            argument,
            _ours(name, argument, kind),
            keyword,
            CHANGED.get((name, argument), (None, default))[1],
        )
        for argument, kind, keyword, default in described(THEIRS[name])
    ]
    got = described(ours)
    assert got[: len(wanted)] == wanted
    assert [argument for argument, *_ in got[len(wanted) :]] == MORE.get(name, [])
    for (op, argument), (before, _) in CHANGED.items():
        if op == name:
            assert {a: d for a, _, _, d in described(THEIRS[name])}[argument] == before
    assert [str(r.type) for r in ours.returns] == [str(r.type) for r in THEIRS[name].returns]


def test_the_changed_default_is_refused_by_name_where_it_comes():
    q, index = torch.randn(1, 1, 1, 16), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    with pytest.raises((ValueError, custom.NotSupported), match="`attention_mode`"):
        custom.npu_sparse_flash_attention(q, q, None, index, 0.1, attention_mode=0)


# functions of ours that call an op of another name
COMPOSED = [
    "npu::npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type)"
    " -> (Tensor, Tensor)",
    "npu::npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max,"
    " Tensor prev_softmax_sum, Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum,"
    ' *, Tensor? actual_seq_qlen=None, str input_layout="SBH", str input_softmax_layout="")'
    " -> (Tensor, Tensor, Tensor)",
]


@pytest.mark.parametrize("text", COMPOSED, ids=lambda text: text.partition("(")[0])
def test_a_composed_function_has_torch_npus_signature(text):
    theirs = torch._C.parse_schema(text)
    ours = inspect.signature(getattr(custom, theirs.name.removeprefix("npu::")))
    assert [(x.name, x.kind is x.KEYWORD_ONLY, x.default) for x in ours.parameters.values()] == [
        (
            x.name,
            x.kwarg_only,
            x.default_value if x.has_default_value() else inspect.Parameter.empty,
        )
        for x in theirs.arguments
    ]
    assert ours.return_annotation == f"tuple[{', '.join(['Tensor'] * len(theirs.returns))}]"
