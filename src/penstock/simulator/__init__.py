"""A fleet of engines on a virtual clock: the server's scheduler, router and limits, and a model of what steps cost."""
