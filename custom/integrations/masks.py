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

from ..dispatch.capturing import is_capturing
from ..dispatch.errors import NotSupported

WHERE = "custom.integrations.transformers.use()"
# what masks add to a score that shall not count; less would be a bias
_HIDDEN = -1e4
_AT_ONCE = 1 << 26  # elements of a mask


@dataclass
class Texts:
    """N texts whose new tokens end in the last of M columns, from B rows of S tokens."""

    lengths: Tensor  # [N] int32, tokens of each, the cached ones included
    there: Tensor  # [N, M], whether there is a token
    valid: Tensor  # [B, T], whether a column of the mask, cached or new, has a token
    source: Tensor | None = None  # [N, M] of B * S; None: the tokens lie so already
    documents: bool = False  # several in a row
    unread: Tensor | None = None  # whether all this is so, where nobody may wait for the device

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

    def refuse_documents(self) -> None:
        """Those of a pass with a cache, which has a text a row."""
        if self.documents:
            raise NotSupported(
                f"{WHERE} serves documents packed in a row without a cache, and `cache` "
                "is given. Pass use_cache=False."
            )

    def vouched(self, x: Tensor) -> Tensor:
        """NaN in a pass of a graph whose mask turns out to be another; the first layer asks."""
        right, self.unread = self.unread, None
        return x if right is None else x.where(right, torch.nan)


def _may_wait(x: Tensor) -> bool:
    if x.device.type == "cpu":
        return True
    api: Any = getattr(torch, x.device.type)
    if x.device.type == "cuda" and api.get_sync_debug_mode() == 2:  # an error
        return False
    return not is_capturing(x.device)


