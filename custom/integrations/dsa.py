# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The weights of `npu_sparse_attention_pto` from a Hugging Face attention module.

Transformers has several models with an indexer.  The op computes those in `CONVENTIONS`, and not
those in `REFUSED`, each for the reason given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dispatch.common import nz, quantized
from ..dispatch.errors import NotSupported, need

need("transformers.models.glm_moe_dsa", __name__, '"transformers>=5.17,<6"')

from transformers.models.deepseek_v32.modeling_deepseek_v32 import (  # noqa: E402
    DeepseekV32Attention,
)
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention  # noqa: E402

# how the MLA and the indexer pair the dimensions that they rotate: the modules do not say
CONVENTIONS: dict[type[nn.Module], dict[str, bool]] = {
    DeepseekV32Attention: dict(rope_interleaved=True, index_rope_interleaved=False),
    GlmMoeDsaAttention: dict(rope_interleaved=True, index_rope_interleaved=True),
}
REFUSED: dict[str, str] = {
    "AXK2Attention": "its queries come from two latents, and a gate scales its output",
    "DeepseekV4CSACompressor": (
        "its keys are compressed, and its selection is one of them; sparse_attention_v4_weights "
        "takes the layer's attention"
    ),
    "Dots3NoteTextAttention": (
        "it scales its latents, norms the shared key's rotation and gates each head"
    ),
    "Glm5NextTextAttention": "its indexer selects pools of keys, and nothing is rotated",
    "HYV4Attention": "its heads have sinks and a gate, and its indexer rotates the last dimensions",
    "HYV4VLAttention": (
        "its heads have sinks and a gate, and its indexer rotates the last dimensions"
    ),
    "MiniMaxM3VLAttention": "its indexer selects blocks of keys, and its keys are not latent",
    "MistralLarge4TextAttention": (
        "its queries and its indexer's are projections of the input, scaled by their position, and "
        "layers share other layers' keys"
    ),
    "Qwen4ExpTextAttention": "its indexer selects blocks of keys, and its keys are not latent",
}


@dataclass(frozen=True)
class SharedAttentionWeights:
    """What `npu_sparse_attention_shared_pto` takes of a layer, and what comes after it.

    `dq`, `uq_qr` and `dkv_kr` lie as `options["weight_format"]` says; `uk` [N, Dn, R] and `uv`
    [N, Dv, R] are the two halves of the key-value up-projection; `options` are the op's keyword
    arguments. `dq` and `gamma_cq` are None where there is no query latent, which is for
    `npu_mla_prolog_pto` alone.
    """

    dq: Tensor | None
    uq_qr: Tensor
    uk: Tensor
    dkv_kr: Tensor
    gamma_cq: Tensor | None
    gamma_ckv: Tensor
    uv: Tensor
    options: dict[str, Any]

    @property
    def prolog(self) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """What `npu_mla_prolog_pto` takes behind the tokens, in its order."""
        return self.dq, self.uq_qr, self.uk, self.dkv_kr, self.gamma_cq, self.gamma_ckv

    @property
    def arguments(self) -> dict[str, Any]:
        """The weights and options under the op's own names."""
        return dict(
            w_dq=self.dq,
            w_uq_qr=self.uq_qr,
            w_uk=self.uk,
            w_dkv_kr=self.dkv_kr,
            gamma_cq=self.gamma_cq,
            gamma_ckv=self.gamma_ckv,
            **self.options,
        )

    def values(self, latent: Tensor) -> Tensor:
        """The heads' outputs [B, S, N * Dv] from the op's latent output [B, S, N, R]."""
        return torch.einsum("bsnr,nvr->bsnv", latent, self.uv).flatten(2)


@dataclass(frozen=True)
class SparseAttentionWeights(SharedAttentionWeights):
    """What `npu_sparse_attention_pto` takes: the indexer's as well, which lie as the others."""

    idx_qb: Tensor
    idx_k: Tensor
    idx_proj: Tensor
    idx_gamma_k: Tensor
    idx_beta_k: Tensor

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(
            super().arguments,
            w_idx_qb=self.idx_qb,
            w_idx_k=self.idx_k,
            w_idx_proj=self.idx_proj,
            in_gamma_k=self.idx_gamma_k,
            in_beta_k=self.idx_beta_k,
        )


