"""Several models in a browser: their states, and the progress of a load."""

import re

from penstock.checkpoint.checkpoint import DEMO_FOLDER
from tests.server.running import running_server
from tests.support.browser import ask, open_page, violations, wait_for_answer

EVENTS = 'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "Here."}, "finish_reason": "stop"}]}\n\n'


def card(name, value, stage=None, progress=0.0, error=None):
    status = {"value": value, "progress": progress, "stage": stage, "error": error}
    return {"id": name, "object": "model", "parent": None, "capabilities": [], "status": status}


def states(page):
    return page.locator("#model option").all_inner_texts()


def test_a_load_shows_its_stage_and_share_until_the_answer_begins(browser, server):
    with open_page(browser, server.url) as page:
        listed, held = [card("a", "loaded"), card("b", "unloaded")], []
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": listed}))
        page.route("**/v1/chat/completions", lambda route: held.append(route))
        page.reload()
        page.wait_for_selector("text=Chat with a")
        assert states(page) == ["a · loaded", "b · unloaded"]
        page.get_by_label("Model").select_option("b")
        page.wait_for_selector(".welcome >> text=loaded for the first message")
        listed[1] = card("b", "unloaded", "waiting")
        ask(page, "Where?")
        page.wait_for_selector(".answer .load >> text=Loading b: waiting for its turn, or for memory")
        assert page.locator(".load progress").get_attribute("value") is None
        listed[1] = card("b", "loading", "reading weights", 0.456)
        page.wait_for_selector(".answer .load >> text=Loading b: reading weights")
        assert page.locator(".load").inner_text().endswith("45 %")
        assert page.locator(".load progress").get_attribute("value") == "0.456"
        assert states(page)[1] == "b · loading 45 %"
        assert violations(page) == []
        listed[1] = card("b", "loading", "preparing", 1.0)
        page.wait_for_selector(".answer .load >> text=Loading b: preparing the first step")
        assert page.locator(".load progress").get_attribute("value") is None
        listed[1] = card("b", "loaded", None, 1.0)
        held[0].fulfill(body=EVENTS + "data: [DONE]\n\n", content_type="text/event-stream")
        assert "Here." in wait_for_answer(page).inner_text()
        assert page.locator(".load").count() == 0
        page.wait_for_selector("#model option:text('b · loaded')", state="attached")


def test_a_failed_load_says_why_and_models_load_as_they_are_chosen(browser, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"], "model_type": "none"}')
    models = (f"--model=a={DEMO_FOLDER}", f"--model=b={DEMO_FOLDER}", f"--model=bad={bad}")
    with running_server(*models, "--max-loaded-models", "1", "--threads", "1") as several:
        with open_page(browser, several.url) as page:
            page.wait_for_selector("text=Chat with a")
            page.get_by_label("Model").select_option("bad")
            ask(page, "What is 1 + 1?")
            page.wait_for_selector(".answer [role=alert]:has-text(\"the model 'bad' cannot be loaded\")")
            page.wait_for_selector("#model option:text('bad · failed')", state="attached")
            page.keyboard.press("Control+K")
            said = page.locator(".welcome [role=alert]").inner_text()
            assert re.search(r"bad could not be loaded: .*NoSuchForCausalLM", said, re.DOTALL), said
            page.get_by_label("Model").select_option("b")
            ask(page, "What is 37 + 58?")
            assert "95" in wait_for_answer(page).inner_text()
            page.wait_for_selector("#model option:text('b · loaded')", state="attached")
            assert states(page)[0] == "a · unloaded"
