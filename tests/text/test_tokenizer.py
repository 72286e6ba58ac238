import json
import os
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from penstock.errors import CheckpointError, InvalidRequestError
from penstock.text.content import ImageSource, content_of, take_images
from penstock.text.tokenizer import Tokenizer
from tests.support.tokenizers_for_tests import CORPUS, KINDS, byte_level_bpe, write_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": '  Wie heißt "du"? 😀\n'},
    {"role": "assistant", "content": "Ich? <s>"},
    {"role": "user", "content": "x"},
]
TOOLS = [
    {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "a<b": "é'\""}}},
]


@pytest.fixture(scope="module", params=[*KINDS])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def pair(kind, tmp_path_factory):
    """Ours, and the reference's, of the same folder."""
    folder = write_tokenizer(tmp_path_factory.mktemp(kind), KINDS[kind]())
    return Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.sampled_from(CORPUS) | st.text(alphabet="aheloT w<s>/\n▁é😀"))
def test_encodes_and_decodes_as_transformers(pair, text):
    ours, theirs = pair
    for add in (True, False):
        ids = ours.encode(text, add_special_tokens=add)
        assert ids == theirs.encode(text, add_special_tokens=add)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"thinking": "no"}])
def test_renders_chats_as_transformers(pair, extra):
    ours, theirs = pair
    given = {"add_generation_prompt": True, **extra}
    text = ours.apply_chat_template(MESSAGES, **given)
    assert text == theirs.apply_chat_template(MESSAGES, tokenize=False, **given)
    assert ours.encode_chat(MESSAGES, **given) == theirs.apply_chat_template(MESSAGES, return_dict=False, **given)


@pytest.mark.parametrize("bos", [True, False])
def test_tokenizer_json_says_whether_a_text_begins_with_bos(tmp_path, kind, bos):
    backend = KINDS[kind]()
    token = backend.token_to_id("<s>")
    template = {"single": "<s> $A", "special_tokens": [("<s>", token)]} if bos else {"single": "$A"}
    backend.post_processor = processors.TemplateProcessing(**template)
    folder = write_tokenizer(tmp_path, backend, add_bos_token=not bos)
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("") == [token] * bos
    for text in ("", "Hello world"):
        assert ours.encode(text) == theirs.encode(text)


def test_a_content_of_none_is_no_text(pair):
    ours, _ = pair
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    empty, null = ([{"role": "assistant", "content": text, "tool_calls": calls}] for text in ("", None))
    assert ours.apply_chat_template(null) == ours.apply_chat_template(empty)
    assert null[0]["content"] is None


def test_a_chat_gets_its_bos_token_once(pair):
    ours, _ = pair
    bos = ours.backend.token_to_id("<s>")
    assert ours.encode_chat([{"role": "user", "content": "Hello"}]).count(bos) == 1


ENTRY = {"lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
LISTED = {
    "420": {"content": "<think>", "special": False, **ENTRY},
    "421": {"content": "<|end|>", "special": True, **ENTRY},
}


@pytest.mark.parametrize("listed", [LISTED, None])
def test_tokens_that_only_the_configs_name_are_known(tmp_path, listed):
    folder = write_tokenizer(
        tmp_path,
        byte_level_bpe(),
        added_tokens_decoder=listed,
        eos_token={"__type": "AddedToken", "content": "<|stop|>", **ENTRY},
        additional_special_tokens=["<|more|>"],
    )
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|pad|>"}}))
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <think> b <|end|> c<|stop|><|more|> <|pad|>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert "<|stop|>" not in ours.decode(ids)
    assert "<think>" in ours.decode(ids)
    assert ours.vocab_size == len(theirs)


def test_a_token_that_the_config_calls_special_is_so_whatever_tokenizer_json_says(tmp_path):
    backend = byte_level_bpe()
    backend.add_tokens([AddedToken("<|stop|>", special=False)])
    folder = write_tokenizer(tmp_path, backend, eos_token="<|stop|>")
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode("a<|stop|>")
    assert ids == theirs.encode("a<|stop|>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a"


@pytest.mark.parametrize("splits", [True, False, None])
def test_special_tokens_in_texts_are_split_where_the_config_says_so(tmp_path, splits):
    config = {} if splits is None else {"split_special_tokens": splits}
    folder = write_tokenizer(tmp_path, byte_level_bpe(), eos_token="<|stop|>", **config)
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    text = "a<|stop|>"
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.encode(text)[-1] == ours.eos_token_id) == (not splits)
    assert ours.encode_texts([text])[0][0] == tuple(ours.encode(text))
    assert [token for token, _, _ in ours.encode_with_offsets(text)] == ours.encode(text)


def test_split_special_tokens_of_another_type_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe(), split_special_tokens="yes")
    with pytest.raises(CheckpointError, match=r"split_special_tokens in tokenizer_config\.json of .* true or false"):
        Tokenizer.from_path(folder)


