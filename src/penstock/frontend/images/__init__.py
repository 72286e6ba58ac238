"""Image input: from what a caller sent to token ids and resized pictures. Sounds in prompts take the same way.

    ImageSource ──urls──> bytes ──reader──> worker: decode, resize, cut ──> Picture ──tokens──> token ids and `Image`s

Tested elsewhere: `sizes` and `tokens`: `tests/frontend/images/test_processors.py`; `frames` and `worker`:
`tests/frontend/images/test_pictures.py`; `prompts`: `tests/server/test_images.py`;
`placeholders`: `tests/frontend/images/test_processors.py` and `tests/frontend/audio/test_prompts.py`.
"""
