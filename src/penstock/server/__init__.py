"""The HTTP server: connections, limits, logs, and what all dialects share.

A folder is a dialect; none imports another, except `tgi`, whose routes also take TEI's and OpenAI's bodies.
"""
