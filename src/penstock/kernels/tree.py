"""Reduction trees of the Triton kernels: the order of a sum is part of the operation's definition.

Sums are made of fixed segments, each of fixed steps:

    columns, keys   | step step step step | step step step step | step step      steps are added from left to right,
                    |       segment       |       segment       |  segment       then segments, from left to right

Which programs compute which segments is free: one program for each in a step of few tokens, one after another in a
single program in a long prompt. So an answer's bits depend neither on the batch nor on how a prompt is chunked.
"""

LINEAR_SEGMENT = 1024
"""Columns of a weight."""
LINEAR_STEP = 64
"""Columns that are multiplied at a time; divides LINEAR_SEGMENT."""
ATTENTION_SEGMENT = 256
"""Keys, counted from position 0."""
ATTENTION_STEP = 64
"""Keys of a step of the online softmax; divides ATTENTION_SEGMENT."""
