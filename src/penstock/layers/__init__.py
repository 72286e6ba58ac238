"""The parts of a model: for each kind a spec without torch (`X_spec.py`) and a class that computes (`X.py`)."""
