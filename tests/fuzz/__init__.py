# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Random calls of every op:  python -m tests.fuzz OP --cases N --seed S --device D

draw.py      a case: sizes and options of one legal call, as a dict that prints and reads back
build.py     its arguments, and which of their numbers nobody may read
legal.py     the call in disguise (other strides, garbage, int64) against the reference in float64
illegal.py   a legal call with one argument spoiled: one sentence, and nothing written
run.py       cases one after the other
shrink.py    the smallest case that still fails in the same way
"""
