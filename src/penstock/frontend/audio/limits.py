"""Limits of a process that decodes sounds."""

MEMORY_BYTES = 3 * 2**30
"""Maximum address space: an hour takes 230 MB as samples, 120 MB as features of 80 mels, and both several times."""
CPU_SECONDS = 120.0
"""Maximum CPU seconds for one sound."""
