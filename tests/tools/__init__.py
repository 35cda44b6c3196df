# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Programs beside the suite: sanitizers, load, survey, packaging; and the tests of our tools."""
