"""Image input: from what a caller sent to token ids and resized pictures.

    ImageSource ──urls──> bytes ──reader──> worker: decode, resize, cut ──> Picture ──tokens──> token ids and `Image`s

Tested elsewhere: `sizes` and `tokens`: `tests/frontend/images/test_processors.py`; `frames` and `worker`:
`tests/frontend/images/test_pictures.py`; `prompts`: `tests/server/test_images.py`.
"""
