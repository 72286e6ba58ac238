"""Models as lists of layers, and the code that runs any of them.

families   one file for each family: from config.json to a `ModelSpec`
loading    from a checkpoint's files to a model's weights
"""
