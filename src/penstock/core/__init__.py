"""The scheduler and what it decides by: sequences, KV blocks, prefix cache, queues, speculation.

Pure Python on plain data: no torch, no clock, no input or output. A step is a `StepPlan` and its result.
"""
