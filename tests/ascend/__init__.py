# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Proves the Ascend kernels without an NPU:  tests/ascend/run.sh [OP ...] [--cold] [--check]

For every tile configuration in `npu_ops/tune.py`, through the op's own launcher:

    lower      AST -> TTIR -> Linalg with the real triton-ascend front end, each case in a process
               of its own (some inputs abort the front end)
    run        the lowered form, on the CPU: bf16, tails, absent slots, several core counts, NaN in
               every allocation, forbidden pages around every tensor; against the reference, in
               bounds derived from float64
    compile    with the real Ascend compiler for Atlas A3: memory plan (UB, L1, L0C) and final HIVM
    lint       the TTIR and the final HIVM, for what neither of the two shows

To add an op: list its configurations in `npu_ops/tune.py`, launch with one, and write
`tests/ascend/ops/<file>.py` with `CASES` (see case.py) that reach all of them, and `CONTROLS`:
planted mistakes that a case must catch (see controls.py).  A configuration that no case reaches
fails the run, and so does a launch that the table does not list.

Lowering, compiling and linting are done anew in every run; they are quick.  The CPU runs are not:
results.json keeps their findings under a hash of the lowered text of every kernel that the call
launched, of the case, the launcher, the reference, and the tools.  Whatever differs is run again,
`--cold` runs everything, and `--check` runs a sample of what is kept and compares the findings.
"""
