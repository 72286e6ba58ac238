"""Simulates a fleet of engines: the server's scheduler, router and limits, a virtual clock, a cost model of steps."""
