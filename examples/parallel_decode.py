# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Decode on several ranks, and find the tokens of one process.

    torchrun --nproc-per-node 4 examples/parallel_decode.py [--device cuda] [--help]

A small model with DeepSeek-V3.2's attention (random weights) prefills ragged prompts and decodes.
Every rank does it alone, for the truth; then the ranks do it together, twice: tensor parallel, with
heads dealt out and whole caches everywhere, and context parallel besides, with the latents of every
request dealt out too. gloo on CPUs, NCCL on GPUs.
"""

from _options import parallel as options_of

if __name__ == "__main__":  # what is wrong is said before the imports, which take seconds
    options_of(__doc__)

import datetime
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from _agreement import check
from _device import print_backends

import custom
from custom import parallel
from custom.integrations.paged import PagedCaches, token_positions

LAYERS, VOCABULARY, H, RQ, DN, R, DR, NI, DI, DV, PAGE = 2, 128, 64, 64, 32, 64, 32, 16, 64, 32, 16
ROUNDINGS = 16 * LAYERS  # that activations go through one after the other


class Model:
    """Weights, the same on all ranks: drawn on the CPU from one seed."""

    def __init__(self, heads, device, dtype):
        random = torch.Generator().manual_seed(0)

        def draw(*shape, std=None):
            drawn = torch.randn(*shape, generator=random) * (std or shape[0] ** -0.5)
            return drawn.to(device, dtype)

        self.device, self.dtype, self.heads = device, dtype, heads
        # in half precision a near-tie at the edge of a selection falls either way: there, all
        self.selected = 16 if dtype is torch.float32 else 64
        self.embedding = draw(VOCABULARY, H, std=1.0)
        self.layers = [
            dict(
                w_dq=custom.to_nz(draw(H, RQ)),
                w_uq_qr=custom.to_nz(draw(RQ, heads * (DN + DR))),
                w_uk=draw(heads, DN, R, std=DN**-0.5),
                w_dkv_kr=custom.to_nz(draw(H, R + DR)),
                gamma_cq=torch.ones(RQ, device=device, dtype=dtype),
                gamma_ckv=torch.ones(R, device=device, dtype=dtype),
                w_idx_qb=custom.to_nz(draw(RQ, NI * DI)),
                w_idx_k=custom.to_nz(draw(H, DI)),
                w_idx_proj=custom.to_nz(draw(H, NI)),
                in_gamma_k=torch.ones(DI, device=device, dtype=dtype),
                in_beta_k=torch.zeros(DI, device=device, dtype=dtype),
            )
            for _ in range(LAYERS)
        ]
        # value up-projection [N, R, Dv] and output projection [H, N * Dv]
        self.outputs = [
            (draw(heads, R, DV, std=R**-0.5), draw(H, heads * DV, std=(heads * DV) ** -0.5))
            for _ in range(LAYERS)
        ]

    def angles(self, positions):
        turns = positions.clamp(min=0)[..., None] * 1e4 ** -(
            torch.arange(DR // 2, device=self.device) / (DR // 2)
        )
        both = torch.cat([turns, turns], -1)
        return both.sin().to(self.dtype), both.cos().to(self.dtype)


def norm(x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


class Alone:
    """Decodes with whole caches and all heads."""

    def __init__(self, model, requests, capacity):
        self.model, self.outputs, self.layers = model, model.outputs, model.layers
        self.caches = self.pages(requests, capacity, (R, DR, DI))

    def pages(self, requests, capacity, widths):
        return PagedCaches(
            LAYERS,
            widths,
            requests=requests,
            capacity=capacity,
            page_size=PAGE,
            dtype=self.model.dtype,
            device=self.model.device,
        )

    def forward(self, tokens, lengths):
        """Logits [B, S, V] of the last S tokens of requests that are `lengths` [B] long with them;
        a request shorter than S is padded on the left."""
        positions = token_positions(lengths, tokens.shape[1])
        sin, cos = self.model.angles(positions)
        step = dict(sin=sin, cos=cos, act_seqs=lengths.to(torch.int32))
        hidden = self.model.embedding[tokens]
        for number, (up, down) in enumerate(self.outputs):
            latent = self.attend(number, dict(step, x=norm(hidden)), positions)
            values = torch.einsum("bsnr,nrv->bsnv", latent, up).flatten(2)
            hidden = hidden + self.joined(values @ down.T)
        return norm(hidden) @ self.model.embedding.T

    def whole(self, number, step, positions):
        pools = self.caches.layers[number]
        arguments: dict[str, Any] = dict(
            self.layers[number],
            **step,
            kv_cache=pools.kv,
            kr_cache=pools.kr,
            index_k_cache=pools.index_k,
            block_table=self.caches.block_table,
            cache_index=self.caches.slots(positions),
        )
        return arguments

    def attend(self, number, step, positions):
        layer = self.whole(number, step, positions)
        return custom.npu_sparse_attention_pto(**layer, sparse_count=self.model.selected)

    def joined(self, partial):
        return partial


class TensorParallel(Alone):
    """This rank's heads; the sum behind the output projection is the only collective."""

    def __init__(self, model, requests, capacity, group):
        super().__init__(model, requests, capacity)
        self.group = group
        self.layers = [parallel.shard_layer(layer, group=group) for layer in model.layers]
        self.outputs = [
            (parallel.shard(up, 0, group), parallel.shard(down, 1, group))
            for up, down in model.outputs
        ]

    def attend(self, number, step, positions):
        layer = self.whole(number, step, positions)
        return parallel.tensor_parallel_attention(
            layer, group=self.group, sparse_count=self.model.selected
        )

    def joined(self, partial):
        return parallel.all_reduce(partial, self.group)


