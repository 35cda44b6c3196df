# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What our plug-ins touch of vLLM, vllm-ascend and SGLang, as importable stubs.

    python -m tests.vllm.stubs WHEEL...

reads the Python sources in the wheels (`pip download --no-deps vllm==0.33.0`) and writes
tests/vllm/stubs/DISTRIBUTION-VERSION/: classes, fields and signatures, no bodies.  What the sources
do not have is left out, and test_vllm_contract.py and test_sglang_contract.py say who
misses it.
"""

from __future__ import annotations

import ast
import builtins
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "stubs"
EVERY: tuple[str, ...] = ()  # all members of a class, or all fields of a dataclass
# distribution -> module -> name -> the members that we touch
HOOKS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "vllm": {
        "vllm": {"ModelRegistry": EVERY},
        "vllm.model_executor.models": {"ModelRegistry": EVERY},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": EVERY},
        "vllm.config": {"VllmConfig": EVERY, "get_current_vllm_config": EVERY},
        "vllm.config.vllm": {
            "get_current_vllm_config": EVERY,
            "VllmConfig": (
                "cache_config",
                "compilation_config",
                "kv_transfer_config",
                "load_config",
                "lora_config",
                "model_config",
                "parallel_config",
                "quant_config",
                "speculative_config",
            ),
        },
        "vllm.config.cache": {"CacheConfig": ("block_size", "cache_dtype", "mamba_cache_mode")},
        "vllm.config.compilation": {"CompilationConfig": ("static_forward_context",)},
        "vllm.config.load": {"LoadConfig": ("load_format",)},
        "vllm.config.model": {"ModelConfig": ("dtype", "hf_config", "hf_text_config")},
        "vllm.config.parallel": {
            "ParallelConfig": (
                "data_parallel_size",
                "decode_context_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "use_ubatching",
            )
        },
        "vllm.config.speculative": {
            "SpeculativeConfig": ("draft_model_config", "method", "num_speculative_tokens")
        },
        "vllm.distributed.communication_op": {"tensor_model_parallel_all_reduce": EVERY},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_world_size": EVERY},
        "vllm.forward_context": {
            "ForwardContext": ("attn_metadata", "no_compile_layers"),
            "get_forward_context": EVERY,
        },
        "vllm.model_executor.custom_op": {
            "CustomOp": ("register_oot",),
            "PluggableLayer": ("register_oot",),
            "op_registry_oot": EVERY,
        },
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": EVERY},
        "vllm.model_executor.layers.layernorm": {
            "GemmaRMSNorm": ("__init__",),
            "RMSNorm": ("__init__",),
            "RMSNormGated": ("activation", "eps", "weight"),
        },
        "vllm.model_executor.layers.linear": {
            "ColumnParallelLinear": ("__init__",),
            "MergedColumnParallelLinear": ("__init__",),
            "MinimaxM3QKVParallelLinearWithIndexer": ("__init__",),
            "ReplicatedLinear": ("__init__",),
            "RowParallelLinear": ("__init__", "reduce_results"),
            "UnquantizedLinearMethod": ("apply",),
        },
        "vllm.model_executor.layers.mamba.abstract": {"MambaBase": ("kv_cache",)},
        "vllm.model_executor.layers.mamba.gdn.base": {
            "GatedDeltaNetAttention": ("__init__", "activation", "prefix", "tp_size")
        },
        "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": {
            "KimiGatedDeltaNetAttention": (
                "A_log",
                "__init__",
                "_forward",
                "conv1d",
                "dt_bias",
                "gate_lower_bound",
                "head_dim",
                "o_norm",
            )
        },
        "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn": {
            "OlmoHybridGatedDeltaNetAttention": (
                "A_log",
                "__init__",
                "_full_forward",
                "a_proj",
                "allow_neg_eigval",
                "b_proj",
                "conv1d",
                "conv_kernel_size",
                "dt_bias",
                "head_k_dim",
                "head_v_dim",
                "in_proj_qkvg",
                "key_dim",
                "num_v_heads",
                "o_norm",
                "o_proj",
                "value_dim",
            )
        },
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": {
            "QwenGatedDeltaNetAttention": (
                "A_log",
                "__init__",
                "_forward_core_fused_norm_packed",
                "conv1d",
                "conv_kernel_size",
                "dt_bias",
                "fix_query_key_value_ordering",
                "forward",
                "gqa_interleaved_layout",
                "head_k_dim",
                "head_v_dim",
                "in_proj_ba",
                "in_proj_qkvz",
                "key_dim",
                "norm",
                "num_v_heads",
                "out_proj",
                "split_ba",
                "value_dim",
            ),
            "qwen_gdn_attention_core_fused_norm_packed": EVERY,
        },
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": EVERY},
        "vllm.model_executor.layers.mla": {
            "MLAModules": EVERY,
            "MultiHeadLatentAttentionWrapper": ("__init__", "forward"),
        },
        "vllm.model_executor.layers.sparse_attn_indexer": {"SparseAttnIndexer": ("__init__",)},
        "vllm.model_executor.model_loader.weight_utils": {"sharded_weight_loader": EVERY},
        "vllm.model_executor.models.deepseek_mtp": {"DeepSeekMTP": ("__init__",)},
        "vllm.model_executor.models.deepseek_v2": {
            "DeepseekV2ForCausalLM": ("__init__",),
            "DeepseekV3ForCausalLM": EVERY,
            "GlmMoeDsaForCausalLM": EVERY,
            "Indexer": (
                "head_dim",
                "k_cache",
                "k_norm",
                "n_head",
                "rope_dim",
                "softmax_scale",
                "wk_weights_proj",
                "wq_b",
            ),
        },
        "vllm.model_executor.models.registry": {
            "ModelRegistry": EVERY,
            "_ModelRegistry": ("register_model",),
        },
        "vllm.model_executor.models.utils": {"extract_layer_index": EVERY},
        "vllm.models.deepseek_v4": {"DeepSeekV4MTP": EVERY, "DeepseekV4ForCausalLM": EVERY},
        "vllm.models.deepseek_v4.attention": {"DeepseekV4Attention": ("__init__", "forward")},
        "vllm.models.deepseek_v4.common.rope": {"build_deepseek_v4_rope": EVERY},
        "vllm.models.deepseek_v4.cpu.model": {
            "DeepseekV4CPUAttention": EVERY,
            "DeepseekV4ForCausalLM": ("__init__",),
        },
        "vllm.models.deepseek_v4.cpu.cpu_sparse": {"DeepseekV4CPUAttention": ("__init__",)},
        "vllm.models.deepseek_v4.nvidia.model": {
            "DeepseekV4DecoderLayer": ("__init__",),
            "DeepseekV4ForCausalLM": ("__init__",),
            "_select_dsv4_attn_cls": EVERY,
        },
        # whose layer is of the model's module, in which ours is put
        "vllm.models.deepseek_v4.nvidia.mtp": {
            "DeepSeekV4MTP": ("__init__",),
            "DeepseekV4DecoderLayer": EVERY,
        },
        "vllm.models.glm5next": {},
        "vllm.models.glm5next.common": {},
        "vllm.models.glm5next.common.attention": {
            "Indexer": (
                "head_dim",
                "index_kpool",
                "index_kpool_compress_ape",
                "index_kpool_compress_gate",
                "k_cache",
                "k_norm",
                "n_head",
                "tail_cache",
                "topk_tokens",
                "wk_weights_proj",
                "wq_b",
            ),
            "SparseAttnIndexerKpool": EVERY,
        },
        "vllm.models.glm5next.nvidia": {},
        "vllm.models.glm5next.nvidia.sparse_indexer": {"SparseAttnIndexerKpool": ("__init__",)},
        "vllm.models.glm5next.sparse_indexer": {"SparseAttnIndexerKpool": EVERY},
        "vllm.models.glm5next.common.kda": {
            "Glm5NextLinearAttention": (
                "A_log",
                "__init__",
                "dt_bias",
                "f_b_proj",
                "forward",
                "g_b_proj",
                "head_dim",
                "in_proj_qkvbfg_a",
                "k_conv1d",
                "kda_lower_bound",
                "local_num_heads",
                "o_norm",
                "o_proj",
                "q_conv1d",
                "v_conv1d",
            ),
            "_resolve_kda_prefill_backend": EVERY,
        },
        "vllm.models.glm5next.common.model": {
            "Glm5NextForCausalLM": ("__init__",),
            "Glm5NextLinearAttention": EVERY,
        },
        "vllm.model_executor.layers.rotary_embedding": {"get_rope": EVERY},
        "vllm.models.minimax_m3.nvidia": {},
        "vllm.models.minimax_m3.nvidia.model": {
            "MiniMaxM3SparseAttention": ("__init__", "forward"),
            "MiniMaxM3SparseForCausalLM": ("__init__",),
        },
        "vllm.models.kimi_k3.nvidia": {},
        "vllm.models.kimi_k3.nvidia.mla": {"MultiHeadLatentAttention": ("__init__", "forward")},
        "vllm.models.kimi_k3.nvidia.model": {
            "KimiLinearForCausalLM": ("__init__",),
            "MultiHeadLatentAttention": EVERY,
        },
        "vllm.platforms": {"current_platform": EVERY},
        "vllm.platforms.interface": {"Platform": ("is_cpu", "is_out_of_tree", "device_type")},
        "vllm.utils.torch_utils": {"_encode_layer_name": EVERY},
        "vllm.v1.attention.backend": {
            "AttentionBackend": (
                "get_builder_cls",
                "get_impl_cls",
                "get_name",
                "get_preferred_block_size",
                "get_supported_kernel_block_sizes",
                "is_mla",
                "is_sparse",
                "supported_kv_cache_layouts",
            ),
            "AttentionCGSupport": ("UNIFORM_BATCH",),
            "AttentionMetadataBuilder": (
                "__init__",
                "_cudagraph_support",
                "build",
                "reorder_batch_threshold",
            ),
            "CommonAttentionMetadata": (
                "block_table_tensor",
                "max_query_len",
                "num_actual_tokens",
                "num_reqs",
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "slot_mapping",
            ),
            "MultipleOf": EVERY,
        },
        "vllm.v1.attention.backends.gdn_attn": {
            "GDNAttentionMetadata": (
                "num_actual_tokens",
                "non_spec_state_indices_tensor",
                "non_spec_token_indx",
                "num_accepted_tokens",
                "num_decode_tokens",
                "num_prefill_tokens",
                "num_prefills",
                "num_spec_decodes",
                "prefill_has_initial_state",
                "prefill_query_start_loc",
                "prefill_state_indices",
                "spec_query_start_loc",
                "spec_sequence_masks",
                "spec_state_indices_tensor",
                "spec_token_indx",
                "uniform_spec_sequence_length",
            )
        },
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": EVERY},
        "vllm.v1.kv_cache_interface": {
            "KVCacheSpec": EVERY,
            "AttentionSpec": EVERY,
            "CircularBufferSpec": EVERY,
            "FullAttentionSpec": EVERY,
            "MLAAttentionSpec": EVERY,
            "SlidingWindowSpec": EVERY,
            "SlidingWindowMLASpec": EVERY,
        },
        "vllm.v1.kv_cache_layout": {"KVCacheLayout": ("BLHNC",)},
    },
    "sglang": {
        "sglang.srt.arg_groups.fields.disagg": {"Disagg": ("disaggregation_mode",)},
        "sglang.srt.arg_groups.fields.exec_": {
            "ExecKernel": ("dsa_decode_backend", "dsa_prefill_backend"),
            "ExecMamba": ("enable_linear_replayssm", "enable_linear_replayssm_spec"),
            "ExecOverlap": ("enable_two_batch_overlap",),
        },
        "sglang.srt.arg_groups.fields.memory": {
            "Memory": ("enable_hisparse", "enable_page_major_kv_layout", "enable_unified_memory")
        },
        "sglang.srt.arg_groups.fields.parallel": {
            "Parallel": (
                "attn_cp_size",
                "dcp_size",
                "enable_dsa_cache_layer_split",
                "pp_size",
                "tp_size",
            )
        },
        "sglang.srt.arg_groups.fields.spec": {"Spec": ("speculative_algorithm",)},
        "sglang.srt.configs.hybrid_arch": {"hybrid_gdn_config": EVERY},
        "sglang.srt.layers.attention.attention_registry": {
            "attn_backend_wrapper": EVERY,
            "register_attention_backend": EVERY,
        },
        "sglang.srt.layers.attention.dsa.dsa_indexer": {
            "Indexer": ("_get_topk_paged", "_get_topk_ragged", "index_topk")
        },
        "sglang.srt.layers.attention.dsa.dsa_indexer_metadata": {
            "DSAIndexerMetadata": ("attn_metadata",)
        },
        "sglang.srt.layers.attention.dsa_backend": {
            "DSAMetadata": (
                "cache_seqlens_int32",
                "cu_seqlens_q",
                "dsa_extend_seq_lens_list",
                "real_page_table",
            ),
            "DeepseekSparseAttnBackend": (
                "__init__",
                "dsa_kv_cache_store_fp8",
                "forward_decode",
                "forward_extend",
                "forward_metadata",
                "token_to_kv_pool",
                "use_fused_topk",
                "use_mha",
            ),
        },
        "sglang.srt.layers.attention.hybrid_linear_attn_backend": {
            "MambaAttnBackendBase": ("mamba_chunk_size",)
        },
        "sglang.srt.layers.attention.linear.gdn_backend": {
            "GDNAttnBackend": ("__init__", "kernel_dispatcher"),
            "GDNKernelDispatcher": (
                "decode_kernel",
                "extend_kernel",
                "supports_packed_decode",
            ),
        },
        "sglang.srt.layers.attention.linear.kernels.gdn_triton": {
            "TritonGDNKernel": ("decode", "extend", "packed_decode")
        },
        "sglang.srt.layers.attention.linear.kernels.kernel_backend": {
            "LinearAttnKernelBase": (
                "decode",
                "extend",
                "supports_track_state_snapshot",
            )
        },
        "sglang.srt.layers.radix_attention": {
            "RadixAttention": ("head_dim", "layer_id", "scaling", "tp_q_head_num", "v_head_dim")
        },
        "sglang.srt.mem_cache.memory_pool": {
            "KVCache": ("dtype",),
            "MLATokenToKVPool": ("dsa_kv_cache_store_fp8", "get_key_buffer", "set_mla_kv_buffer"),
            "DSATokenToKVPool": ("get_index_k_with_scale_buffer",),
        },
        "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": ("out_cache_loc",)},
        "sglang.srt.model_executor.forward_context": {"get_token_to_kv_pool": EVERY},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": ("register",),
            "HookType": ("BEFORE",),
        },
        "sglang.srt.runtime_context": {
            "get_disagg": EVERY,
            "get_exec": EVERY,
            "get_memory": EVERY,
            "get_parallel": EVERY,
            "get_spec": EVERY,
        },
    },
    "vllm_ascend": {
        "vllm_ascend.device.device_op": {
            "BaseDeviceAdaptor": (
                "_format_sparse_flash_attention_output",
                "execute_sparse_flash_attention_process",
                "indexer_select_post_process",
            ),
            "DeviceOperator": EVERY,
        },
    },
}
HEADER = (
    '# SPDX-License-Identifier: Apache-2.0\n"""Made by tests/vllm/stubs.py; not to be edited."""\n'
)
PLAIN = {*dir(builtins), "Any", "torch", "nn", "Tensor", "Callable"}


class Sources:
    """The modules of a wheel, parsed once each."""

    def __init__(self, wheel: Path) -> None:
        self.archive = zipfile.ZipFile(wheel)
        self.files = set(self.archive.namelist())
        self.trees: dict[str, list[ast.stmt]] = {}

    def path(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in self.files), None)

    def statements(self, module: str) -> list[ast.stmt]:
        """Those of the module itself, also in its conditions."""
        if module not in self.trees:
            path = self.path(module)
            todo = ast.parse(self.archive.read(path)).body if path else []
            found = self.trees[module] = []
            while todo:
                node = todo.pop(0)
                found.append(node)
                if isinstance(node, ast.If):
                    todo = [*node.body, *node.orelse, *todo]
        return self.trees[module]

    def definition(self, module: str, name: str) -> ast.stmt | None:
        for node in self.statements(module):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return node
            if name in _assigned(node):
                return node
        return None

    def origins(self, module: str, name: str) -> Iterator[str]:
        """The modules that `module` imports `name` from, one of them where platforms differ."""
        package = module.split(".")
        if not (self.path(module) or "").endswith("__init__.py"):
            package = package[:-1]
        for node in self.statements(module):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                if any((each.asname or each.name) == name for each in node.names):
                    yield ".".join([*base, *([node.module] if node.module else [])])


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


class Stub:
    """One module of stubs."""

    def __init__(
        self, sources: Sources, module: str, hooks: dict[str, dict[str, tuple[str, ...]]]
    ) -> None:
        self.sources, self.module, self.hooks = sources, module, hooks
        self.late: set[str] = set()  # imports for annotations alone
        self.early: set[str] = set()
        self.lines: list[str] = []
        for name, members in hooks[module].items():
            self.emit(name, members)

    def text(self) -> str:
        late = [f"    {each}" for each in sorted(self.late - self.early)]
        return "\n".join(
            [
                "from __future__ import annotations",
                "",
                "from abc import ABC, abstractmethod",
                "from dataclasses import dataclass, field",
                "from typing import TYPE_CHECKING, Any, Generic, TypeVar",
                "",
                "import torch",
                "from torch import nn",
                *sorted(self.early),
                *(["", "if TYPE_CHECKING:", *late] if late else []),
                *self.lines,
                "",
            ]
        )

    def emit(self, name: str, members: tuple[str, ...]) -> None:
        node = self.sources.definition(self.module, name)
        if isinstance(node, ast.ClassDef):
            self.emit_class(node, members)
        elif isinstance(node, ast.FunctionDef):
            self.lines += ["", *self.function(node)]
        elif isinstance(node, ast.AnnAssign):
            self.lines += ["", f"{name}: {self.annotation(node.annotation)} = ..."]
        elif isinstance(node, ast.Assign):
            made = node.value.func if isinstance(node.value, ast.Call) else None
            self.lines += ["", f"{name}: {self.annotation(made)} = ..."]
        else:
            origins = self.sources.origins(self.module, name)
            hooked = [each for each in origins if name in self.hooks.get(each, {})]
            self.early |= {f"from {each} import {name} as {name}" for each in hooked[:1]}

    def home(self, name: str) -> str | None:
        """The hooked module that defines what is called `name` here."""
        if self.sources.definition(self.module, name):
            return self.module if name in self.hooks[self.module] else None
        module: str | None = self.module
        while module and not self.sources.definition(module, name):
            module = next(self.sources.origins(module, name), None)
        return module if module in self.hooks and name in self.hooks[module] else None

    def emit_class(self, node: ast.ClassDef, members: tuple[str, ...]) -> None:
        bases, before = [], []
        for base in node.bases:
            text = ast.unparse(base).replace("torch.nn.", "nn.")
            if text.startswith("Generic["):
                before.append(f'{text[8:-1]} = TypeVar("{text[8:-1]}")')
                bases.append(text)
            elif text in ("ABC", "nn.Module"):
                bases.append(text)
            elif home := self.home(text):
                if home != self.module:
                    self.early.add(f"from {home} import {text}")
                bases.append(text)
        frozen = [
            f"@{ast.unparse(each)}"
            for each in node.decorator_list
            if ast.unparse(each).split("(")[0] == "dataclass"
        ]
        body = [
            f"    {line}"
            for each in node.body
            for line in self.member(each, members, fields_alone=bool(frozen))
        ]
        known = {line.split(":")[0].strip() for line in body}
        body += [f"    {name}: Any" for name in _attributes(node) if name in {*members} - known]
        after = f"({', '.join(bases)})" if bases else ""
        self.lines += ["", *before, *frozen, f"class {node.name}{after}:", *(body or ["    ..."])]

    def member(self, node: ast.stmt, members: tuple[str, ...], fields_alone: bool) -> list[str]:
        if isinstance(node, ast.FunctionDef):
            wanted = node.name in members or not (members or fields_alone)
            return self.function(node) if wanted else []
        names = [each for each in _assigned(node) if each in members or not members]
        kind = self.annotation(node.annotation) if isinstance(node, ast.AnnAssign) else "Any"
        value = getattr(node, "value", None)
        default = "" if value is None else " = ..."
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
            kept = [ast.unparse(each) for each in value.keywords if each.arg in ("init", "kw_only")]
            default = f" = field({', '.join(['default=...', *kept])})"
        return [f"{each}: {kind}{default}" for each in names]

    def function(self, node: ast.FunctionDef) -> list[str]:
        decorators = [
            f"@{ast.unparse(each)}"
            for each in node.decorator_list
            if ast.unparse(each) in ("abstractmethod", "classmethod", "property", "staticmethod")
        ]
        given = node.args
        for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
            if each.arg not in ("self", "cls"):
                each.annotation = ast.Name(self.annotation(each.annotation))
        for variable in (given.vararg, given.kwarg):
            if variable:
                variable.annotation = ast.Name("Any")
        given.defaults = [ast.Constant(...) for _ in given.defaults]
        given.kw_defaults = [each and ast.Constant(...) for each in given.kw_defaults]
        returned = "None" if node.name == "__init__" else self.annotation(node.returns)
        # an abstract method that a subclass may call
        body = "return" if returned == "None" else "..."
        return [*decorators, f"def {node.name}({ast.unparse(given)}) -> {returned}: {body}"]

    def annotation(self, node: ast.expr | None) -> str:
        """As it is if all of its names are known here, else Any."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if node is None or any(
            isinstance(each, ast.Constant) and isinstance(each.value, str)
            for each in ast.walk(node)
        ):
            return "Any"
        homes = {}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id not in PLAIN:
                homes[each.id] = self.home(each.id)
        if None in homes.values():
            return "Any"
        self.late |= {f"from {home} import {n}" for n, home in homes.items() if home != self.module}
        return ast.unparse(node)


def _attributes(node: ast.ClassDef) -> list[str]:
    """What the methods assign to `self`."""
    found = {
        each.attr: None
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return list(found)


def write(wheel: Path) -> Path:
    distribution, version = wheel.name.split("-")[:2]
    hooks = HOOKS[distribution]
    folder = FOLDER / f"{distribution}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    sources = Sources(wheel)
    for module in hooks:
        parts = module.split(".")
        package = any(each.startswith(f"{module}.") for each in hooks)
        path = folder.joinpath(*parts, "__init__.py") if package else folder.joinpath(*parts)
        path = path if package else path.with_suffix(".py")
        for parent in [*path.relative_to(folder).parents][:-1]:
            (folder / parent).mkdir(parents=True, exist_ok=True)
            if not (folder / parent / "__init__.py").exists():
                (folder / parent / "__init__.py").write_text(HEADER)
        text = Stub(sources, module, hooks).text()
        if module == distribution:
            text += f'\n__version__ = "{version}"\n'
        path.write_text(HEADER + text)
    return folder


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(write(Path(each)))
