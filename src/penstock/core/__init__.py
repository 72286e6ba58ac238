"""The scheduler and its parts: sequences, KV blocks, prefix cache, queues, speculation.

Pure Python on plain data: no torch, no clock, no input or output. A step is a `StepPlan` and its result.
"""