class ContextParallel(TensorParallel):
    """And this rank's part of every request's latents; index keys are whole."""

    def __init__(self, model, requests, capacity, group):
        super().__init__(model, requests, capacity, group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        own = -(-capacity // self.size)
        self.caches = self.pages(requests, capacity, (0, 0, DI))
        self.shards = self.pages(requests, own, (R, DR, 0))

    def attend(self, number, step, positions):
        layer, own = self.whole(number, step, positions), self.shards.layers[number]
        table = self.shards.block_table
        index: dict[str, Any] = dict(
            index_block_table=layer["block_table"], index_cache_index=layer["cache_index"]
        )
        slots = custom.shard_slots(positions, table, PAGE, self.rank, self.size)
        layer.update(kv_cache=own.kv, kr_cache=own.kr, block_table=table, cache_index=slots)
        return parallel.context_parallel_attention(
            layer, group=self.group, **index, sparse_count=self.model.selected
        )


def decode(decoder, prompts, lengths, tokens):
    """Logits [B, new tokens, V] behind prompts that are padded on the left; `tokens` [B, steps] are
    fed, or the best ones where there are none."""
    steps = [decoder.forward(prompts, lengths)[:, -1:]]
    for step in range(1, tokens if isinstance(tokens, int) else tokens.shape[1]):
        best = steps[-1].argmax(-1)
        fed = best if isinstance(tokens, int) else tokens[:, step - 1 : step]
        steps.append(decoder.forward(fed, lengths + step))
    return torch.cat(steps, 1)


def main():
    options = options_of(__doc__)
    if not dist.is_torchelastic_launched():
        sys.exit(
            "parallel_decode: expected to be run by torchrun, as the first lines of this file say"
        )
    backend = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[options.device]
    device = torch.device(options.device)
    if options.device != "cpu":
        device = torch.device(options.device, int(os.environ["LOCAL_RANK"]))
        getattr(torch, options.device).set_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None  # init_process_group made it
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16

    random = torch.Generator().manual_seed(1)
    lengths = torch.tensor([1, 45, 17, 30])
    prompts = torch.randint(VOCABULARY, (4, int(lengths.max())), generator=random).to(device)
    lengths = lengths.to(device)
    capacity = int(lengths.max()) + options.new_tokens
    model = Model(2 * size, device, dtype)
    with torch.no_grad():
        alone = decode(Alone(model, 4, capacity), prompts, lengths, options.new_tokens)
        tokens = alone.argmax(-1)
        if dist.get_rank() == 0:
            print(f"device: {device.type}, {size} ranks over {backend}, {str(dtype)[6:]}")
        for kind in (TensorParallel, ContextParallel):
            logits = decode(kind(model, 4, capacity, group), prompts, lengths, tokens)
            every = parallel.all_reduce(logits.argmax(-1), group)
            assert torch.equal(every, size * logits.argmax(-1)), "the ranks' tokens differ"
            if dist.get_rank() == 0:
                check(kind.__name__, logits, logits.argmax(-1), alone, ROUNDINGS)
    if dist.get_rank() == 0:
        print_backends()
    dist.destroy_process_group()
    # torch keeps a group that had functional collectives: the threads of gloo outlive it, and may
    # abort an interpreter that ends around them (pytorch issue 190489)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
