"""From a checkpoint's tensors, safetensors or GGUF, to the weights that a model asks for.

Also the packed weights that later starts map, and the formats that config.json or a GGUF file states.
"""
