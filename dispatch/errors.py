# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our own errors.  Bad shapes and values raise ValueError, bad dtypes and types TypeError."""

from __future__ import annotations


class BackendUnavailable(ImportError):
    """What a backend needs is not installed, or found no device."""


class NotSupported(NotImplementedError):
    """The arguments are valid, but no backend can run them where they are."""
