# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Every CUDA kernel compiled for GPUs that are not here, by several versions of Triton.

`tests/portability/run.sh [--check]` sets up `.portability/` and runs `python -m tests.portability`.
Launchers are called with tensors that hold nothing, on a GPU that cuda_ops/common/gpu.py pretends;
each launch is compiled to a binary and compared with what that GPU has.  Sees what a compiler
refuses, what does not fit, and who takes which path; wrong numbers are for the interpreter and real
GPUs.

What a launch compiles to is kept in results.json, by a hash of all that it depends on: the sources
of its kernel without comments and docstrings, its constants, its options, the GPU and the Triton.
That file is of whole runs alone, over all GPUs and Tritons: what a part of one compiles is in
.portability/compiled.json.  So where every launch of one Triton is known, the others have seen it
too, and `make test` has to ask no more than the one that is installed (test_portability.py).

`--offset` compiles the same cases in rows that no copy of 16 bytes can read (offset.py).  Those are
some 1100 more kernels on sm_90, which results.json does not keep: run it over what a change of a
plain kernel or its tiles may reach, `python -m tests.portability --offset --gpu 90 --triton 3.7.1
--only npu_chunk_kda`.
"""