def test_the_chat_template_of_processor_config_json_counts_last(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe(), chat_template=None)
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": "of its config"}))
    assert Tokenizer.from_path(folder).chat_template_source == "of its config"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert Tokenizer.from_path(folder).chat_template_source == "of the processor"


def test_tokens_that_only_added_tokens_json_names_are_known(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe(), eos_token="<|stop|>")
    size = Tokenizer.from_path(folder).vocab_size - 1  # without the special token, which comes last
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": size, "<|stop|>": size + 1}))
    ours = Tokenizer.from_path(folder)
    assert ours.encode("<tool><|stop|>", add_special_tokens=False)[-2:] == [size, size + 1]
    assert ours.decode([size, size + 1]) == "<tool>"
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": "x"}))
    with pytest.raises(CheckpointError, match="lists tokens in a form that is not known"):
        Tokenizer.from_path(folder)


def test_the_chat_template_of_a_processor_counts_where_the_tokenizer_has_none(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe(), chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert Tokenizer.from_path(folder).chat_template_source == "of the processor"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match=r"chat_template in chat_template\.json"):
        Tokenizer.from_path(folder)
    write_tokenizer(tmp_path, byte_level_bpe(), chat_template="of the tokenizer")
    assert Tokenizer.from_path(folder).chat_template_source == "of the tokenizer"


@pytest.mark.parametrize("names", [["vocab.json"], ["vocab.json", "vocab.txt"], []])
def test_a_tokenizer_in_another_form_is_named(tmp_path, caplog, names):
    for name in names:
        (tmp_path / name).touch()
    assert Tokenizer.load(tmp_path) is None
    form = f", but {', '.join(names)}, which cannot be read alone" if names else ": prompts"
    assert f"no tokenizer.json{form}" in caplog.text


def test_the_special_eos_token_of_a_folder_has_an_id(tmp_path):
    for entry, has in (("<|stop|>", True), ({"content": "<|stop|>"}, True), (None, False)):
        ours = Tokenizer.from_path(write_tokenizer(tmp_path, byte_level_bpe(), eos_token=entry))
        assert ours.eos_token_id == (ours.backend.token_to_id("<|stop|>") if has else None)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": [1, 2]},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": {"lstrip": False}}},
        {"chat_template": [{"name": "default"}]},
        {"added_tokens_decoder": {"1": {"content": 5}}},
        {"extra_special_tokens": 5},
        {"chat_template": 5},
        {"chat_template": {"default": 5}},
        {"chat_template": ["x"]},
        {"bos_token": 5},
        {"eos_token": {"text": "</s>"}},
    ],
)
def test_a_config_of_another_form_is_named(tmp_path, config):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_path(write_tokenizer(tmp_path, byte_level_bpe(), **config))


def test_nothing_is_cut_where_tokenizer_json_asks_for_it(tmp_path):
    backend = byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    ours = Tokenizer.from_path(write_tokenizer(tmp_path, backend))
    assert ours.decode(ours.encode(CORPUS[0])) == CORPUS[0]


