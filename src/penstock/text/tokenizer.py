"""Tokenises and detokenises text with a checkpoint's own files, without `transformers`.

tokenizer.json              the tokenizer itself, read by the `tokenizers` library
tokenizer_config.json       special tokens, whether texts begin with one, chat templates
special_tokens_map.json     special tokens, in older checkpoints
added_tokens.json           ids of tokens that tokenizer.json may lack, in older checkpoints
chat_template.jinja         the chat template; it takes precedence over the one in tokenizer_config.json
chat_template.json          the chat template of a processor, if neither has one; or in processor_config.json
additional_chat_templates/  further chat templates, by name

A folder without tokenizer.json may have its vocabulary in another form (`penstock.text.vocabularies`).
A GGUF file has all of this in its metadata (`penstock.checkpoint.gguf.tokenizer`).
A created model has a recipe with a template and messages of its own (`penstock.checkpoint.created`).
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from penstock.checkpoint.checkpoint import read_json, read_text
from penstock.checkpoint.created import Recipe, recipe_of
from penstock.checkpoint.gguf.file import read_metadata
from penstock.errors import CheckpointError, InvalidRequestError, shown
from penstock.system.worker_process import WorkerProcess
from penstock.text.byte_alphabet import BYTE_OF
from penstock.text.chat_template import MAX_TEMPLATE_CHARACTERS, ChatTemplates, OffLoop
from penstock.text.special_tokens import add_missing_tokens, special_tokens, splits_special
from penstock.text.tokenizer_trial import try_tokenizer

logger = logging.getLogger(__name__)

_MAX_BYTES = 64 * 2**20
"""Maximum bytes of tokenizer.json; the largest in use have 35 MB."""
_UNTRIED_BYTES = 512 * 2**10
"""Bytes of a tokenizer.json up to which loading it is certain to take at most some 200 MB."""
_OTHER_FORMS = ("vocab.json", "vocab.txt")
"""Files of forms that are not read, or not alone."""
_UNPAIRED_SURROGATE = "the text is not valid Unicode: it contains an unpaired surrogate"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


CACHED_TOKENS = 16_384
"""Tokens whose text is kept."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self, backend: Backend, templates: ChatTemplates, eos_token: str | None = None, recipe: Recipe | None = None
    ) -> None:
        """
        Args:
            eos_token: text of the special token that ends answers, in addition to those that the model's configs name.
            recipe: that of a created model, whose messages precede every conversation.
        """
        self.backend = backend
        self._recipe = recipe
        self._templates = templates
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.eos_token_id = None if eos_token is None else self.special_token(eos_token)
        decoder = _decoder_state(backend)
        kinds = set(re.findall(r'"type": "(\w+)"', decoder))
        self._byte_level = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse", "Sequence"}
        self._byte_fallback = "ByteFallback" in kinds
        self._spaces_marked = "▁" in decoder
        # Looked up for each token of each answer; answers have few different tokens.
        cached = lru_cache(CACHED_TOKENS)
        self.is_shown = cached(self._is_shown)
        """Whether `decode` includes this token: it omits special tokens and unknown ids."""
        self.raw_bytes = cached(self._raw_bytes)
        """The bytes of a token if they do not depend on its neighbours; possibly part of a character.

        None for a token whose text depends on its neighbours, or for an unknown id.
        """
        self.decode_alone = cached(self._decode_alone)
        """The text of a token without neighbours."""

    @classmethod
    def from_path(cls, path: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Read the tokenizer of the checkpoint in a folder or a GGUF file.

        Args:
            chat_template: the source of a template that replaces the checkpoint's.

        Raises:
            CheckpointError: a file is missing or damaged; the message names it.
        """
        folder = Path(path)
        if folder.is_file():
            tokenizer = cls._from_gguf(folder, chat_template)
            if tokenizer is None:
                raise CheckpointError(f"{folder} has no tokenizer; without one, prompts must be token ids")
            return tokenizer
        if (missing := missing_tokenizer(folder)) is not None:
            raise CheckpointError(f"{missing}; without it, prompts must be token ids")
        config, converted = _config_with_tokens(folder), None
        if (file := folder / "tokenizer.json").exists():
            backend = _read_backend(file)
        else:
            from penstock.text.vocabularies.convert import convertible  # here: few folders lack tokenizer.json
            from penstock.text.vocabularies.form import Folder, put_around

            convert = convertible(folder)
            assert convert is not None, "missing_tokenizer has told"
            source = Folder(folder, config, read_json(folder / "config.json") or {})
            converted = convert(source)
            backend = converted.backend
            # The folder's own config wins over what the converter assumes.
            config = {**converted.special, **config}
        special = special_tokens(config, folder)
        recipe = recipe_of(folder)
        chosen = _chosen_template(chat_template, recipe)
        templates = _template_sources(folder, config) if chosen is None else {"default": chosen}
        try:
            add_missing_tokens(backend, config, special)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"tokenizer_config.json in {folder} lists tokens in a form that is not known: "
                f"{type(error).__name__}: {error}"
            ) from error
        if converted is not None:
            put_around(converted, source, special)
        backend.encode_special_tokens = splits_special(config, folder)
        return cls(backend, ChatTemplates(templates, special), special.get("eos_token"), recipe)

    @classmethod
    def _from_gguf(cls, file: Path, chat_template: str | None) -> "Tokenizer | None":
        from penstock.checkpoint.gguf.tokenizer import read_tokenizer  # here: a folder has no need of it

        stored = read_tokenizer(file)
        if stored is None:
            return None
        recipe = recipe_of(file)
        chosen = _chosen_template(chat_template, recipe)
        templates = stored.chat_templates if chosen is None else {"default": chosen}
        _check_templates(templates, file)
        return cls(stored.backend, ChatTemplates(templates, stored.special_tokens), recipe=recipe)

    @classmethod
    def load(cls, path: str | Path, chat_template: str | None = None) -> "Tokenizer | None":
        """Like `from_path`, but None if the checkpoint has no tokenizer: the model then works with token ids only.

        A large tokenizer.json is first loaded by a worker process with limits on memory and time.

        Raises:
            CheckpointError: as `from_path`; also if loading exceeds these limits.
        """
        if Path(path).is_file():
            tokenizer = cls._from_gguf(Path(path), chat_template)
            if tokenizer is None:
                logger.warning("%s: prompts must be token ids", missing_tokenizer(Path(path)))
            return tokenizer
        if (missing := missing_tokenizer(Path(path))) is not None:
            logger.warning("%s: prompts must be token ids", missing)
            return None
        file = Path(path) / "tokenizer.json"
        if file.exists() and file.stat().st_size > _UNTRIED_BYTES:
            try_tokenizer(file)
        return cls.from_path(path, chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._templates.exist

    @property
    def chat_template_source(self) -> str:
        """The sources of all chat templates, concatenated; empty if there are none."""
        return self._templates.source

    def special_token(self, text: str) -> int | None:
        """The id of the special token with this text; None if there is none."""
        token_id = self.backend.token_to_id(text)
        return token_id if token_id in self._special else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a text; `add_special_tokens`: with those that the checkpoint adds to every text, such as BOS.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        try:
            # As a batch of one: unlike `encode`, it lets other threads run, and it computes no offsets.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate
            raise InvalidRequestError(_UNPAIRED_SURROGATE, "prompt") from error

    def encode_texts(
        self, texts: "Sequence[str | tuple[str, str]]", max_length: int | None = None, cut: str = "right"
    ) -> list[tuple[tuple[int, ...], int]]:
        """Tokenise texts or pairs for an embedding model or reranker.

        Args:
            max_length: maximum number of tokens, including special tokens; None: no limit.
            cut: the side, left or right, at which texts are truncated; in a pair the longer one first.

        Returns:
            For each its token ids, and the index of the first token of token type 1, or 0.

        Raises:
            InvalidRequestError: a text is not valid Unicode.
        """
        try:
            encodings = self.backend.encode_batch_fast(list(texts))
            if max_length is not None:
                encodings = [
                    encoding if len(encoding) <= max_length else self._encode_within(text, max_length, cut)
                    for text, encoding in zip(texts, encodings, strict=True)
                ]
        except (TypeError, UnicodeEncodeError) as error:  # a lone surrogate
            raise InvalidRequestError(_UNPAIRED_SURROGATE, "input") from error
        tokenised = []
        for encoding in encodings:
            types = encoding.type_ids
            tokenised.append((tuple(encoding.ids), types.index(1) if 1 in types else 0))
        return tokenised

    def _encode_within(self, text: str | tuple[str, str], max_length: int, cut: str) -> Encoding:
        parts = [text] if isinstance(text, str) else list(text)
        encodings = self.backend.encode_batch(parts, add_special_tokens=False)
        left = max(0, max_length - self.backend.num_special_tokens_to_add(len(parts) == 2))
        lengths = [len(encoding) for encoding in encodings]
        excess = max(0, sum(lengths) - left)
        lengths = _shortened(lengths[0], lengths[1], excess) if len(lengths) == 2 else [lengths[0] - excess]
        for encoding, length in zip(encodings, lengths, strict=True):
            encoding.truncate(length, direction=cut)
        return self.backend.post_process(encodings[0], encodings[1] if len(encodings) == 2 else None)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """Like `encode`, with each token's position in the text: (id, first character, character after the last).

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        try:
            encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(_UNPAIRED_SURROGATE, "prompt") from error
        return [(token, *place) for token, place in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Detokenise. Bytes that are not UTF-8 become U+FFFD; unknown ids are left out."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_with(self, process: WorkerProcess) -> None:
        """Have `apply_chat_template` use this process, of `chat_template.start_rendering`."""
        self._templates.use(process)

    def _decode_alone(self, token_id: int) -> str:
        return self.decode([token_id])

    def start_chat_templates(self) -> None:
        """Start the process that renders chat templates ahead of the first conversation."""
        self._templates.start()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation to the text of the prompt, in a worker process with limits on time and memory.

        Args:
            variables: variables of the template, such as `enable_thinking`; JSON values.

        Raises:
            InvalidRequestError: there is no chat template, it rejects the messages, or it exceeds its time or memory
                limit.
        """
        return self._templates.render(self._conversation(messages), tools, add_generation_prompt, variables)

    async def apply_chat_template_from_loop(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        off_loop: OffLoop,
    ) -> str:
        """Like `apply_chat_template`, without blocking the event loop."""
        return await self._templates.render_from_loop(self._conversation(messages), tools, True, variables, off_loop)

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with those of a created model, and without null contents, which a template would render as the
        word None.
        """
        whole = messages if self._recipe is None else self._recipe.conversation(messages)
        return [
            {**message, "content": ""} if message.get("content", "") is None else dict(message) for message in whole
        ]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        prefill: str = "",
        **variables: Any,
    ) -> list[int]:
        """Render a conversation with `apply_chat_template` and tokenise the prompt.

        Args:
            prefill: the beginning of the answer, which the model continues.

        Raises:
            InvalidRequestError: as `apply_chat_template`.
        """
        text = self.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text + prefill, add_special_tokens=False)  # the template has written them

    def close(self) -> None:
        """End the processes that render chat templates; all other methods remain usable."""
        self._templates.close()

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._special and self.backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """The text of a single token, also of a special one; U+FFFD stands for part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token; empty for an unknown id."""
        raw = self.raw_bytes(token_id)
        if raw is not None:
            return raw
        piece = self.backend.id_to_token(token_id) or ""
        return (piece.replace("▁", " ") if self._spaces_marked else piece).encode()

    def _raw_bytes(self, token_id: int) -> bytes | None:
        added = self._added.get(token_id)
        if added is not None and (self._byte_level or token_id in self._special):
            return added.encode()
        if self._byte_level:
            piece = self.backend.id_to_token(token_id)
            return None if piece is None else _bytes_of(piece)
        if self._byte_fallback:
            match = _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "")
            return bytes.fromhex(match[1]) if match else None
        return None


