"""One engine: the loop over scheduler and runner, its process, and the messages it exchanges with the server.

`build.py` makes it of its parts; `startup.py` works beside the import of modules.
"""
