# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""npu_sparse_attention_pto and its stages against Hugging Face's DeepSeek-V3.2 and GLM-5.

The layer attends to a whole text at once, with expanded keys and a mask; ours decodes it token by
token from latent, paged caches in shuffled order.
"""

from __future__ import annotations

import copy
import importlib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import custom

from ..support.accuracy import DTYPES, assert_close_to_float64, skip_unless_taken
from ..support.ragged import PAGE, run, shuffled_table

transformers = pytest.importorskip("transformers", minversion="5.17")
LENGTHS = (41, 7, 26)  # tokens of each text
N, DR, R, TOPK = 8, 16, 32, 12


@dataclass(frozen=True)
class Model:
    """Where its code is, its sizes in their proportions, and how its indexer pairs dimensions."""

    package: str
    prefix: str
    plain: int
    value: int
    index_heads: int
    index_rope_interleaved: bool

    @property
    def modeling(self):
        return importlib.import_module(
            f"transformers.models.{self.package}.modeling_{self.package}"
        )

    def named(self, suffix: str):
        return getattr(self.modeling, self.prefix + suffix)

    def __str__(self):
        return self.prefix


DEEPSEEK = Model("deepseek_v32", "DeepseekV32", 16, 24, 32, False)
GLM = Model("glm_moe_dsa", "GlmMoeDsa", 24, 32, 16, True)
every_model = pytest.mark.parametrize("model", [DEEPSEEK, GLM], ids=str)


class _Float64:
    """The `torch` of the model's module, where its own float32 steps run in float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def float64_throughout(modeling):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch", _Float64())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