def missing_tokenizer(path: Path) -> str | None:
    """The reason why the checkpoint in a folder or GGUF file has no tokenizer; None: it has one."""
    if path.is_file():
        from penstock.checkpoint.gguf.vocabulary import has_vocabulary

        return None if has_vocabulary(read_metadata(path)) else f"{path} has no tokenizer (tokenizer.ggml.tokens)"
    if (path / "tokenizer.json").exists():
        return None
    from penstock.text.vocabularies.convert import convertible

    if convertible(path) is not None:
        return None
    found = [name for name in _OTHER_FORMS if (path / name).exists()]
    if not found:
        return f"{path} has no tokenizer.json"
    return (
        f"{path} has no tokenizer.json, but {', '.join(found)}, which cannot be read alone (transformers converts it: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...))"
    )


def chat_template_of(path: Path) -> str:
    """The sources of the chat templates of the checkpoint in a folder or GGUF file, concatenated; empty if there are
    none. Raises as `Tokenizer.load` does.
    """
    recipe = recipe_of(path)
    if recipe is not None and recipe.template is not None:
        return recipe.template
    if path.is_file():
        from penstock.checkpoint.gguf.tokenizer import read_chat_templates

        sources = read_chat_templates(path)
    else:
        sources = _template_sources(path, _tokenizer_config(path))
    return "\n".join(sources.values())


