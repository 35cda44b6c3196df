# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""One module an op: its schema and its names elsewhere, the check of its arguments, its fake, and
where it has one, its gradient.  What each name means: `spec.py`; to add one: CONTRIBUTING.md."""
