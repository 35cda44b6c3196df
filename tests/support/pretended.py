# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""A GPU of tests/portability/gpus.py in the place of the one at hand, for what launchers ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from custom.cuda_ops.common import gpu

from ..portability.gpus import GPUS


@contextmanager
def pretended(capability: int) -> Iterator[None]:
    card = GPUS[capability]
    about = dict(
        capability=lambda device: divmod(capability, 10),
        num_sms=lambda device: card.processors,
        shared_memory=lambda device: card.shared_memory,
    )
    with mock.patch.multiple(gpu, **about):
        yield
