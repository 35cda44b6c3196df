# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How the model examples assert that a model on our ops agrees with the unmodified model."""

import math

import torch


def rounding_bound(logits, roundings):
    """How far two computations of `logits` in their dtype can lie apart.

    In each, activations are rounded `roundings` times one after the other on their way to the
    logits. One rounding is off by a fifth of eps (relative, rms: eps / sqrt(12), over the mean
    mantissa of 1.44). Roundings are independent, in two models all the more, and a residual network
    with small weights passes them on unamplified: their variances add up. Products accumulate in
    float32, which adds nothing. Six sigma, since the largest of some 10**5 differences counts.
    """
    eps = torch.finfo(logits.dtype).eps
    rms = logits.double().square().mean().sqrt().item()
    return 6 * (eps / 5) * math.sqrt(2 * roundings) * rms


def check(title, logits, tokens, reference, roundings):
    """Assert that `logits` [B, S, V] and their `tokens` [B, S] agree with the `reference` logits.

    float32: the same tokens. Else: a bound on the difference of the logits, and the same tokens
    wherever the gap between the two best exceeds it.
    """
    worst = (logits.float() - reference.float()).abs().max().item()
    same = reference.argmax(-1) == tokens
    if logits.dtype == torch.float32:
        assert same.all(), f"{title}: {int((~same).sum())} of {same.numel()} tokens differ"
        print(f"  {title}: all {same.numel()} tokens equal, logits within {worst:.1e}")
        return
    bound = rounding_bound(reference, roundings)
    best = reference.float().topk(2, -1).values
    clear = best[..., 0] - best[..., 1] > bound
    assert worst <= bound, f"{title}: logits differ by {worst:.3g}, more than {bound:.3g}"
    assert same[clear].all(), f"{title}: {int((~same[clear]).sum())} clear choices differ"
    print(
        f"  {title}: logits within {worst:.4f}, bound {bound:.4f}; {int(same.sum())} of "
        f"{same.numel()} tokens equal, and all {int(clear.sum())} with a gap over the bound"
    )