def texts(
    mask: Any, requests: int, tokens: int, before: Tensor | None, window: int | None = None
) -> Texts:
    """Of a mask [B, 1, S, T], bool or what is added to the scores.

    `before` [B, T - S] says which cached columns have tokens.  A token is one that sees itself;
    what padding sees is nobody's concern.  With a `window` it sees so many columns at most, and a
    text lies in one piece.  Waits for the device, but in a graph, where padding has to be on the
    left.
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
    step = max(1, _AT_ONCE // max(1, requests * (cached + tokens)))
    parts = [slice(at, at + step) for at in range(0, tokens, step)]

    def seen(rows: slice) -> Tensor:
        part = mask[:, 0, rows].expand(requests, -1, -1)
        return part if part.dtype is torch.bool else part == 0

    there = mask[:, 0].diagonal(cached, 1, 2).expand(requests, -1)
    there = there.clone() if there.dtype is torch.bool else there == 0
    valid = there if before is None else torch.cat([before, there], 1)
    own = torch.arange(cached, cached + tokens, device=there.device)
    column = torch.arange(cached + tokens, device=there.device)

    def expected(rows: slice) -> Tensor:
        near = column <= own[rows, None]
        if window is not None:
            near &= column > own[rows, None] - window
        return near & valid[:, None]

    def right(found: Tensor, wanted: Tensor, rows: slice) -> Tensor:
        return ((found == wanted) | ~there[:, rows, None]).all()

    is_one = torch.stack([right(seen(rows), expected(rows), rows) for rows in parts]).all()
    placed = there if window is None else valid
    at_the_end = (placed[:, 1:] >= placed[:, :-1]).all()
    biased = torch.zeros_like(is_one)
    if mask.dtype is not torch.bool:
        biased = torch.stack(
            [((mask[:, 0, rows] != 0) & ~(mask[:, 0, rows] <= _HIDDEN)).any() for rows in parts]
        ).any()
    if not _may_wait(there):
        unread = is_one & at_the_end & ~biased
        return Texts(valid.sum(-1, dtype=torch.int32), there, valid, unread=unread)
    one, end, bias = torch.stack([is_one, at_the_end, biased]).tolist()
    if one and not bias and end:
        return Texts(valid.sum(-1, dtype=torch.int32), there, valid)
    if one and not bias and (window is None or (cached == 0 and _in_one_piece(there))):
        return _at_the_end(valid, there)
    if not bias and cached == 0 and window is None:
        first = torch.cat([seen(rows).int().argmax(-1) for rows in parts], 1)
        same = [
            right(seen(rows), expected(rows) & (first[:, rows, None] == first[:, None]), rows)
            for rows in parts
        ]
        if bool(torch.stack(same).all()):
            begins = there & (first == own)
            number = (begins.flatten().cumsum(0) - 1).view_as(there).gather(1, first)
            count = int(begins.sum())
            lengths = torch.bincount(number[there], minlength=count)
            rank = torch.cat([seen(rows).sum(-1) for rows in parts], 1) - 1
            return _moved(valid, there, number, rank, count, lengths, True)
    if window is not None:
        raise NotSupported(
            f"{WHERE} serves requests that see the last {window} of their own tokens, padded on "
            f"the left, or without a next pass on the right; `attention_mask` {wanted} "
            f"{'adds a bias to scores' if bias else 'hides other keys'}. Give every request and "
            "every document a row of its own."
        )
    raise NotSupported(
        f"{WHERE} serves padding and, without a cache, documents packed in a row; `attention_mask` "
        f"{wanted} {'adds a bias to scores' if bias else 'hides other keys'}. Choose "
        'attn_implementation="custom_sparse", which takes any mask, outside of use().'
    )


def padded(mask: Any, requests: int, tokens: int, before: Tensor | None) -> Texts:
    """Of a mask [B, S] that says where there is a token, and hides nothing else.

    `before` [B, T - S] says so of the cached columns.  A text lies in one piece.  Waits for the
    device, but in a graph, where padding has to be on the left.
    """
    wanted = [requests, tokens]
    if not isinstance(mask, Tensor) or list(mask.shape) != wanted:
        came = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise NotSupported(
            f"{WHERE} reads a mask {wanted} of this layer's tokens, and `attention_mask` is {came}."
            " Leave it to the model to make it."
        )
    there = mask.bool()
    valid = there if before is None else torch.cat([before, there], 1)
    lengths = valid.sum(-1, dtype=torch.int32)
    at_the_end = (valid[:, 1:] >= valid[:, :-1]).all()
    if not _may_wait(there):
        return Texts(lengths, there, valid, unread=at_the_end)
    if at_the_end:
        return Texts(lengths, there, valid)
    if before is not None or not _in_one_piece(there):
        raise NotSupported(
            f"{WHERE} serves requests padded on the left, or without a next pass on the right; "
            f"`attention_mask` {wanted} has padding elsewhere. Pad on the left."
        )
    return _at_the_end(valid, there)


def unmasked(requests: int, tokens: int, before: Tensor | None, device: torch.device) -> Texts:
    """Where no mask comes: every column has a token, the cached ones `before` [B, T - S] too.

    Waits for the device, but in a graph.
    """
    there = torch.ones(requests, tokens, dtype=torch.bool, device=device)
    found = padded(there, requests, tokens, before)
    if before is None:
        return found
    every = before.all()
    if not _may_wait(there):
        found.unread = every
    elif not every:
        raise NotSupported(
            f"{WHERE}: `attention_mask` is None, and the cache has padding. Pass the mask of the "
            "cached tokens and the new ones."
        )
    return found


def without_gaps(found: Texts) -> Texts:
    """`found`, if its padding comes before the first token of a text, and not behind a cached one.

    Waits for the device, but in a graph.
    """
    new = found.there.shape[1]
    position = found.lengths[:, None] - new + torch.arange(new, device=found.there.device)
    right = (found.there | (position < 0)).all()
    if not _may_wait(found.there):
        found.unread = right if found.unread is None else found.unread & right
    elif not right:
        raise NotSupported(
            f"{WHERE} keeps states of this model's last tokens, and `attention_mask` has padding "
            "behind cached tokens. Give all requests as many new tokens."
        )
    return found


def check_positions(found: Texts, position_ids: Tensor | None, cached: int) -> Texts:
    """`found`, if `position_ids` [B or 1, S] count the tokens of each text, or the columns."""
    if position_ids is None:
        return found
    there, tokens = found.valid[:, cached:], found.valid.cumsum(-1)[:, cached:] - 1
    columns = torch.arange(cached, found.valid.shape[1], device=there.device)
    same = torch.stack([(position_ids == each) | ~there for each in (tokens, columns)])
    right = same.all(-1).any(0).all()
    if not _may_wait(there):
        found.unread = right if found.unread is None else found.unread & right
    elif not right:
        raise NotSupported(
            f"{WHERE} gives every token of a request the position behind the one before it, and "
            f"`position_ids` {list(position_ids.shape)} say something else. Give every request or "
            "document a row of its own, and leave position_ids out."
        )
    return found


def _in_one_piece(there: Tensor) -> bool:
    begins = there & ~torch.nn.functional.pad(there, (1, 0))[:, :-1]
    return bool((begins.sum(-1) <= 1).all())


def _fits(shape: Any, wanted: list[int]) -> bool:
    return shape[0] in (1, wanted[0]) and list(shape[1:]) == wanted[1:]


def _at_the_end(valid: Tensor, there: Tensor) -> Texts:
    """A text a row, whose tokens are moved to its end."""
    number = torch.arange(len(there), device=there.device)[:, None].expand_as(there)
    return _moved(valid, there, number, there.cumsum(-1) - 1, len(there), valid.sum(-1), False)


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
