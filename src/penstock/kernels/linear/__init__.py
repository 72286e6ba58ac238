"""y = x Wᵀ + b: weights, each with the map that its layout asks for. `reference.py` is the truth."""
