"""What a chat model writes, taken apart: its reasoning, its text and its calls of tools, as they come."""
