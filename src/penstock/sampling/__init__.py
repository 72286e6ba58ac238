"""From logits to tokens: penalties, filters, draws by counter-based random numbers, log-probabilities."""
