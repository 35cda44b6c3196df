# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Our own errors.  Bad shapes and values raise ValueError, bad dtypes and types TypeError."""

from __future__ import annotations

from importlib import import_module


class BackendUnavailable(ImportError):
    """What a backend or an adapter needs is not installed, or found no device."""


class NotSupported(NotImplementedError):
    """The arguments are valid, but no backend can run them where they are."""


def need(package: str, by: str, install: str) -> None:
    """Import an optional `package`, or say who needs it and what `install`s it."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if not f"{package}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something itself
        raise BackendUnavailable(
            f"{by} needs {package}, which is not installed: pip install {install}"
        ) from error
