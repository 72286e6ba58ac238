"""Paths that are about the server itself, not about work for it."""

OPEN_PATHS = frozenset(
    ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/docs", "/docs/oauth2-redirect", "/openapi.json")
)
"""What may be read without a key, and is not worth a line in the log."""
