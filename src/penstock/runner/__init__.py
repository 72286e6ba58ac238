"""Runs a step's plan on the device: forward passes, sampling, adapters, stored blocks, ranks."""
