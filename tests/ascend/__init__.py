# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Proves the Ascend kernels without an NPU:  tests/ascend/run.sh [OP ...] [--cold] [--check]

For every tile configuration in `npu_ops/common/tune.py`, through the op's own launcher:

    lower      AST -> TTIR -> Linalg with the real triton-ascend front end, each case in a process
               of its own (some inputs abort the front end)
    run        the lowered form, on the CPU: bf16, tails, absent slots, several core counts, NaN in
               every allocation, forbidden pages around every tensor; against the reference, in
               bounds derived from float64
    refuse     each launch of a call once, before it runs: no bit may change of the outputs, or of
               what the op writes (anew.py)
    compile    with the real Ascend compiler for Atlas A3, in every public build of it (on a machine
               the compiler is the one of its CANN): memory plan (UB, L1, L0C) and final HIVM
    lint       the TTIR and the final HIVM, for what neither of the two shows; what is found must be
               listed, with its reason, in known.py

To add an op: list its configurations in `npu_ops/common/tune.py`, launch with one, and write
`tests/ascend/ops/<file>.py` with `CASES` (see case.py) that reach all of them, and `CONTROLS`:
planted mistakes that a case must catch (see controls.py).  A configuration that no case reaches
fails the run, and so does a launch that the table does not list.  `LAUNCHES` says how many a case
may have.

Every kernel is lowered anew in every run, but where `--check` finds that no file which a run reads
has changed since the last green run of everything: then a case of every op and a sample of each
other part are run, and what is kept stands for the rest. All else is kept in results.json: the
findings of a case under a hash of the lowered text of every kernel that the call launched, of the
case, of all that the call goes through (registration, checks, the op's own spec, the launcher), the
reference, the harness and the tools; those of its refusals under that and what begins a launcher
anew; those of a planted mistake under that of its case, the changed file and the mistake; those of
a compile under a hash of the lowered text, the options, the compiler and what reads its output.
Whatever differs is run again, and `--cold` runs everything. `--check` runs a case of every op
again, drawn anew each time, and a sample of the rest, and compares the findings. The first call of
a case that runs is checked and bound, the next one, with other cores, is a repeated call.
"""