def _conventions(module: nn.Module) -> dict[str, bool]:
    """Of a module that the op can stand for; one sentence against any other."""
    name = type(module).__name__
    if type(module) in CONVENTIONS:  # a subclass may compute anything
        return CONVENTIONS[type(module)]
    if name in REFUSED:
        raise NotSupported(f"npu_sparse_attention_pto does not compute {name}: {REFUSED[name]}.")
    known = " or ".join(each.__name__ for each in CONVENTIONS)
    raise TypeError(
        f"sparse_attention_weights: `module` is of type {name}, expected {known}. Pass "
        "layer.self_attn of such a model."
    )


@torch.no_grad()
def sparse_attention_weights(
    module: nn.Module, weight_format: str | None = None
) -> SparseAttentionWeights:
    """The op's weights from the attention of a DeepSeek-V3.2 or GLM-5 layer.

    Args:
        module: a `DeepseekV32Attention` or `GlmMoeDsaAttention` that has an indexer; its
            projections must have no bias.
        weight_format: "linear": the module's own weights; the half of the key-value up-projection
            that is absorbed is copied. "nz": copies in FRACTAL_NZ, 4-D where whole
            tiles hold them. None: "nz" on an NPU, whose kernels read it fastest, else "linear".

    Returns:
        `SparseAttentionWeights`, whose `arguments` the op takes.

    Raises:
        NotSupported: the layer has no indexer, or is none that the op computes.

    All have the dtype of `kv_a_proj_with_mqa`, also the index head weights, which Transformers may
    keep in float32: a positive factor and a rounding are all that this changes in the scores.
    Projections of 8 bits are taken as they are, with their scales among the options: float8_e4m3fn
    weights with `weight_scale_inv`, a scale for 128 x 128 (DeepSeek's checkpoints), and int8 ones
    with `weight_scale`, a scale for each row (compressed-tensors, msmodelslim). The key-value up-
    projection alone is dequantized.
    """
    m, conventions = _supported(module)
    weight_format = format_of(m.q_a_proj.weight, weight_format)
    if m.indexer is None:
        kinds = m.config.indexer_types[: m.layer_idx]
        owner = max(i for i, kind in enumerate(kinds) if kind == "full")
        raise NotSupported(
            f"npu_sparse_attention_pto needs an indexer, and layer {m.layer_idx} of this "
            f"{type(module).__name__} has none: it shares the selection of layer {owner}. Use "
            "shared_attention_weights and npu_sparse_attention_shared_pto."
        )
    shared = shared_of(m, conventions, weight_format)
    indexer = m.indexer
    weights, scales, mode = projections(
        m, _dtype(m), dict(idx_k=indexer.wk), dict(idx_qb=indexer.wq_b)
    )
    proj = indexer.weights_proj.weight.detach().to(_dtype(m))
    return SparseAttentionWeights(
        **{
            **vars(shared),
            "options": dict(
                **shared.options,
                layer_norm_eps=m.indexer.k_norm.eps,
                sparse_count=m.indexer.index_topk,
                index_rope_interleaved=conventions["index_rope_interleaved"],
                **quantized_arguments("index_weight_quant_mode", mode, "dequant_scale_w_", scales),
            ),
        },
        idx_qb=laid(weights["idx_qb"], weight_format),
        idx_k=laid(weights["idx_k"], weight_format),
        idx_proj=laid(proj, weight_format),
        idx_gamma_k=m.indexer.k_norm.weight.detach(),
        idx_beta_k=m.indexer.k_norm.bias.detach(),
    )


@torch.no_grad()
def shared_attention_weights(
    module: nn.Module, weight_format: str | None = None
) -> SharedAttentionWeights:
    """The weights of `npu_sparse_attention_shared_pto`, from a layer with or without an indexer.

    Args:
        module: as in `sparse_attention_weights`; its indexer is not looked for.
        weight_format: as in `sparse_attention_weights`.

    Returns:
        `SharedAttentionWeights`, whose `arguments` the op takes.

    Raises:
        NotSupported: the layer is none that the op computes.
    """
    m, conventions = _supported(module)
    return shared_of(m, conventions, format_of(m.q_a_proj.weight, weight_format))


