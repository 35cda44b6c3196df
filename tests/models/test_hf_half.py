# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Whole models in half precision on every device, by each way in: as near to the model in float32
as its own code is in half precision."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from custom.dispatch import log

transformers = pytest.importorskip("transformers", minversion="5.17")

from custom.integrations.transformers import register, use  # noqa: E402

from ..support.accuracy import assert_close_to_float64, skip_unless_taken  # noqa: E402
from ..support.models import (  # noqa: E402
    SHARING,
    deepseek,
    deepseek_v4,
    glm,
    kimi_linear,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)

# as many keys as there are: two whose scores nearly tie may not change places at the edge
EVERY_KEY = dict(index_topk=64)
MODELS = {
    "deepseek": lambda: deepseek(**EVERY_KEY),
    "glm": lambda: glm(**EVERY_KEY),
    "glm that shares": lambda: glm(**EVERY_KEY | SHARING),
    "deepseek v4": lambda: deepseek_v4(**EVERY_KEY),
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "kimi_linear": kimi_linear,
}
SPARSE, LINEAR = list(MODELS)[:3], list(MODELS)[4:]
CASES = [
    *((name, "use()", kind) for name in SPARSE for kind in ("dynamic",)),
    *((name, "custom_sparse", kind) for name in SPARSE for kind in ("dynamic", "static")),
    # of which Transformers has no static cache
    *(("deepseek v4", way, "dynamic") for way in ("use()", "custom_sparse")),
    *((name, "use()", kind) for name in LINEAR for kind in ("dynamic", "static")),
]
PARTS = (25, 1, 1, 8, 1)


@torch.inference_mode()
def stepped(model, ids, kind):
    """Logits of the texts, which go in by `PARTS`."""
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=sum(PARTS))
    else:
        cache = transformers.DynamicCache(config=model.config)
    parts = ids.to(model.device).split(PARTS, 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


def compare(name, way, kind, backend, placed):
    """`placed` puts the rounded model where it is to run."""
    model, ids = MODELS[name](), torch.randint(1, 128, (3, sum(PARTS)))
    ours, rounded = placed(copy.deepcopy(model))
    for half, whole in zip(rounded.parameters(), model.parameters(), strict=True):
        whole.data.copy_(half)
    exact, own = stepped(model, ids, kind), stepped(rounded, ids, kind)
    if way == "custom_sparse":
        ours.set_attn_implementation(register())
    before = sum(count for (_, ran), count in log.calls.items() if ran == backend)
    with use(page_size=16) if way == "use()" else nullcontext():
        got = stepped(ours, ids, kind)
    after = sum(count for (_, ran), count in log.calls.items() if ran == backend)
    assert after - before >= 3 * len(PARTS)  # of the layers three and more are ours
    assert_close_to_float64("logits", got, own, exact.double())
    return got


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, way, kind", CASES)
def test_logits_are_as_near_as_the_model_s_own(name, way, kind, dtype, device, backend):
    skip_unless_taken(dtype, device, backend)

    def placed(model):
        rounded = model.to(dtype)
        return copy.deepcopy(rounded).to(device), rounded

    got = compare(name, way, kind, backend, placed)
    assert got.device.type == device.type


@pytest.mark.parametrize("name, way", [(n, "use()") for n in MODELS] + [("glm", "custom_sparse")])
def test_a_checkpoint_is_loaded_by_a_device_map(name, way, device, backend, tmp_path):
    """`from_pretrained(.., device_map="cuda", dtype=torch.bfloat16)`, as people load models."""
    pytest.importorskip("accelerate")
    skip_unless_taken(torch.bfloat16, device, backend)

    def placed(model):
        rounded = model.to(torch.bfloat16)
        rounded.save_pretrained(tmp_path)
        options = dict(device_map=device.type, dtype=torch.bfloat16)
        return type(model).from_pretrained(tmp_path, **options).eval(), rounded

    got = compare(name, way, "dynamic", backend, placed)
    assert got.device.type == device.type and got.dtype is torch.bfloat16