class Texts:
    """An attention layer, hidden states of some texts, and what the layer makes of each."""

    def __init__(self, model: Model, topk: int, lengths=LENGTHS) -> None:
        config = model.named("Config")(
            hidden_size=64,
            num_attention_heads=N,
            num_key_value_heads=N,
            q_lora_rank=48,
            kv_lora_rank=R,
            qk_nope_head_dim=model.plain,
            qk_rope_head_dim=DR,
            v_head_dim=model.value,
            index_n_heads=model.index_heads,
            index_head_dim=32,
            index_topk=topk,
            attn_implementation="eager",
        )
        self.attention = model.named("Attention")(config, 0).double().eval()
        for parameter in self.attention.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.rotary = model.named("RotaryEmbedding")(config)
        self.model, self.lengths, self.topk = model, lengths, topk
        self.hidden = [torch.randn(length, 64).double() for length in lengths]

    def rounded_to(self, dtype: torch.dtype) -> Texts:
        self.attention = self.attention.to(dtype).double()
        self.hidden = [x.to(dtype).double() for x in self.hidden]
        return self

    def cos_sin(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[length, Dr] of a text's positions, rounded to `dtype`, in float64."""
        x = torch.zeros(1, dtype=torch.float32)
        cos, sin = self.rotary(x, torch.arange(length)[None])
        return cos[0].to(dtype).double(), sin[0].to(dtype).double()

    @torch.no_grad()
    def by_the_model(
        self, dtype: torch.dtype, evaluate: torch.dtype = torch.float64, given=None
    ) -> list[tuple[Tensor, Tensor]]:
        """By text: output [length, hidden] and selected positions [length, topk], evaluated in
        `evaluate` from inputs of `dtype`; with `given`, attending to these positions instead."""
        attention = copy.deepcopy(self.attention).to(evaluate)
        chosen: list[Tensor] = []
        outputs: list[Tensor] = []

        def select(_module, _inputs, out: Tensor) -> Tensor | None:
            chosen.append(out[0])
            return given[len(outputs)][None] if given else None

        attention.indexer.register_forward_hook(select)
        for x in self.hidden:
            hidden_keys = torch.full((len(x), len(x)), torch.finfo(evaluate).min, dtype=evaluate)
            cos, sin = (y[None].to(evaluate) for y in self.cos_sin(len(x), dtype))
            mask = hidden_keys.triu(1)[None, None]
            double = evaluate is torch.float64
            with float64_throughout(self.model.modeling) if double else nullcontext():
                out, *_ = attention(x[None].to(evaluate), (cos, sin), mask)
            outputs.append(out[0])
        return list(zip(outputs, chosen, strict=True))

    def weights(self, dtype, device, form="4-D NZ") -> dict[str, Tensor]:
        layer, indexer = self.attention, self.attention.indexer
        plain = self.model.plain
        up = layer.kv_b_proj.weight.view(N, plain + self.model.value, R)

        def matrix(linear: torch.nn.Linear) -> Tensor:
            w = linear.weight.detach().T.to(dtype).contiguous()
            return {
                "4-D NZ": custom.to_nz,
                "2-D NZ": lambda w: custom.to_nz(w, flat=True),
                "row-major": lambda w: w,
            }[form](w).to(device)

        def vector(w: Tensor) -> Tensor:
            return w.detach().to(device, dtype).contiguous()

        return dict(
            w_dq=matrix(layer.q_a_proj),
            w_uq_qr=matrix(layer.q_b_proj),
            w_uk=vector(up[:, :plain]),
            w_dkv_kr=matrix(layer.kv_a_proj_with_mqa),
            gamma_cq=vector(layer.q_a_layernorm.weight),
            gamma_ckv=vector(layer.kv_a_layernorm.weight),
            w_idx_qb=matrix(indexer.wq_b),
            w_idx_k=matrix(indexer.wk),
            w_idx_proj=matrix(indexer.weights_proj),
            in_gamma_k=vector(indexer.k_norm.weight),
            in_beta_k=vector(indexer.k_norm.bias),
            weight_format="nd" if form == "row-major" else "nz",
        )

    @torch.no_grad()
    def projected(self, latent: Tensor) -> Tensor:
        """[.., N, R] through the value up-projection and the output projection, in float64."""
        plain = self.model.plain
        up = self.attention.kv_b_proj.weight.view(N, -1, R)[:, plain:]
        value = torch.einsum("...nr,nvr->...nv", latent.double().cpu(), up)
        return self.attention.o_proj(value.flatten(-2))


class Decoder:
    """Feeds the texts step by step, `tokens` at a time, each from its own first token."""

    def __init__(self, texts: Texts, dtype, device, backend, tokens=1, form="4-D NZ") -> None:
        self.texts, self.dtype, self.device, self.backend = texts, dtype, device, backend
        self.tokens = tokens
        self.weights = texts.weights(dtype, device, form)
        self.table, pages = shuffled_table([length + tokens for length in texts.lengths])

        def cache(size: int) -> Tensor:
            return torch.full((pages, PAGE, 1, size), torch.nan, dtype=dtype, device=device)

        self.caches = dict(kv_cache=cache(R), kr_cache=cache(DR), index_k_cache=cache(32))

    def step(self, first: int) -> dict:
        """Arguments for the tokens first ... of every text; a text that has ended writes nothing
        and is empty."""
        S, texts = self.tokens, self.texts
        x, sin, cos = (torch.zeros(len(texts.lengths), S, size).double() for size in (64, DR, DR))
        slots = torch.full((len(texts.lengths), S), -1, dtype=torch.int32)
        lengths = torch.zeros(len(texts.lengths), dtype=torch.int32)
        for i, length in enumerate(texts.lengths):
            c, s = texts.cos_sin(length, self.dtype)
            for j in range(S):
                p = first + j
                if p < length:
                    x[i, j], cos[i, j], sin[i, j] = texts.hidden[i][p], c[p], s[p]
                    slots[i, j] = self.table[i, p // PAGE] * PAGE + p % PAGE
            # a text that ends inside the step: its last tokens are drafts nobody wants
            lengths[i] = first + S if first < length else 0
            for j in range(S):
                p = first + j
                if first < length <= p:
                    slots[i, j] = self.table[i, p // PAGE] * PAGE + p % PAGE
        return dict(
            x=x.to(self.device, self.dtype),
            sin=sin.to(self.device, self.dtype),
            cos=cos.to(self.device, self.dtype),
            cache_index=slots.to(self.device),
            block_table=self.table.to(self.device),
            act_seqs=lengths.to(self.device),
        )

    def decode(self, **options) -> list[Tensor]:
        """[length, N, R] of every text."""
        outs: list[list[Tensor]] = [[] for _ in self.texts.lengths]
        for first in range(0, max(self.texts.lengths), self.tokens):
            out = run(
                "npu_sparse_attention_pto",
                self.backend,
                **self.step(first),
                **self.weights,
                **self.caches,
                index_rope_interleaved=self.texts.model.index_rope_interleaved,
                **options,
            ).cpu()
            for i, length in enumerate(self.texts.lengths):
                outs[i] += list(out[i, : max(0, length - first)])
                if first >= length:
                    assert (out[i] == 0).all()
        return [torch.stack(out) for out in outs]


@pytest.mark.parametrize(
    ("tokens", "form"),
    [(1, "4-D NZ"), (2, "4-D NZ"), (5, "4-D NZ"), (2, "2-D NZ"), (2, "row-major")],
)
@pytest.mark.parametrize("topk", [TOPK, 64])
@every_model
def test_decoding_equals_the_model_in_float64(model, topk, tokens, form):
    texts = Texts(model, topk)
    device = torch.device("cpu")
    decoder = Decoder(texts, torch.float64, device, "reference", tokens, form)
    outs = decoder.decode(sparse_count=topk)
    for out, (wanted, _) in zip(outs, texts.by_the_model(torch.float64), strict=True):
        torch.testing.assert_close(texts.projected(out), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_model
def test_decoding_with_all_keys_selected(device, backend, dtype, model):
    """No selection, so that rounding alone separates the two; the model in `dtype` is the yard."""
    skip_unless_taken(dtype, device, backend)
    texts = Texts(model, 64).rounded_to(dtype)
    outs = Decoder(texts, dtype, device, backend, tokens=2).decode(sparse_count=64)
    exact, plain = texts.by_the_model(dtype), texts.by_the_model(dtype, dtype)
    for out, (wanted, _), (rounded, _) in zip(outs, exact, plain, strict=True):
        assert_close_to_float64("output", texts.projected(out).to(dtype), rounded, wanted)


def stages(texts: Texts, i: int, dtype, device, backend, topk: int):
    """Text i in one call of each prolog and of the indexer: queries, indices, values, caches."""
    decoder = Decoder(texts, dtype, device, backend, tokens=max(texts.lengths))
    step, w, caches = decoder.step(0), decoder.weights, decoder.caches
    length = texts.lengths[i]
    rows = slice(i, i + 1)

    def own(x: Tensor) -> Tensor:
        return x[rows, :length].contiguous()

    sin, cos, slots = own(step["sin"]), own(step["cos"]), own(step["cache_index"])
    query, query_rope, query_norm = run(
        "npu_mla_prolog_pto",
        backend,
        token_x=own(step["x"]),
        weight_dq=w["w_dq"],
        weight_uq_qr=w["w_uq_qr"],
        weight_uk=w["w_uk"],
        weight_dkv_kr=w["w_dkv_kr"],
        rmsnorm_gamma_cq=w["gamma_cq"],
        rmsnorm_gamma_ckv=w["gamma_ckv"],
        rope_sin=sin,
        rope_cos=cos,
        kv_cache=caches["kv_cache"],
        kr_cache=caches["kr_cache"],
        cache_index=slots,
    )
    query_index, weights = run(
        "npu_indexer_prolog_pto",
        backend,
        token_x=own(step["x"]),
        query_norm=query_norm,
        weight_qb=w["w_idx_qb"],
        weight_k=w["w_idx_k"],
        weight_proj=w["w_idx_proj"],
        ln_gamma_k=w["in_gamma_k"],
        ln_beta_k=w["in_beta_k"],
        rope_sin=sin,
        rope_cos=cos,
        index_k_cache=caches["index_k_cache"],
        cache_index=slots,
        rope_interleaved=texts.model.index_rope_interleaved,
    )
    paged = dict(
        block_table=step["block_table"][rows],
        layout_query="BSND",
    )
    length_key = torch.tensor([length], dtype=torch.int32, device=device)
    indices, values = run(
        "npu_lightning_indexer",
        backend,
        query=query_index,
        key=caches["index_k_cache"],
        weights=weights,
        actual_seq_lengths_key=length_key,
        layout_key="PA_BSND",
        sparse_count=topk,
        return_value=True,
        **paged,
    )

    def attend(indices: Tensor) -> Tensor:
        out, _, _ = run(
            "npu_sparse_flash_attention",
            backend,
            query=query,
            key=caches["kv_cache"],
            value=None,
            sparse_indices=indices,
            scale_value=texts.attention.scaling,
            actual_seq_lengths_kv=length_key,
            query_rope=query_rope,
            key_rope=caches["kr_cache"],
            layout_kv="PA_BSND",
            **paged,
        )
        return out[0]

    return indices[0, :, 0].cpu(), values[0, :, 0].cpu(), attend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_model
def test_selection_and_attention_given_the_selection(device, backend, dtype, model):
    """The model's own selection, but for scores that the rounding of `dtype` cannot tell apart;
    then the attention over exactly that selection."""
    skip_unless_taken(dtype, device, backend)
    texts = Texts(model, TOPK).rounded_to(dtype)
    exact = texts.by_the_model(dtype)
    plain = texts.by_the_model(dtype, dtype, given=[chosen for _, chosen in exact])
    # every position with its score, in float64: the yard for the selection
    reference = (torch.float64, torch.device("cpu"), "reference")
    for i, length in enumerate(texts.lengths):
        indices, _, attend = stages(texts, i, dtype, device, backend, TOPK)
        everything, scores, _ = stages(texts, i, *reference, max(texts.lengths))
        # the inputs of the scores are rounded to `dtype` some ten times on their way
        band = 16 * torch.finfo(dtype).eps * scores.abs().max()
        for row in range(length):
            kept = min(TOPK, row + 1)
            theirs = set(exact[i][1][row].tolist()) & set(range(row + 1))
            ours = set(indices[row, :kept].tolist())
            assert len(ours) == kept and (indices[row, kept:] == -1).all()
            assert everything[row, : row + 1].tolist() == list(range(row + 1))
            least = min(scores[row, p] for p in theirs)
            for p in ours ^ theirs:
                assert abs(scores[row, p] - least) <= band, f"text {i}, token {row}, key {p}"
                assert dtype is not torch.float64, "in float64 there is nothing to excuse"
        given = exact[i][1].to(torch.int32)[None, :, None].to(device)
        out = texts.projected(attend(given)).to(dtype)
        assert_close_to_float64("output", out, plain[i][0], exact[i][0])
