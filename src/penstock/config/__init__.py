"""Every option of the engine, and what follows from options, model and machine: settings and the memory plan.

Pure functions of plain data, without torch: weight formats, quantization recipes and model facts belong to it.
"""
