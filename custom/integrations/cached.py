# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A layer of a Transformers cache whose rows lie in our pages, and what its attention refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from ..dispatch.errors import NotSupported, need
from ..graph_mode import Replayed
from .masks import WHERE

need("transformers.models.deepseek_v4", __name__, '"transformers>=5.17,<6"')

from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: E402

# what the argument `cache` is called before Transformers 5.24
_NAMES = ("past_key_values", "cache_params")


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, whose cache comes as `cache`, by whichever name Transformers gives it.

    Raises:
        NotSupported: a cache comes by a name that nobody reads, and would count for nothing.
    """

    @wraps(forward)
    def named(self: Any, *args: Any, **options: Any) -> Any:
        for name in _NAMES:
            given = options.pop(name, None)
            if given is not None:
                options["cache"] = given
        for name, value in options.items():
            if name != "cache" and isinstance(value, Cache):
                raise NotSupported(
                    f"{WHERE}: {type(self).__name__} was given a cache as `{name}`, which is not "
                    'read. pip install "transformers>=5.17,<=5.24".'
                )
        return forward(self, *args, **options)

    return named


def attends(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of an attention, whose cache comes as for `takes_cache`; what it would compute
    otherwise is refused first."""

    @takes_cache
    @wraps(forward)
    def asked(self: Any, *args: Any, **options: Any) -> Any:
        _refuse_what_differs(self, options)
        return forward(self, *args, **options)

    return asked


W = TypeVar("W")


class Converted(Generic[W]):
    """Weights of layers as our ops take them, by what converts those of a layer for its input; made
    anew where the input has another dtype or device, or the layer other weights: a copy of some
    beside the new ones of others would be wrong in silence."""

    def __init__(self, convert: Callable[[Any, Tensor], W]) -> None:
        self.convert = convert
        self.made: WeakKeyDictionary[Any, tuple[object, _Weights, W]] = WeakKeyDictionary()

    def __call__(self, layer: Any, x: Tensor) -> W:
        key = x.dtype, x.device
        made = self.made.get(layer)
        if made is None or made[0] != key or not made[1].are_there():
            made = self.made[layer] = key, _Weights(layer), self.convert(layer, x)
        return made[2]


class _Weights:
    """The parameters of a layer: which, where, and how often they were written.  What is written
    through `.data` is not counted."""

    def __init__(self, layer: Any) -> None:
        held = [each for m in layer.modules() for each in (m._parameters, m._modules)]
        self.held = [(at, name, x) for at in held for name, x in at.items()]
        self.tensors = [x for *_, x in self.held if isinstance(x, Tensor)]
        self.counted = [x for x in self.tensors if not x.is_inference()]
        self.state = self._state()

    def _state(self) -> list[int]:
        return [x.data_ptr() for x in self.tensors] + [x._version for x in self.counted]

    def are_there(self) -> bool:
        return self._state() == self.state and all(at.get(n) is x for at, n, x in self.held)


def extent(x: Tensor, layer: PagedLayer | None) -> tuple[int, int, Tensor | None, int]:
    """Requests and tokens of hidden states; which positions that a layer of the cache holds have a
    token, and how many it holds."""
    valid, cached = (None, 0) if layer is None else (layer.valid, layer.tokens)
    return x.shape[0], x.shape[1], valid, cached


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of a Transformers cache, kept in our pages.

    `tokens` counts positions with their padding, as Transformers does; which of them have a token,
    `valid` [B, tokens or more], comes from the masks.
    """

    is_croppable = True

    def __init__(self, caches: Any, index: int, attended: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.caches, self.index, self.tokens = caches, index, 0
        self.valid: Tensor | None = None
        # where there are graphs a decode step's attention is one, from its second call on
        self.attend = Replayed(attended)

    def append(self, tokens: int) -> Any:
        """The layer's pools, with room for so many tokens more."""
        self.tokens += tokens
        if self.tokens > self.caches.capacity:
            self.caches.reserve(max(self.tokens, 2 * self.caches.capacity))
        return self.caches.layers[self.index]

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.tokens = self._left(tokens_to_remove)

    def _left(self, tokens_to_remove: int) -> int:
        if tokens_to_remove > 0:  # Transformers' older meaning: the length to keep
            tokens_to_remove = min(0, tokens_to_remove - self.tokens)
        return max(0, self.tokens + tokens_to_remove)

    def reset(self) -> None:
        self.tokens = 0

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotSupported(
            "The paged cache of custom.integrations.transformers cannot reorder, repeat, select or "
            "offload requests, and is read inside use() alone; generate there, without beam search "
            "and without cache offloading."
        )

    lazy_initialization = update = update_indexer = offload = prefetch = _refuse
    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


class RingLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """Takes back as many tokens as its rings hold beyond what the next one reads."""

    model = ""

    def __init__(self, caches: Any, index: int, attended: Callable[..., Any]) -> None:
        super().__init__(caches, index, attended)
        self.most = 0  # tokens that were ever there

    def append(self, tokens: int) -> Any:
        pools = super().append(tokens)
        self.most = max(self.most, self.tokens)
        return pools

    def crop(self, tokens_to_remove: int) -> None:
        left, drafts = self._left(tokens_to_remove), self.caches.drafts
        if left and self.most - left > drafts:
            raise NotSupported(
                f"{WHERE}: the cache of a {self.model} model takes back the last {drafts} tokens, "
                f"and {self.most - left} are to go. Enter use(drafts=...) with as many."
            )
        self.tokens = left

    def reset(self) -> None:
        self.tokens = self.most = 0


Ours = TypeVar("Ours", bound=PagedLayer)


def taken_over(
    cache: Cache | None,
    number: int,
    numbers: list[int],
    theirs: type[Any],
    made: Callable[[], list[Ours]],
) -> Ours:
    """Layer `number` of the cache, whose layers `numbers` become those that are `made`, all at
    once, while they are `theirs` and empty; without a cache, a layer alone."""
    if cache is None:
        return made()[0]
    layers: list[Any] = cache.layers
    came = [layers[each] for each in numbers if each < len(layers)]
    if not any(isinstance(each, PagedLayer) for each in came):
        full = [each for each in came if type(each) is not theirs or each.get_seq_length()]
        if full or len(came) < len(numbers):
            held = f"{full[0]} of {full[0].get_seq_length()} tokens" if full else "no such layer"
            raise NotSupported(
                f"{WHERE} takes over a DynamicCache that is still empty; got "
                f"{type(cache).__name__} with {held}. Leave the cache out, or pass "
                "DynamicCache(config=model.config)."
            )
        for each, ours in zip(numbers, made(), strict=True):
            layers[each] = ours
    taken: Ours = layers[number]
    return taken


def _refuse_what_differs(self: Any, options: dict[str, Any]) -> None:
    """What the model's own attention would do, and ours does not."""
    if self.training and self.attention_dropout:
        raise NotSupported(
            f"{WHERE} is for inference, and {type(self).__name__} is in training mode with "
            f"attention_dropout={self.attention_dropout}. Call model.eval()."
        )
    if options.get("output_attentions"):
        raise NotSupported(
            f"{WHERE} keeps no attention weights, and `output_attentions` is True. Leave it out."
        )