def _supported(module: nn.Module) -> tuple[Any, dict[str, bool]]:
    """The module, not typed, and its conventions."""
    conventions = _conventions(module)
    m: Any = module
    name = type(module).__name__
    if m.q_lora_rank is None or m.config.attention_bias:
        raise NotSupported(
            "npu_sparse_attention_pto needs a query latent (q_lora_rank) and projections without "
            f"bias; {name} has q_lora_rank={m.q_lora_rank}, "
            f"attention_bias={m.config.attention_bias}."
        )
    eps_cq, eps_ckv = m.q_a_layernorm.variance_epsilon, m.kv_a_layernorm.variance_epsilon
    if eps_cq != eps_ckv:
        raise NotSupported(
            "npu_sparse_attention_pto has one epsilon for both RMSNorms; of this "
            f"{name} q_a_layernorm has {eps_cq}, kv_a_layernorm {eps_ckv}."
        )
    return m, conventions


# by the dtype of its weight, where a linear keeps its scales: block-fp8 checkpoints (DeepSeek), and
# compressed-tensors' and msmodelslim's W8A8 with dynamic activations
_SCALES = {torch.float8_e4m3fn: "weight_scale_inv", torch.int8: "weight_scale"}
_MODES = {torch.float8_e4m3fn: 4, torch.int8: 2}
# of W8A8 with static activations
_STATIC = ("input_scale", "deq_scale", "input_offset")


