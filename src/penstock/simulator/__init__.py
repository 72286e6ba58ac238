"""Simulates a fleet of engines: the server's scheduler, router and limits, a virtual clock, a cost model of steps.

Tested elsewhere: `tests/simulator/test_simulation.py`, `tests/simulator/test_workloads.py`,
`tests/simulator/test_summaries.py` and `tests/simulator/test_costs.py` test it by its results.
"""
