# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Gated delta rule and KDA, decode, chunks and gradients, with the gated norm behind them."""
