"""Chat templates that are hostile or broken: refused within bounds, one conversation at a time."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError, EngineDeadError, InvalidRequestError
from penstock.text import chat_template
from penstock.text.chat_template import ChatTemplates, read_template, start_rendering

PLAIN = "{{ messages[0].content }}"
HOSTILE = "{% if messages[0].content == 'now' %}" + "{hostile}" + "{% endif %}" + PLAIN
LOOP = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
DOUBLING = "{% set ns = namespace(x='x') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"


def messages(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


@pytest.fixture
def make() -> Iterator[object]:
    made: list[ChatTemplates] = []

    def templates(source: str) -> ChatTemplates:
        made.append(ChatTemplates({"default": source}, {}))
        return made[-1]

    yield templates
    for one in made:
        one.close()


def render(templates: ChatTemplates, content: str) -> str:
    return templates.render(messages(content), None, True, {})


async def render_from_loop(templates: ChatTemplates, content: str) -> str:
    async def off_loop(size: int, work: Callable[[], bytes]) -> bytes:
        return await asyncio.to_thread(work)

    return await templates.render_from_loop(messages(content), None, True, {}, off_loop)


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        (LOOP, "s of processor time"),
        (DOUBLING, "MiB of memory"),
        ("{{ messages[0].content * (10 ** 10) }}", "MiB of memory"),
        ("{{ '%9999999999d' % 1 }}", "MiB of memory"),
        ("{{ '{:>9999999999}'.format(1) }}", "MiB of memory"),
        ("{{ messages[0].content.ljust(10 ** 10) }}", "MiB of memory"),
        ("{{ messages | tojson(indent=10 ** 10) }}", "MiB of memory|cannot render"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' * 3000000 }}", "a prompt of 3000003 characters"),
        ("{{ raise_exception('x' * 3000000) }}", r"xxx \.\.\. \(30000\d\d characters\)"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
    ],
)
def test_a_template_without_bounds_is_refused_and_the_next_conversation_is_not(make, hostile, words):
    templates = make(HOSTILE.replace("{hostile}", hostile))
    with pytest.raises(InvalidRequestError, match=words) as caught:
        render(templates, "now")
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 3000
    assert render(templates, "hello") == "hello"


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 10 ** 10 }}", "{{ 7 ** (7 ** 12) }}", "{{ " + "(" * 10**5 + ")" * 10**5 + " }}"]
)
def test_a_template_that_cannot_be_compiled_within_bounds_is_refused(make, source):
    with pytest.raises(InvalidRequestError, match="the model's chat template"):
        render(make(source), "hello")


def test_the_event_loop_goes_on_while_a_template_loops_and_short_conversations_pass_long_ones(make):
    templates = make("{% if messages[0].content|length > 40000 %}" + LOOP + "{% endif %}" + PLAIN)

    async def main() -> None:
        long = asyncio.ensure_future(render_from_loop(templates, "now" * 20_000))
        rendered = 0
        while not long.done():
            assert await render_from_loop(templates, "hello") == "hello"
            rendered += 1
        assert rendered > 10
        with pytest.raises(InvalidRequestError, match="processor time"):
            await long
        assert await render_from_loop(templates, "hello") == "hello"

    asyncio.run(main())


def test_many_conversations_at_once_get_their_own_prompts(make):
    templates = make(HOSTILE.replace("{hostile}", DOUBLING))

    async def main() -> None:
        contents = [str(number) * (1 + number % 3 * 20_000) for number in range(30)] + ["now"] * 3
        told = await asyncio.gather(*(render_from_loop(templates, c) for c in contents), return_exceptions=True)
        assert told[:30] == contents[:30]
        assert all(isinstance(error, InvalidRequestError) for error in told[30:])

    asyncio.run(main())


def test_a_caller_that_leaves_takes_its_rendering_along(make):
    templates = make(HOSTILE.replace("{hostile}", LOOP))

    async def main() -> None:
        assert await render_from_loop(templates, "hello") == "hello"
        began = time.process_time()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(render_from_loop(templates, "now"), 0.2)
        assert await render_from_loop(templates, "hello") == "hello"
        assert time.process_time() - began < chat_template.CPU_SECONDS

    asyncio.run(main())


def test_a_caller_that_leaves_costs_others_neither_its_turn_nor_their_process(make):
    templates = make(HOSTILE.replace("{hostile}", "{% for i in range(99999) %}{% endfor %}"))

    async def main() -> None:
        assert await render_from_loop(templates, "hello") == "hello"
        worker = templates._short._worker
        leaving = [asyncio.ensure_future(render_from_loop(templates, "now")) for _ in range(200)]
        await asyncio.sleep(0.001)
        for call in leaving:
            call.cancel()
        began = time.monotonic()
        assert await render_from_loop(templates, "hello") == "hello"
        assert time.monotonic() - began < 0.5
        assert templates._short._worker is worker

    asyncio.run(main())


def test_a_process_that_was_killed_from_outside_is_replaced(make):
    templates = make(PLAIN)
    assert render(templates, "hello") == "hello"
    worker = templates._offline._worker
    assert worker is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    assert render(templates, "again") == "again"


def test_a_process_whose_memory_ran_out_is_replaced(make):
    templates = make(HOSTILE.replace("{hostile}", DOUBLING))
    with pytest.raises(InvalidRequestError, match="MiB of memory"):
        render(templates, "now")
    first = templates._offline._worker
    assert render(templates, "hello") == "hello"
    assert templates._offline._worker is not first


def test_a_process_that_was_started_before_the_templates_were_read_renders_them(make):
    process, templates = start_rendering(), make(PLAIN)
    templates.use(process)
    assert render(templates, "hello") == "hello"
    assert templates._offline.running() is process
    os.kill(process.pid, signal.SIGKILL)  # and is replaced like any other
    assert render(templates, "again") == "again"


def test_what_is_not_plain_data_is_refused(make):
    templates = make("{{ thing }}")
    with pytest.raises(InvalidRequestError, match="must be plain data"):
        templates.render(messages("x"), None, True, {"thing": object()})
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="must be plain data"):
        templates.render(messages("x"), None, True, {"thing": deep})


def test_text_and_numbers_arrive_as_they_were(make):
    templates = make("{{ messages[0].content }}{{ thing | tojson }}")
    thing = {"big": 10**40, "small": 1.5e-7, "none": None, "text": "é\u2028😀"}
    text = templates.render(messages("half \ud83d and \ude00"), None, True, {"thing": thing})
    assert (
        text
        == 'half \ud83d and \ude00{"big": ' + str(10**40) + ', "small": 1.5e-07, "none": null, "text": "é\u2028😀"}'
    )


def test_the_process_that_renders_has_no_keys_in_its_environment(make, monkeypatch):
    for name in ("PENSTOCK_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    templates = make(PLAIN)
    assert render(templates, "hello") == "hello"
    worker = templates._offline._worker
    assert worker is not None
    environment = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
    assert b"PATH=" in environment
    assert b"secret" not in environment


def test_nothing_is_rendered_after_the_end(make):
    templates = make(PLAIN)
    assert render(templates, "hello") == "hello"
    templates.close()
    with pytest.raises(EngineDeadError):
        render(templates, "hello")
    with pytest.raises(EngineDeadError):
        asyncio.run(render_from_loop(templates, "hello"))


def test_a_process_ends_with_the_one_that_started_it(make):
    templates = make(PLAIN)
    assert render(templates, "hello") == "hello"
    worker = templates._offline._worker
    assert worker is not None
    worker._socket.close()
    assert worker._process.wait(20) == 0
    assert not Path(f"/proc/{worker._process.pid}").exists()


def test_a_given_template_is_a_file_or_its_source(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN)
    assert read_template(str(file)) == PLAIN
    assert read_template(PLAIN) == PLAIN
    assert read_template(None) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file .*own.jinja, and without braces it is no template itself"),
        ("{% for message in messages %}", "own.jinja: the model's chat template says: .*endfor"),
        ("{{ messages | no_such_filter }}", "own.jinja: the model's chat template says: No filter named"),
        ("{% set x = 1 %}", "is not a chat template: give Jinja source that writes out `messages`"),
        ('{"chat_template": "{{ messages }}"}', "is not a chat template"),
        ("", "is not a chat template"),
        ("{{ messages }}" + " " * 2**20, "larger than 1048576 bytes"),
    ],
)
def test_a_given_template_that_is_missing_or_broken_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"^chat_template: .*{words}"):
        read_template(str(file))


def test_a_given_template_is_compiled_within_bounds() -> None:
    with pytest.raises(ConfigError, match=r"^chat_template: the model's chat template"):
        read_template("{{ messages }}" + "{% if 1 %}" * 40_000 + "{% endif %}" * 40_000)
