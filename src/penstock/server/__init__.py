"""The HTTP server: connections, limits, logs, and the base of all dialects.

Each folder is a dialect; none imports another, except `tgi`, whose routes also accept TEI's and OpenAI's bodies.
"""
