"""Root-mean-square normalisation, alone or with the residual sum before it."""
