# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""How the model examples assert that a model on our ops agrees with the unmodified model."""

import math

import torch

# relative error (rms) of one number of 8 bits: e4m3 as below; int8 a step of amax / 127, where some
# 500 normal numbers have an amax of 3.5 sigma
QUANTIZATION = {"bf16": 0.0, "fp8": 2**-3 / 5, "int8": 3.5 / 127 / math.sqrt(12)}


def quantization_of(options, layers, products):
    """The variance that the options' numbers of 8 bits add in so many layers, each with so many
    quantized inputs of products and one cache."""
    of_weights, of_caches = (QUANTIZATION[kind] for kind in (options.weights, options.caches))
    return layers * (products * of_weights**2 + of_caches**2)


def rounding_bound(logits, roundings, quantization=0.0):
    """How far two computations of `logits` in their dtype can lie apart.

    In each, activations are rounded `roundings` times one after the other on their way to the
    logits. One rounding is off by a fifth of eps (relative, rms: eps / sqrt(12), over the mean
    mantissa of 1.44), and the sum before it, of up to some 256 terms in float32, by as much for
    every term. Roundings are independent, in two models all the more, and a residual network with
    small weights passes them on unamplified: their variances add up. Six sigma, since the largest
    of some 10**5 differences counts. `quantization` is the variance that numbers of 8 bits add in
    one of the two, relative to the square of the activations.
    """
    eps, eps32 = (torch.finfo(dtype).eps for dtype in (logits.dtype, torch.float32))
    one = math.hypot(eps, 16 * eps32) / 5
    sigma = math.sqrt(2 * roundings * one**2 + quantization)
    return 6 * sigma * logits.double().square().mean().sqrt().item()


def check(title, logits, tokens, reference, roundings, quantization=0.0):
    """Assert that `logits` [B, S, V] and their `tokens` [B, S] agree with the `reference` logits.

    The logits' difference has a bound, and where the gap between the two best exceeds it the tokens
    are the same; in float32 all are.
    """
    worst = (logits.float() - reference.float()).abs().max().item()
    bound = rounding_bound(reference, roundings, quantization)
    same = reference.argmax(-1) == tokens
    best = reference.float().topk(2, -1).values
    clear = best[..., 0] - best[..., 1] > bound
    assert worst <= bound, f"{title}: logits differ by {worst:.3g}, more than {bound:.3g}"
    expected = same if logits.dtype == torch.float32 and not quantization else same[clear]
    assert expected.all(), f"{title}: {int((~expected).sum())} tokens differ"
    print(
        f"  {title}: logits within {worst:.2g}, bound {bound:.2g}; {int(same.sum())} of "
        f"{same.numel()} tokens equal, {int(clear.sum())} have a gap over the bound"
    )