def _read_backend(file: Path) -> Backend:
    if file.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes; at most {_MAX_BYTES} are read")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _config_with_tokens(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the special and added tokens of older checkpoints."""
    config = _tokenizer_config(folder)
    older = read_json(folder / "special_tokens_map.json") or {}
    if "added_tokens_decoder" not in config:
        config.update(older)
        added = read_json(folder / "added_tokens.json") or {}
        config["added_tokens_decoder"] = {str(token): {"content": text} for text, token in added.items()}
    return config


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "tokenizer_config.json") or {}


def _chosen_template(option: str | None, recipe: Recipe | None) -> str | None:
    """The template that replaces the checkpoint's, if any: the option's, or that of a created model."""
    return recipe.template if option is None and recipe is not None else option


def _shortened(first: int, second: int, excess: int) -> list[int]:
    """Lengths of two texts after removing `excess` tokens, from the longer one first."""
    of_longer = min(excess, abs(first - second))
    lengths = [first - of_longer, second] if first > second else [first, second - of_longer]
    rest = excess - of_longer
    return [lengths[0] - rest // 2, lengths[1] - (rest - rest // 2)]


def _bytes_of(piece: str) -> bytes:
    try:
        return b"".join([BYTE_OF[character] for character in piece])
    except KeyError:  # not written in the alphabet
        return piece.encode()


def _decoder_state(backend: Backend) -> str:
    """The decoder's section of tokenizer.json: `tokenizers` has no other way to inspect a Sequence."""
    if backend.decoder is None:
        return ""
    state: bytes = backend.decoder.__getstate__()
    return json.dumps(json.loads(state), ensure_ascii=False)


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name.

    Raises:
        CheckpointError: they have an unknown format, cannot be read, or are too large.
    """
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    named = {file.stem: file for file in files} | {"default": folder / "chat_template.jinja"}
    found = {name: text for name, file in named.items() if (text := read_text(file)) is not None}
    sources = found or _listed_templates(folder, config.get("chat_template"))
    for name in ("chat_template.json", "processor_config.json"):
        if not sources:
            of_processor = read_json(folder / name) or {}
            sources = _listed_templates(folder, of_processor.get("chat_template"), name)
    if not sources:
        sources = _known_template(folder)
    _check_templates(sources, folder)
    return sources


def _known_template(folder: Path) -> dict[str, str]:
    """The template of a family whose checkpoints have none; empty otherwise."""
    from penstock.text.known_templates import KNOWN_TEMPLATES  # here: few checkpoints need it

    kind = (read_json(folder / "config.json") or {}).get("model_type")
    known = KNOWN_TEMPLATES.get(kind) if isinstance(kind, str) else None
    return {} if known is None else {"default": known}


def _check_templates(sources: Mapping[str, str], path: Path) -> None:
    if (size := sum(map(len, sources.values()))) > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"the chat templates in {path} have {size} characters; at most {MAX_TEMPLATE_CHARACTERS} are read"
        )


def _listed_templates(folder: Path, listed: Any, file: str = "tokenizer_config.json") -> dict[str, str]:
    """The chat templates in a JSON value: one string, a list of named templates, or an object."""
    if listed is None:
        return {}
    entries = {"default": listed} if isinstance(listed, str) else listed
    if isinstance(listed, list) and all(isinstance(entry, Mapping) for entry in listed):
        entries = {str(entry.get("name")): entry.get("template") for entry in listed}
    if not isinstance(entries, Mapping) or not all(isinstance(source, str) for source in entries.values()):
        raise CheckpointError(
            f"chat_template in {file} of {folder} must be a text, a list of objects with name and "
            f"template, or an object of texts; it is {shown(listed)}"
        )
    return dict(entries)
