"""Image input: from what a caller sent to token ids and resized pictures.

ImageSource ──urls──> bytes ──reader──> worker: decode, resize, cut ──> Picture ──tokens──> token ids and `Image`s
"""
