# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""What turns the plug-in on, and the versions that it was tried with."""

from ..engines import Versions

SWITCH = "CUSTOM_SGLANG"
SGLANG: Versions = (0, 5, 23), (0, 5, 24)
