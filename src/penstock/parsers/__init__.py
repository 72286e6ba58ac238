"""Incremental parsers of a chat model's output: reasoning, text and tool calls."""
