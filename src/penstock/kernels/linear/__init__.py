"""Linear layers, y = x Wᵀ + b: weights in each kernel's own layout. `reference.py` defines the results."""
