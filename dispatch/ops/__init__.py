# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""One module an op: its schema and its names elsewhere, the check of its arguments, its fake, and
where it has one, its gradient.  `../op_spec.py` says what each name means, CONTRIBUTING.md how to
add an op."""
