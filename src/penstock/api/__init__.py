"""What a user writes and reads: requests, sampling parameters, tools, outputs.

Plain data that every other room may import; it imports only `penstock.errors`.
"""