def test_token_bytes_put_together_are_the_text(pair):
    ours, _ = pair
    text = "The größe: 你好 😀 <b>"
    ids = ours.encode(text, add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, ids)).decode().lstrip() == text
    assert any(ours.token_text(i) == "\ufffd" for i in ids)
    assert ours.token_text(ours.backend.token_to_id("<|user|>")) == "<|user|>"
    assert ours.token_bytes(10**6) == b""


def test_token_bytes_of_a_non_special_added_token_are_its_text(tmp_path):
    backend = byte_level_bpe()
    backend.add_tokens([AddedToken("Ġ ü", special=False)])
    ours = Tokenizer.from_path(write_tokenizer(tmp_path, backend))
    assert ours.token_bytes(backend.token_to_id("Ġ ü")) == "Ġ ü".encode()


def test_tokens_know_which_characters_they_are(pair):
    ours, _ = pair
    for text in CORPUS[:3]:
        spans = ours.encode_with_offsets(text)
        assert [token for token, _, _ in spans] == ours.encode(text)
        assert all(0 <= start <= stop <= len(text) for _, start, stop in spans)
        assert {place for _, start, stop in spans for place in range(start, stop)} == set(range(len(text)))


def test_an_answer_that_has_begun_follows_the_chat(pair):
    ours, _ = pair
    text = ours.apply_chat_template(MESSAGES)
    assert ours.encode_chat(MESSAGES, prefill="Hello") == ours.encode(text + "Hello", add_special_tokens=False)


def test_text_that_is_no_unicode_is_refused(pair):
    with pytest.raises(InvalidRequestError, match="Unicode") as caught:
        pair[0].encode("a\ud800b")
    assert caught.value.param == "prompt"


def test_a_folder_without_tokenizer_json_is_named(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ['{"model": {', "[1, 2]", "\xff"])
def test_a_damaged_file_is_named(tmp_path, name, content):
    folder = write_tokenizer(tmp_path, byte_level_bpe())
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Tokenizer.load(folder)


def test_a_tokenizer_that_takes_too_much_memory_is_refused_before_it_is_loaded(tmp_path):
    """The library takes 350 bytes for each of a token's characters here, and ends the process that drops it."""
    folder = write_tokenizer(tmp_path, byte_level_bpe())
    content = json.loads((folder / "tokenizer.json").read_text())
    long = "".join(random.Random(0).choices("abcdefgh", k=4_000_000))
    content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0], [long, 0]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be loaded within 1024 MiB"):
        Tokenizer.load(folder)


def test_a_large_tokenizer_is_loaded(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe())
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"] += [
        {"id": number, "content": f"<extra {number}>", "special": True, **ENTRY} for number in range(10_000, 15_000)
    ]
    file.write_text(json.dumps(content))
    assert file.stat().st_size > 512 * 1024
    assert Tokenizer.load(folder).encode("<extra 10007>", add_special_tokens=False)
    file.write_text(json.dumps(content)[:-1])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("tokenizer.json", 80 * 2**20),
        ("tokenizer_config.json", 2**31),
        ("special_tokens_map.json", 2**31),
        ("chat_template.jinja", 2**31),
    ],
)
def test_a_file_larger_than_any_in_use_is_not_read(tmp_path, name, size):
    folder = write_tokenizer(tmp_path, byte_level_bpe())
    with (folder / name).open("r+b" if (folder / name).exists() else "wb") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        Tokenizer.from_path(folder)


def test_chat_templates_are_limited_together(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe())
    (folder / "additional_chat_templates").mkdir()
    for number in range(3):
        (folder / "additional_chat_templates" / f"{number}.jinja").write_text("x" * 500_000)
    with pytest.raises(CheckpointError, match=r"chat templates in .* have 1500"):
        Tokenizer.from_path(folder)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe())
    os.mkfifo(folder / "chat_template.jinja")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not a regular file"):
        Tokenizer.from_path(folder)


