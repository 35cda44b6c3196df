# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Pictures of the layers, the caches, the mask, the tiles and the dispatch, for docs/.

python -m docs.plots (`make figures`) writes them, and the plots
"""

from __future__ import annotations

from .svg import Picture


def dsa_layer() -> Picture:
    """Which op is which part of a DSA layer."""
    p = Picture(700, 440, "A DSA layer of DeepSeek-V3.2 and the op of each part")
    p.labelled(20, 160, 90, 54, "theirs", "hidden", "x [B, S, H]")
    p.frame(140, 18, 470, 372, "all of it in one call: npu_sparse_attention_pto")
    p.labelled(
        160,
        62,
        210,
        74,
        "ours",
        "MLA prolog",
        "npu_mla_prolog_pto",
        "project, norm, RoPE, write",
        code=1,
    )
    p.labelled(
        160,
        238,
        210,
        74,
        "ours",
        "indexer prolog",
        "npu_indexer_prolog_pto",
        "project, norm, RoPE, write",
        code=1,
    )
    p.labelled(405, 62, 185, 40, "memory", "kv_cache, kr_cache", "latents, rotary keys")
    p.labelled(405, 330, 185, 40, "memory", "index_k_cache", "index keys")
    p.labelled(405, 238, 185, 62, "ours", "indexer: top-k keys", "npu_lightning_indexer", code=1)
    p.labelled(392, 136, 211, 62, "ours", "sparse attention", "npu_sparse_flash_attention", code=1)
    p.labelled(624, 136, 68, 62, "theirs", "W_uv", "o_proj")
    p.arrow((110, 180), (128, 180), (128, 99), (158, 99))
    p.arrow((110, 194), (128, 194), (128, 275), (158, 275))
    p.arrow((265, 136), (265, 236))
    p.text(271, 190, "query_norm", size=12, anchor="start", kind="soft")
    p.arrow((370, 84), (403, 84))
    p.arrow((330, 312), (330, 350), (403, 350))
    p.arrow((498, 102), (498, 134))
    p.arrow((350, 136), (350, 167), (390, 167))
    p.arrow((370, 269), (403, 269))
    p.text(386, 262, "q, w", size=11, kind="soft")
    p.arrow((498, 330), (498, 302))
    p.arrow((498, 238), (498, 200))
    p.text(504, 223, "positions", size=12, anchor="start", kind="soft")
    p.arrow((603, 167), (622, 167))
    p.text(657, 216, "yours", size=12, kind="soft")
    p.box(150, 404, 16, 14, "ours")
    p.text(172, 416, "an op of this package", size=12, anchor="start", kind="soft")
    p.box(320, 404, 16, 14, "memory")
    p.text(342, 416, "paged cache, updated in place", size=12, anchor="start", kind="soft")
    p.box(535, 404, 16, 14, "theirs")
    p.text(557, 416, "the model's own", size=12, anchor="start", kind="soft")
    return p


def gdn_layer() -> Picture:
    """Which op is which part of a layer of linear attention."""
    p = Picture(700, 380, "A layer of gated delta rule or KDA and the op of each part")
    p.labelled(16, 136, 92, 60, "theirs", "in_proj", "q k v, z, a, b")
    p.frame(126, 20, 464, 250, "a decode step in one call: npu_gated_delta_layer_decode")
    p.row(
        (130, 70, "ours"),
        (140, 130, "convolution", "of 4 tokens"),
        (292, 140, "delta rule", "gates, norm of q, k"),
        (454, 124, "gated norm", "norm(o) act(z)"),
    )
    p.labelled(606, 136, 78, 60, "theirs", "out_proj", "yours")
    p.row(
        (60, 40, "memory"),
        (140, 130, "conv_states", "[slots, W-1, D]"),
        (292, 140, "states", "[slots, Nv, Dk, Dv]"),
    )
    p.arrow((108, 166), (138, 166))
    p.arrow((270, 166), (290, 166))
    p.arrow((432, 166), (452, 166))
    p.arrow((578, 166), (604, 166))
    p.arrow((205, 102), (205, 128))
    p.arrow((362, 102), (362, 128))
    p.arrow((62, 196), (62, 244), (362, 244), (362, 202))
    p.text(210, 239, "a, b: decay and rate", size=12, kind="soft")
    p.arrow((62, 244), (62, 256), (516, 256), (516, 202))
    p.text(470, 251, "z: the gate", size=12, kind="soft")
    rows = (
        ("", "convolution", "delta rule", "norm"),
        ("GDN", "npu_causal_conv1d", "npu_chunk_gated_delta_rule", "npu_gated_rms_norm"),
        ("KDA", "npu_causal_conv1d", "npu_chunk_kda", "npu_gated_rms_norm"),
        (
            "drafts",
            "npu_causal_conv1d_update",
            "npu_recurrent_gated_delta_rule",
            "npu_gated_rms_norm",
        ),
    )
    for i, row in enumerate(rows):
        for x, cell in zip((20, 84, 282, 526), row, strict=True):
            p.text(
                x,
                300 + 21 * i,
                cell,
                size=12,
                anchor="start",
                bold=i == 0 or x == 20,
                code=i > 0 and x > 20,
            )
    p.rule(20, 306, 684, 306)
    return p


def paged_cache() -> Picture:
    """How position, table, page and slot hang together."""
    p = Picture(700, 330, "A paged cache: position, block table, page and slot")
    pages, side = [7, 2, 5], 36
    p.text(20, 34, "request b, P = 4 positions a page", bold=True, anchor="start")
    p.text(20, 66, "position", anchor="start", kind="soft")
    for n in range(12):
        there = n < 10
        p.box(120 + n * side, 48, side - 4, 28, "seen" if there else "theirs")
        p.text(120 + n * side + 16, 67, str(n) if there else "-")
    p.text(570, 67, "10 tokens so far", anchor="start", size=12, kind="soft")
    p.text(20, 128, "block table", anchor="start", kind="soft")
    for i, page in enumerate([*pages, -1]):
        x = 120 + i * 4 * side
        p.box(x, 108, 4 * side - 4, 30, "ours" if page >= 0 else "theirs")
        p.text(x + 2 * side - 2, 128, f"page {page}" if page >= 0 else "-1: none")
        if i < 3:
            p.arrow((x + 2 * side - 2, 78), (x + 2 * side - 2, 106))
    p.text(20, 196, "the cache", anchor="start", bold=True)
    p.text(20, 214, "[pages, P, 1, D]", anchor="start", code=True, size=12)
    for page in range(8):
        x = 170 + page * 64
        used = page in pages
        p.box(x, 178, 60, 48, "memory" if used else "theirs")
        p.text(x + 30, 197, f"page {page}", size=12)
        p.text(x + 30, 216, f"{4 * page}..{4 * page + 3}", size=12, kind="soft")
    for i, page in enumerate(pages):
        p.arrow((120 + i * 4 * side + 2 * side - 2, 140), (200 + page * 64, 176))
    p.text(20, 262, "slot = page * P + p % P", anchor="start", code=True, bold=True)
    p.text(
        20,
        288,
        "Position 9 lies in page block_table[b, 9 // 4] = 5, so its slot is 5 * 4 + 1 = 21.",
        anchor="start",
    )
    p.text(
        20,
        310,
        "cache_index and slots take slots. Indices of the indexer are positions.",
        anchor="start",
        kind="soft",
    )
    return p


def causal() -> Picture:
    """Alignment at the last key, and a window."""
    p = Picture(700, 290, "The causal mask is aligned at the last key")
    side = 28

    def grid(x: float, title: str, rows: int, window: int | None) -> None:
        keys = 8
        p.text(x, 34, title, bold=True, anchor="start")
        for k in range(keys):
            p.text(x + 76 + k * side + 12, 66, str(k), size=12, kind="soft")
        p.text(x, 66, "key", size=12, anchor="start", kind="soft")
        for q in range(rows):
            y = 76 + q * side
            p.text(x, y + 17, f"query {q}", size=12, anchor="start", kind="soft")
            last = q + keys - rows
            for k in range(keys):
                seen = k <= last and (window is None or last - k < window)
                p.box(x + 76 + k * side, y, side - 4, side - 4, "seen" if seen else "theirs")
                if seen:
                    p.text(x + 76 + k * side + 12, y + 17, "x", size=12)

    grid(20, "S = 4 queries, S2 = 8 keys, causal=True", 4, None)
    grid(372, "the same with window=3", 4, 3)
    p.text(20, 222, "query i sees key j  if  j <= i + S2 - S", anchor="start", code=True)
    p.text(372, 222, "and  i + S2 - S - j < window", anchor="start", code=True)
    p.text(
        20,
        250,
        "The last query always sees the last key: a decode step needs no mask.",
        anchor="start",
    )
    p.text(
        20,
        272,
        "window counts the key itself: window_size=(w, 0) of others is window=w + 1.",
        anchor="start",
    )
    return p


def nz_tiles() -> Picture:
    """Where FRACTAL_NZ puts the tiles of a matrix."""
    p = Picture(700, 330, "FRACTAL_NZ: a matrix as columns of 16 x 16 tiles")
    p.text(20, 32, "W [K, N], K = 48, N = 64 (bf16)", bold=True, anchor="start")
    kinds = ("ours", "memory", "seen", "theirs")
    for panel in range(4):
        for row in range(3):
            x, y = 60 + panel * 62, 52 + row * 54
            p.box(x, y, 58, 50, kinds[panel])
            p.text(x + 29, y + 30, str(panel * 3 + row), size=15, bold=True)
        p.text(89 + panel * 62, 230, f"panel {panel}", size=12, kind="soft")
    for row in range(3):
        p.text(52, 81 + row * 54, f"{16 * row}", size=12, anchor="end", kind="soft")
    p.text(370, 32, "in memory: NZ [N/16, K/16, 16, 16]", bold=True, anchor="start")
    for n in range(12):
        x, y = 370 + (n % 6) * 52, 52 + (n // 6) * 54
        p.box(x, y, 48, 40, kinds[n // 3])
        p.text(x + 24, y + 26, str(n), size=15, bold=True)
    p.text(370, 180, "One panel of 16 columns after the other,", anchor="start")
    p.text(370, 200, "in a panel its rows from top to bottom.", anchor="start")
    p.text(20, 266, "W[k, n] is NZ[n // 16, k // 16, k % 16, n % 16]", anchor="start", code=True)
    p.text(20, 292, "custom.to_nz(w) makes it, custom.from_nz(z, shape) undoes it.", anchor="start")
    p.text(20, 312, 'As they are: [K, N] weight_format="nd", nn.Linear "linear".', anchor="start")
    return p


def dispatch() -> Picture:
    """Who runs a call."""
    p = Picture(700, 330, "The device of the tensors chooses the backend")
    p.labelled(230, 16, 240, 44, "theirs", "custom.npu_x(q, ..)", "on any device")
    p.labelled(230, 88, 240, 44, "ours", "checks, one schema", "eager, compiled, captured")
    p.arrow((350, 60), (350, 86))
    boxes = (
        (16, "npu", "triton-ascend kernels", "Atlas A3; simulated only"),
        (248, "cuda", "Triton kernels, sm_80 on", "H100, H200: Gluon kernels"),
        (480, "cpu", "plain PyTorch", "the reference, for tests"),
    )
    for x, device, first, second in boxes:
        p.arrow((350, 132), (350, 150), (x + 102, 150), (x + 102, 176))
        p.text(x + 110, 169, device, anchor="start", code=True)
        p.labelled(x, 178, 204, 54, "ours", first, second)
    p.text(20, 266, "CUSTOM_BACKEND=reference runs plain PyTorch on any device.", anchor="start")
    p.text(
        20,
        288,
        "A call that no backend can run raises NotSupported with each one's reason;",
        anchor="start",
    )
    p.text(20, 308, "nothing falls back in silence.", anchor="start")
    return p


def architecture() -> Picture:
    """Who imports whom."""
    p = Picture(700, 360, "The packages and who imports whom")
    p.labelled(190, 14, 240, 50, "ours", "custom/", "functions, info, bench, integrations")
    p.row(
        (104, 50, "ours"),
        (16, 180, "dispatch/ops/", "schema, check, gradient"),
        (222, 208, "dispatch/backends", "who runs the call"),
        (504, 180, "graph_mode/", "capture, torchair, ONNX"),
    )
    p.row(
        (206, 50, "theirs"),
        (16, 204, "cuda_ops/", "Triton, hopper/, common/"),
        (248, 204, "npu_ops/", "triton-ascend for Atlas A3"),
        (480, 204, "dispatch/reference/", "plain PyTorch, the oracle"),
    )
    p.labelled(140, 300, 420, 44, "memory", "dispatch/common/", "layouts, pages, NZ, memory")
    p.arrow((326, 64), (326, 102))
    p.arrow((430, 39), (594, 39), (594, 102))
    p.arrow((504, 129), (432, 129))
    p.arrow((222, 129), (198, 129))
    for x in (118, 350, 582):
        p.arrow((326, 154), (326, 180), (x, 180), (x, 204), dashed=True)
    p.text(594, 172, "dashed: at the first call", size=12, kind="soft")
    p.arrow((118, 256), (118, 278), (250, 278), (250, 298))
    p.arrow((350, 256), (350, 298))
    p.arrow((582, 256), (582, 278), (450, 278), (450, 298))
    return p


PICTURES = {
    "architecture": architecture,
    "dsa_layer": dsa_layer,
    "gdn_layer": gdn_layer,
    "paged_cache": paged_cache,
    "causal": causal,
    "nz_tiles": nz_tiles,
    "dispatch": dispatch,
}
