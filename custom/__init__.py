# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Fused operators for sparse and linear attention on NVIDIA GPUs, Ascend NPUs and CPUs.

`import custom` needs torch alone.  The tensor's device chooses the backend; every op is also
`torch.ops.custom.<name>`, for torch.compile, torch.export, torchair and ONNX.

On CPU tensors an op is its formula in plain PyTorch, which the kernels are held against: for tests,
ports and examples on any machine, not for speed.  There the values of lengths, indices and tables
are checked as well.
"""

from __future__ import annotations

import typing as _typing
from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not (_here / "dispatch").is_dir():  # a clone that was not installed
    from ._clone import find as _find

    _find(__name__, _here.parent)

from .dispatch.register import register_all as _register_all  # noqa: E402

_register_all()

from ._causal_conv1d import causal_conv1d_fn, causal_conv1d_update  # noqa: E402
from ._indexer_loss import (  # noqa: E402
    compute_index_loss_sparse,
    npu_sparse_lightning_indexer_grad_kl_loss,
)
from ._version import __version__  # noqa: E402
from .attention import (  # noqa: E402
    attention,
    npu_fused_attention,
    npu_fused_infer_attention_score_v2,
)
from .block_sparse import npu_block_indexer, npu_sparse_attention_score  # noqa: E402
from .compression import compressor, entry_positions, npu_compressor  # noqa: E402
from .convolution import (  # noqa: E402
    npu_causal_conv1d,
    npu_causal_conv1d_update,
    npu_fused_causal_conv1d,
    npu_fused_causal_conv1d_v2,
)
from .delta_rule import (  # noqa: E402
    fused_sigmoid_gating_delta_rule_update,
    npu_chunk_gated_delta_rule,
    npu_chunk_kda,
    npu_fused_sigmoid_gating_delta_rule_update,
    npu_gated_delta_layer_decode,
    npu_recurrent_gated_delta_rule,
)
from .dispatch.common.nz import from_nz, to_nz  # noqa: E402
from .dispatch.common.quantized import convert_rows, index_cache_views, row_views  # noqa: E402
from .dispatch.env import config  # noqa: E402
from .dispatch.errors import BackendUnavailable, NotSupported  # noqa: E402
from .gated_norm import npu_gated_rms_norm  # noqa: E402
from .graph_mode import warmup  # noqa: E402
from .hyper_connections import npu_hc_post, npu_hc_post_pre, npu_hc_pre  # noqa: E402
from .merging import (  # noqa: E402
    localize_indices,
    merge_states,
    merge_topk,
    npu_attention_update,
    npu_localize_indices,
    npu_merge_states,
    npu_merge_topk,
    npu_ring_attention_update,
    shard_positions,
    shard_slots,
)
from .pooled import key_pool, npu_key_pool, pool_key_indexer  # noqa: E402
from .quantized import (  # noqa: E402
    flash_mla_sparse_fp8,
    hadamard,
    npu_index_cache_write,
    npu_kv_quant_sparse_flash_attention,
    npu_kv_quant_sparse_flash_attention_lse,
    npu_latent_cache_write,
    npu_quant_lightning_indexer,
    npu_quant_lightning_indexer_scores,
    quantize_index_query,
)
from .shared_kv import (  # noqa: E402
    flash_mla_v4,
    npu_kv_quant_sparse_attn_sharedkv,
    npu_sparse_attn_sharedkv,
    npu_sparse_attn_sharedkv_metadata,
)
from .shared_kv_prolog import npu_grouped_o_proj_pto, npu_sharedkv_prolog_pto  # noqa: E402
from .sparse_attention import (  # noqa: E402
    npu_indexer_prolog_pto,
    npu_lightning_indexer,
    npu_lightning_indexer_grad,
    npu_lightning_indexer_prolog_pto,
    npu_lightning_indexer_scores,
    npu_mla_prolog_pto,
    npu_mla_prolog_v3,
    npu_sparse_attention_indices_pto,
    npu_sparse_attention_pto,
    npu_sparse_attention_shared_pto,
    npu_sparse_flash_attention,
    npu_sparse_flash_attention_grad,
)
from .sparse_attention_v4 import npu_sparse_attention_v4_pto  # noqa: E402

__all__ = [
    "BackendUnavailable",
    "NotSupported",
    "__version__",
    "attention",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "compressor",
    "compute_index_loss_sparse",
    "config",
    "convert_rows",
    "entry_positions",
    "flash_mla_sparse_fp8",
    "flash_mla_v4",
    "from_nz",
    "fused_sigmoid_gating_delta_rule_update",
    "hadamard",
    "index_cache_views",
    "key_pool",
    "localize_indices",
    "merge_states",
    "merge_topk",
    "npu_attention_update",
    "npu_block_indexer",
    "npu_causal_conv1d",
    "npu_causal_conv1d_update",
    "npu_chunk_gated_delta_rule",
    "npu_chunk_kda",
    "npu_compressor",
    "npu_fused_attention",
    "npu_fused_causal_conv1d",
    "npu_fused_causal_conv1d_v2",
    "npu_fused_infer_attention_score_v2",
    "npu_fused_sigmoid_gating_delta_rule_update",
    "npu_gated_delta_layer_decode",
    "npu_gated_rms_norm",
    "npu_grouped_o_proj_pto",
    "npu_hc_post",
    "npu_hc_post_pre",
    "npu_hc_pre",
    "npu_index_cache_write",
    "npu_indexer_prolog_pto",
    "npu_key_pool",
    "npu_kv_quant_sparse_attn_sharedkv",
    "npu_kv_quant_sparse_flash_attention",
    "npu_kv_quant_sparse_flash_attention_lse",
    "npu_latent_cache_write",
    "npu_lightning_indexer",
    "npu_lightning_indexer_grad",
    "npu_lightning_indexer_prolog_pto",
    "npu_lightning_indexer_scores",
    "npu_localize_indices",
    "npu_merge_states",
    "npu_merge_topk",
    "npu_mla_prolog_pto",
    "npu_mla_prolog_v3",
    "npu_quant_lightning_indexer",
    "npu_quant_lightning_indexer_scores",
    "npu_recurrent_gated_delta_rule",
    "npu_ring_attention_update",
    "npu_sharedkv_prolog_pto",
    "npu_sparse_attention_indices_pto",
    "npu_sparse_attention_pto",
    "npu_sparse_attention_score",
    "npu_sparse_attention_shared_pto",
    "npu_sparse_attention_v4_pto",
    "npu_sparse_attn_sharedkv",
    "npu_sparse_attn_sharedkv_metadata",
    "npu_sparse_flash_attention",
    "npu_sparse_flash_attention_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "pool_key_indexer",
    "quantize_index_query",
    "row_views",
    "shard_positions",
    "shard_slots",
    "to_nz",
    "warmup",
]

if not _typing.TYPE_CHECKING:  # a checker knows all names

    def __getattr__(name):
        """Modules that `import custom` leaves alone, and where names of other projects went."""
        from importlib import import_module

        if name in ("integrations", "parallel"):
            return import_module(f".{name}", __name__)
        if name.startswith("__"):  # Python asks for its own
            raise AttributeError(f"module 'custom' has no attribute '{name}'")
        from ._elsewhere import where

        raise AttributeError(where(name, __all__))