def test_many_tokens_that_only_the_config_names_are_added_at_once(tmp_path):
    listed = {str(number): {"content": f"<extra {number}>", "special": False, **ENTRY} for number in range(420, 20_420)}
    ours = Tokenizer.from_path(write_tokenizer(tmp_path, byte_level_bpe(), added_tokens_decoder=listed))
    assert [ours.decode(ours.encode(f"<extra {n}>", add_special_tokens=False)) for n in (420, 20_419)] == [
        "<extra 420>",
        "<extra 20419>",
    ]


def with_template(tmp_path, template):
    return Tokenizer.from_path(write_tokenizer(tmp_path, byte_level_bpe(), chat_template=template))


def test_chatting_without_a_template_points_to_prompts_and_to_completions(tmp_path):
    tokenizer = with_template(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="generate from the prompt's text") as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.over_http == "ask /v1/completions"
    assert caught.value.param == "messages"


def test_a_template_that_refuses_messages_is_quoted(pair):
    with pytest.raises(InvalidRequestError, match="unknown role critic") as caught:
        pair[0].apply_chat_template([{"role": "critic", "content": "no"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ messages[7].content.strip() }}", "undefined|no element"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "not safe|immutable|unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ],
)
def test_a_template_that_fails_or_breaks_out_fails_the_request_alone(tmp_path, template, words):
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(InvalidRequestError, match=words) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": None}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        "{{ strftime_now('%Y') }}",
        "  {% set ns = namespace(a=1) %}\n  {% if true %}\n{% set ns.a = 2 %}\nx{{ ns.a }}\n  {% endif %}\n",
        "{{ pad_token is defined }} {{ bos_token }} {{ tools is none }} {{ documents is none }}",
    ],
)
def test_templates_may_use_what_transformers_offers(tmp_path, template):
    ours = with_template(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.apply_chat_template(MESSAGES, add_generation_prompt=False) == theirs.apply_chat_template(
        MESSAGES, tokenize=False
    )


def test_of_named_templates_the_one_for_tools_is_taken_with_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].type }}"}]
    tokenizer = with_template(tmp_path, named)
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "function"
    tokenizer = with_template(tmp_path, [{"name": "rag", "template": "x"}])
    with pytest.raises(InvalidRequestError, match="rag"):
        tokenizer.apply_chat_template(MESSAGES)


def test_voxtral_has_a_template_although_its_files_have_none(tmp_path):
    write_tokenizer(tmp_path, byte_level_bpe(), chat_template=None)
    (tmp_path / "config.json").write_text('{"model_type": "voxtral"}')
    said = [{"type": "audio"}, {"type": "text", "text": "What?"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": said},
        {"role": "assistant", "content": "A bell."},
        {"role": "user", "content": "Why?"},
    ]
    assert Tokenizer.from_path(tmp_path).apply_chat_template(messages) == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST][BEGIN_AUDIO][AUDIO]What?[/INST]A bell.</s>[INST]Why?[/INST]"
    )


def test_a_template_may_know_a_sound_by_its_field_alone(tmp_path):
    """As some of Qwen2-Audio's do."""
    template = (
        "{% for m in messages %}{% for p in m['content'] %}{% if 'audio' in p or 'audio_url' in p %}<sound>"
        "{% elif 'text' in p %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    content = content_of([ImageSource("field", b"RIFF", is_sound=True), "What?"], "")
    messages, sources = take_images([{"role": "user", "content": content}])
    assert len(sources) == 1
    assert with_template(tmp_path, template).apply_chat_template(messages) == "<sound>What?"


def test_the_template_in_its_own_file_goes_first(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe(), chat_template="from the config")
    (folder / "chat_template.jinja").write_text("größe from the file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools", encoding="utf-8")
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(MESSAGES) == "größe from the file"
    assert tokenizer.apply_chat_template(MESSAGES, tools=TOOLS) == "with tools"
