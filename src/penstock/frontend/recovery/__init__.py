"""What resumes after a death: the journal of requests on disk, replay, streams that clients take up again.

Tested elsewhere: `tests/frontend/recovery/test_journal.py`, `tests/frontend/recovery/test_journal_disk.py`;
`journal_rows`, replay and `journaled_calls`: `tests/frontend/recovery/test_replay.py`.
"""
