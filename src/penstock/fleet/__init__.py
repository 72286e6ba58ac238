"""The engines behind one server: processes, links, supervision, and which engine answers which request.

Dispatch, placement and router are pure; `cluster` spreads engines over the nodes of a Ray cluster. No torch.

Tested elsewhere: links and replicas: `tests/fleet/test_fleet.py`, `tests/engine/test_process.py`; `request`:
`tests/fleet/test_crash_blame.py`.
"""
