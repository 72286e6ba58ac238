"""What the operating system offers: cores and memory, worker processes under limits, reserved memory, the file
of packed weights, TOML files. Knows no model and no request.
"""