def load_as_it_is(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a checkpoint's tensors, by their names below `module`, in the place of its parameters: of
    8 bits where they are, with their scales beside them.

    >>> from torch import nn
    >>> from custom.integrations.dsa import load_as_it_is
    >>> projection = nn.ModuleDict(dict(q_a_proj=nn.Linear(4, 2, bias=False)))
    >>> weight, scale = torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1)
    >>> load_as_it_is(projection, {"q_a_proj.weight": weight, "q_a_proj.weight_scale": scale})
    >>> projection.q_a_proj.weight.dtype
    torch.int8
    """
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        place = module.get_submodule(owner)
        if leaf in dict(place.named_parameters(recurse=False)):
            setattr(place, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            setattr(place, leaf, tensor)


def _leaf(m: Any, linear: nn.Linear) -> str:
    name: str = next(name for name, each in m.named_modules() if each is linear)
    return name


def _scale(m: Any, linear: nn.Linear) -> Tensor | None:
    """Float32, of a weight [N, K] of 8 bits: [N / 128, K / 128] or [N, 1]."""
    weight = linear.weight
    name = _SCALES.get(weight.dtype)
    if name is None:
        return None
    where = f"custom.integrations: `{type(m).__name__}.{_leaf(m, linear)}"
    for static in _STATIC:
        if getattr(linear, static, None) is not None:
            raise NotSupported(
                f"{where}.{static}` is given, expected none: activations are quantized token by "
                "token. Take a checkpoint with dynamic activations (W8A8_DYNAMIC)."
            )
    offset = getattr(linear, "weight_offset", None)
    if offset is not None and bool(offset.any()):
        raise NotSupported(
            f"{where}.weight_offset` is not all 0, expected symmetric int8. Take a checkpoint "
            "whose weights are quantized without an offset."
        )
    scale = getattr(linear, name, None)
    rows, columns = weight.shape
    tiles = (-(-rows // quantized.TILE), -(-columns // quantized.TILE))
    tiled = weight.dtype is torch.float8_e4m3fn
    wanted = tiles if tiled else (rows, 1)
    if isinstance(scale, Tensor) and scale.ndim == 1 and wanted[1] == 1:
        scale = scale[:, None]
    if not isinstance(scale, Tensor) or tuple(scale.shape) != wanted:
        came = f"has shape {list(scale.shape)}" if isinstance(scale, Tensor) else "is missing"
        raise NotSupported(
            f"{where}.{name}` {came}, expected {list(wanted)} for a weight {[rows, columns]} of "
            f"{str(weight.dtype).removeprefix('torch.')}. Take a checkpoint with a scale for each "
            f"{'128 x 128 of a weight' if tiled else 'row of a weight'}."
        )
    return scale.float()


def dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What a weight of DeepSeek's fp8 checkpoints stands for: each 128 x 128 of it times its scale.

    Args:
        weight: [N, K] float8_e4m3fn.
        scale: [ceil(N / 128), ceil(K / 128)] float32 (DeepSeek-V3) or float8_e8m0fnu (ue8m0,
            DeepSeek-V4: powers of two, with which bfloat16 is exact).
        dtype: of the result.

    Returns:
        [N, K], the product in float32, rounded once.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit.

    >>> import torch
    >>> from custom.integrations.dsa import dequantised
    >>> weight = torch.full((2, 130), 3.0).to(torch.float8_e4m3fn)
    >>> scale = torch.tensor([[0.5, 4.0]]).to(torch.float8_e8m0fnu)
    >>> dequantised(weight, scale)[0, 126:].tolist()
    [1.5, 1.5, 12.0, 12.0]
    """
    if weight.dtype is not torch.float8_e4m3fn:
        raise TypeError(
            f"dequantised: `weight` is {weight.dtype}, expected torch.float8_e4m3fn. Pass a weight "
            "of 16 bits on as it is."
        )
    if scale.dtype not in (torch.float32, torch.float8_e8m0fnu):
        raise TypeError(
            f"dequantised: `scale` is {scale.dtype}, expected torch.float32 or "
            "torch.float8_e8m0fnu. View the bytes of ue8m0 as the latter."
        )
    wanted = [-(-size // quantized.TILE) for size in weight.shape]
    if weight.ndim != 2 or list(scale.shape) != wanted:
        raise ValueError(
            f"dequantised: `scale` has shape {list(scale.shape)}, expected {wanted} for a weight "
            f"{list(weight.shape)}. Pass a scale for each 128 x 128 of a weight [N, K]."
        )
    rows, columns = weight.shape
    whole = scale.float()
    for dim in (0, 1):
        whole = whole.repeat_interleave(quantized.TILE, dim)
    return (weight.float() * whole[:rows, :columns]).to(dtype)


def dequantized_linear(m: Any, linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """What the weight [N, K] of a linear layer of `m` stands for."""
    scale, weight = _scale(m, linear), linear.weight.detach()
    if scale is None:
        return weight.to(dtype)
    if weight.dtype is torch.float8_e4m3fn:
        return dequantised(weight, scale, dtype)
    return (weight.float() * scale).to(dtype)


def projections(
    m: Any,
    dtype: torch.dtype,
    first: Mapping[str, nn.Linear],
    second: Mapping[str, nn.Linear],
    remedy: str = "Take a checkpoint that quantizes them so.",
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """(weights, scales by the name of their weight, weight_quant_mode) of projections of the
    layer's input, and of its query latent; of 8 bits as they are, others of `dtype`."""
    every = {**first, **second}
    kinds = {name: _MODES.get(linear.weight.dtype, 0) for name, linear in every.items()}
    of_first, of_second = ({kinds[name] for name in names} for names in (first, second))
    if of_first == of_second and len(of_first) == 1:
        (mode,) = of_first
    elif of_first == {0} and of_second == {2}:
        mode = 1
    else:
        dtypes = ", ".join(f"{_leaf(m, each)} {each.weight.dtype}" for each in every.values())
        raise NotSupported(
            f"custom.integrations: the projections of {type(m).__name__} are {dtypes}, expected "
            f"one kind, or int8 behind the query's norm alone. {remedy}"
        )
    weights, scales = {}, {}
    for name, linear in every.items():
        scale = _scale(m, linear)
        weight = linear.weight.detach()
        if scale is None:
            weight = weight.to(dtype)
        else:
            scales[name] = scale.t().contiguous()
        weights[name] = weight
    return weights, scales, mode


def laid(weight: Tensor, weight_format: str) -> Tensor:
    """A linear layer's weight [.., N, K] as an op takes it.  "nz" leaves what NZ's tiles do not
    hold as it is, a few index heads, row-major [.., K, N]."""
    if weight_format == "linear":
        return weight.contiguous()
    weight = weight.mT
    tile = nz.ROWS, max(nz.ROWS, nz.columns(weight.dtype))
    whole = all(size % each == 0 for size, each in zip(weight.shape[-2:], tile, strict=True))
    return nz.to_nz(weight) if whole else weight.contiguous()


def option_of(weight_format: str) -> str:
    """The op's `weight_format` of weights that are `laid`: NZ ones say so by their shape."""
    return "linear" if weight_format == "linear" else "nd"


def _dtype(m: Any) -> torch.dtype:
    """Of activations: what quantized checkpoints keep norms in."""
    dtype: torch.dtype = m.kv_a_proj_with_mqa.weight.dtype
    norm: torch.dtype = m.kv_a_layernorm.weight.dtype
    return norm if dtype in _SCALES else dtype


def up_projections(m: Any) -> tuple[Tensor, Tensor]:
    """uk [N, Dn, R] and uv [N, Dv, R]: views of the module's weight, which is dequantized where it
    is of 8 bits."""
    weight = m.kv_b_proj.weight
    if weight.dtype in _SCALES:
        weight = dequantized_linear(m, m.kv_b_proj, _dtype(m))
    heads = weight.view(-1, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
    uk, uv = heads.split([m.qk_nope_head_dim, m.v_head_dim], dim=1)
    return uk, uv


def check_format(weight_format: str | None) -> None:
    if weight_format not in ("linear", "nz", None):
        raise ValueError(
            f'custom.integrations: `weight_format` is {weight_format!r}, expected "linear" (the '
            'module\'s own weights), "nz" (copies), or None (by the device).'
        )


def format_of(weight: Tensor, weight_format: str | None) -> str:
    """ "linear" or "nz", for a module with this weight."""
    check_format(weight_format)
    return weight_format or ("nz" if weight.device.type == "npu" else "linear")


def shared_of(m: Any, conventions: dict[str, bool], weight_format: str) -> SharedAttentionWeights:
    """Of any module whose projections have these names, with a query latent or without."""
    plain = m.q_lora_rank is None
    first = {} if plain else dict(dq=m.q_a_proj)
    first["dkv_kr"] = m.kv_a_proj_with_mqa
    queries = m.q_proj if plain else m.q_b_proj
    weights, scales, mode = projections(m, _dtype(m), first, dict(uq_qr=queries))
    uk, uv = up_projections(m)
    lies = {name: laid(weight, weight_format) for name, weight in weights.items()}
    return SharedAttentionWeights(
        dq=lies.get("dq"),
        uq_qr=lies["uq_qr"],
        dkv_kr=lies["dkv_kr"],
        uk=uk.contiguous(),
        gamma_cq=None if plain else m.q_a_layernorm.weight.detach(),
        gamma_ckv=m.kv_a_layernorm.weight.detach(),
        uv=uv,
        options=dict(
            softmax_scale=m.scaling,  # with YaRN's factor, where the checkpoint has one
            rms_norm_eps=m.kv_a_layernorm.variance_epsilon,
            rope_interleaved=conventions["rope_interleaved"],
            weight_format=option_of(weight_format),
            **quantized_arguments("weight_quant_mode", mode, "dequant_scale_w_", scales),
        ),
    )


def quantized_arguments(
    argument: str, mode: int, prefix: str, scales: dict[str, Tensor]
) -> dict[str, Any]:
    if mode == 0:
        return {}
    return {argument: mode, **{prefix + name: scale for name, scale in scales.items()}}


def cache_widths(config: Any) -> tuple[int, int, int]:
    """(R, Dr, Di) of a model's configuration, for `PagedCaches`.

    Args:
        config: Transformers', of a DeepSeek-V3.2 or GLM-5 model.

    Returns:
        The widths of a latent, a rotary key and an index key.
    """
    return config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim


def layer_widths(config: Any) -> list[tuple[int, int, int]]:
    """`cache_widths` by layer: a layer that shares its selection keeps no index keys.

    Args:
        config: as in `cache_widths`.

    Returns:
        (R, Dr, Di) of each layer, Di 0 where it keeps none.
    """
    latent, rope, index = cache_widths(config)
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    return [(latent, rope, index if kind == "full" else 0) for kind in kinds]
