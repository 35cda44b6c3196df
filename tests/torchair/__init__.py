# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""The real torchair (from the torch_npu wheel), without an NPU: run by tests/torchair/run.sh."""
