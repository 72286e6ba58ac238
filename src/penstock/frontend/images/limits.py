"""Limits of a process that decodes images."""

CPU_SECONDS = 20.0
"""Maximum CPU seconds for one image."""
MEMORY_BYTES = 2 * 2**30
"""Maximum address space. 50 million pixels take 200 MB as RGB; alpha and turning take a copy each."""
