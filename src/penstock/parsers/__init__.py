"""Parsers of a chat model's output: its reasoning, its text and its calls of tools, as they come."""
