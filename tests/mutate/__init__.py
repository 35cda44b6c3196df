# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Mechanical mistakes, one at a time, in the Python half: does a test notice?

    make mutate                 hundreds of them, the same ones for the same SEED: hours
    make mutate SAMPLE=20       some of those whose verdict is known: a minute

changes.py    what is planted: dispatch/, graph_mode/, and cuda_ops/ outside of kernels
lines.py      which tests execute a statement, by a trace of the suite (.mutate/, made anew for
              every test file that changed)
server.py     a process that has imported what takes long, and forks one for every attempt
inside/       what every process below has: the mistake, or the trace
reasons.py    why a mistake changes nothing that anybody could notice
../records/generated/verdicts.json   the test that noticed each; "" where none did

The tree on disk stays as it is.  A mistake is noticed when a test that executes its statement fails
or does not end; the one that did before is asked first, then those that noticed others of the same
function, then the fastest.  Names of mistakes have no line numbers, so that verdicts and reasons
outlive changes of other lines.

What is not planted: text (messages, docstrings), annotations, kernels (`make mutate-ascend` has
those of NPUs).  What is not asked: a statement that no test of this machine executes is counted by
itself; one that runs when its module is imported is asked of the tests that execute anything of its
file.  Lines of forked processes are not traced; those of other processes count as their test's.
"""
