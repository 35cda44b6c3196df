# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Which keys a Transformers mask lets a token see, as an op with paged caches takes it: texts whose
tokens see all that came before them.

A text is a request, padded on either side or inside, or one of several documents that share a row.
Any other mask is refused.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dispatch.errors import NotSupported

WHERE = "custom.integrations.transformers.use()"
# what masks add to a score that shall not count; less would be a bias
_HIDDEN = -1e4


@dataclass(frozen=True)
class Texts:
    """N texts whose new tokens end in the last of M columns, from B rows of S tokens."""

    lengths: Tensor  # [N] int32, tokens of each, the cached ones included
    there: Tensor  # [N, M], whether there is a token
    valid: Tensor  # [B, T], whether a column of the mask, cached or new, has a token
    source: Tensor | None = None  # [N, M] of B * S; None: the tokens lie so already
    documents: bool = False  # several in a row

    def gathered(self, x: Tensor) -> Tensor:
        """[N, M, ..] of x [B, S, ..]."""
        return x if self.source is None else x.flatten(0, 1)[self.source]

    def scattered(self, x: Tensor, tokens: int) -> Tensor:
        """[B, S, ..] of x [N, M, ..]; zeros where there is no token."""
        if self.source is None:
            return x
        rows = self.valid.shape[0] * tokens
        flat = x.new_zeros(rows + 1, *x.shape[2:])
        flat[self.source.where(self.there, rows)] = x
        out: Tensor = flat[:rows].unflatten(0, (-1, tokens))
        return out


def texts(mask: Any, requests: int, tokens: int, before: Tensor | None) -> Texts:
    """Of a mask [B, 1, S, T], bool or what is added to the scores.

    `before` [B, T - S] says which cached columns have tokens.  A token is one that sees itself;
    what padding sees is nobody's concern.  Waits for the device.
    """
    cached = 0 if before is None else before.shape[1]
    wanted = [requests, 1, tokens, cached + tokens]
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not _fits(mask.shape, wanted):
        came = f"a {type(mask).__name__}"
        if isinstance(mask, Tensor):
            came = f"a tensor {list(mask.shape)}"
        raise NotSupported(
            f"{WHERE} reads a mask {wanted}, and `attention_mask` of this layer is {came}. Load "
            'the model with attn_implementation="sdpa" or "eager".'
        )
    seen = (mask if mask.dtype is torch.bool else mask == 0)[:, 0].expand(requests, -1, -1)
    there = seen.diagonal(cached, 1, 2)
    valid = there if before is None else torch.cat([before, there], 1)
    own = torch.arange(cached, cached + tokens, device=seen.device)
    column = torch.arange(cached + tokens, device=seen.device)
    expected = (column <= own[:, None]) & valid[:, None]
    padding = ~there[..., None]
    one_text = ((seen == expected) | padding).all()
    at_the_end = (there[:, 1:] >= there[:, :-1]).all()
    flags = [one_text, at_the_end]
    if mask.dtype is not torch.bool:
        flags.append((seen | (mask[:, 0] <= _HIDDEN)).all())
    is_one, is_at_the_end, *rest = torch.stack(flags).tolist()
    is_mask = all(rest)
    if is_mask and is_one:
        if is_at_the_end:
            return Texts(valid.sum(-1, dtype=torch.int32), there, valid)
        number = torch.arange(requests, device=seen.device)[:, None].expand_as(there)
        return _moved(valid, there, number, there.cumsum(-1) - 1, requests, valid.sum(-1), False)
    first = seen.int().argmax(-1)
    if is_mask and cached == 0:
        same = first[:, :, None] == first[:, None]
        if bool(((seen == expected & same) | padding).all()):
            begins = there & (first == own)
            number = (begins.flatten().cumsum(0) - 1).view_as(there).gather(1, first)
            count = int(begins.sum())
            lengths = torch.bincount(number[there], minlength=count)
            return _moved(valid, there, number, seen.sum(-1) - 1, count, lengths, True)
    raise NotSupported(
        f"{WHERE} serves padding and, without a cache, documents packed in a row; `attention_mask` "
        f"{wanted} {'hides other keys' if is_mask else 'adds a bias to scores'}. Choose "
        'attn_implementation="custom_sparse", which takes any mask, outside of use().'
    )


def _fits(shape: Any, wanted: list[int]) -> bool:
    return shape[0] in (1, wanted[0]) and list(shape[1:]) == wanted[1:]


def _moved(
    valid: Tensor,
    there: Tensor,
    number: Tensor,
    rank: Tensor,
    count: int,
    lengths: Tensor,
    documents: bool,
) -> Texts:
    """`count` texts, each token [B, S] `rank`-th of the new ones of text `number`."""
    new = torch.bincount(number[there], minlength=count)
    most = max(1, int(new.max())) if count else 1
    source = torch.zeros(count, most, dtype=torch.long, device=there.device)
    filled = torch.zeros_like(source, dtype=torch.bool)
    at = (number[there], (most - new[number] + rank)[there])
    source[at] = torch.arange(there.numel(), device=there.device).view_as(there)[there]
    filled[at] = True
    return Texts(lengths.to(torch.int32), filled, valid, source, documents)


class OncePerForward:
    """`read(x, ...)`, once for all layers of a forward pass, which hand the same `x` along."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self._last: tuple[Any, ...] = (lambda: None, (), -1, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: int, x: Any, *others: Any) -> Any:
        """A layer that comes again, or an earlier one, is of another pass."""
        known, given, last, out = self._last
        same = len(given) == len(others) and all(
            a is b or (isinstance(a, int) and a == b) for a, b in zip(given, others, strict=True)
        )
        if known() is not x or not same or layer <= last:
            out = self._read(x, *others)
        of_x = weakref.ref(x) if isinstance(x, Tensor) else lambda: None
        self._last = (of_x, others, layer, out)
        return out
