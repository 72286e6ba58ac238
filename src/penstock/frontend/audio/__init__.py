"""Transcription: from sound files to segments of text. And sounds in prompts: `prompts`, `windows`.

    file ──reader──> worker: decode, mix, resample, features ──transcription──> windows ──engine──> segments

Tested elsewhere: `reader` and `worker`: `tests/frontend/audio/test_transcription.py`; `containers`:
`tests/frontend/audio/test_sounds.py`.
"""
