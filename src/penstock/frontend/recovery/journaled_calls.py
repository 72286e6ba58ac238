"""The calls of an engine that the journal has: continued when the next server starts, and read by clients again."""

import contextlib
from collections.abc import Sequence

from penstock.api.request import FinishReason, RequestOutput
from penstock.errors import InvalidRequestError, JournalUnavailableError
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.limits import Admission
from penstock.frontend.open_requests import Accepted, OpenRequest, OpenRequests
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.recovery.journal import Journal
from penstock.frontend.recovery.journal_rows import Entry, Row, row_of
from penstock.frontend.recovery.replay import RequestReplay, entries_of
from penstock.frontend.request_stream import RequestStream
from penstock.text.tokenizer import Tokenizer

ANOTHER_MODEL = "the server was restarted with another model, or with less memory"


class JournaledCalls:
    """An engine's calls in the journal; without a journal there are none."""

    def __init__(
        self,
        journal: Journal | None,
        tokenizer: Tokenizer | None,
        open_requests: OpenRequests,
        input_processor: InputProcessor,
        admission: Admission,
        max_unread_tokens: int,
    ) -> None:
        """
        Args:
            max_unread_tokens: see `QueueLimits`.
        """
        self._journal = journal
        self._open_requests = open_requests
        self._input_processor = input_processor
        self._admission = admission
        self._max_unread_tokens = max_unread_tokens
        self._replay = RequestReplay(journal, tokenizer, self._live_output_processor)

    def _live_output_processor(self, request_id: str) -> OutputProcessor | None:
        open_request = self._open_requests.find(request_id)
        return None if open_request is None else open_request.output_processor

    @property
    def error(self) -> str | None:
        """Why the journal cannot take requests now; None if it can, or if there is no journal."""
        error = None if self._journal is None else self._journal.write_error
        return error and f"the journal cannot be written: {error}"

    # ── calls of this server ─────────────────────────────────────────────────────────────────────────────────────────

    def rows_of(self, accepted: Sequence[Accepted], model: str, alias: str | None) -> list[Row]:
        """The rows of a new call, for `Journal.add_entries`; none without a journal.

        Args:
            model: the engine's `model_identity`.
            alias: another name of the call.

        Raises:
            JournalUnavailableError: the journal cannot be written.
        """
        if self._journal is None:
            return []
        self._journal.check()
        call = [(item.request, item.params, item.prompt) for item in accepted]
        return [row_of(entry) for entry in entries_of(call, model, alias)]

    async def recorded(self, accepted: Sequence[Accepted]) -> None:
        """Wait until the requests of an opened call are in the journal, if there is one.

        Raises:
            JournalUnavailableError: the journal cannot be written; the requests are ended, without a trace in it.
        """
        if self._journal is not None:
            try:
                await self._journal.flush()
            except JournalUnavailableError:
                # Nothing may remain of it: its caller gets an error and will send it again.
                request_ids = [item.request.request_id for item in accepted]
                self._open_requests.withdraw(request_ids)
                self._journal.withdraw(request_ids)
                raise

    async def responses_recorded(self) -> None:
        """Wait until stored responses are in the journal, if there is one. While it fails, only memory has them."""
        if self._journal is not None:
            with contextlib.suppress(JournalUnavailableError):
                await self._journal.flush()

    # ── calls of earlier servers, too ────────────────────────────────────────────────────────────────────────────────

    def resume(self, model: str, entries: Sequence[Entry] | None) -> None:
        """Continue the unfinished requests; called once, when the engine is up.

        Args:
            model: the engine's `model_identity`.
            entries: those of the engine's model; None: all that the journal has.
        """
        for entry, output_processor in self._replay.unfinished(entries):
            self._resume(entry, output_processor, model)
        self._open_requests.send_due()

    def _resume(self, entry: Entry, output_processor: OutputProcessor, model: str) -> None:
        """Continue a request, or end it with an error if this engine cannot accept it."""
        request = output_processor.request
        admitted = self._admission.restore(request)
        resumed = OpenRequest(request, output_processor=output_processor, admitted=admitted)
        # Opened even if it ends at once: so its ending gets into the journal like any other.
        self._open_requests.begin_request(resumed)
        # Other weights would go on with other tokens; less memory may not hold it any more.
        if entry.record.model != model or not self._input_processor.fits(request):
            self._open_requests.end_request(resumed, FinishReason.ERROR, ANOTHER_MODEL)
            return
        try:
            self._input_processor.check(request.prompt_token_ids, entry.record.params)
        except InvalidRequestError as error:
            refused = f"the request was accepted by an earlier server, and this one cannot serve it: {error}"
            self._open_requests.end_request(resumed, FinishReason.ERROR, refused)

    async def look_up(self, name: str, tenant: str) -> list[tuple[Entry, RequestOutput]]:
        """Look up a tenant's call by one of its names: its requests and their progress; [] if there is no such call."""
        return [
            (entry, output_processor.result()) for entry, output_processor in await self._replay.look_up(name, tenant)
        ]

    async def reopen(self, name: str, accepted: Sequence[Accepted]) -> RequestStream:
        """Stream a call again from its first token, whether it still runs or has ended.

        Args:
            accepted: the same requests as in the call, accepted again.

        Raises:
            InvalidRequestError: there is no such call, or its requests were different.
        """
        repeated = [(item.request, item.params) for item in accepted]
        output_processors, deltas = await self._replay.catch_up_call(name, accepted[0].request.tenant, repeated)
        request_stream = RequestStream(
            self._open_requests.leave, output_processors, True, self._max_unread_tokens, deltas
        )
        for position, output_processor in enumerate(output_processors):
            open_request = self._open_requests.find(output_processor.request.request_id)
            if open_request is not None:
                open_request.readers.append((request_stream, position))
        return request_stream
