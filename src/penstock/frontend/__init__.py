"""A request in the server's process: admission, input, output, history, metrics. No torch.

`client.py` is the engine as the server sees it; `recovery` has the journal and what resumes after a death.
"""
