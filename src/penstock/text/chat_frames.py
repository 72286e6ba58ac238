"""The frames between `chat_template` and the process that renders, and that process's limits."""

CPU_SECONDS = 2.0
"""Maximum CPU seconds for rendering one conversation."""
MEMORY_BYTES = 512 * 2**20
"""Maximum address space of a rendering process; the interpreter itself takes about 30 MB."""
TEXT, REFUSED, NO_MEMORY = b"t", b"r", b"m"
"""First byte of a rendering process's reply: the prompt, the reason of a refusal, or out of memory."""


def longest_prompt(request_bytes: int) -> int:
    """Maximum characters of a prompt, from the bytes of its conversation.

    Templates may repeat their input once or twice, indent tools, and add instructions.
    """
    return 2**20 + 4 * request_bytes
