"""The tab "Live" in a browser."""

import json
import threading

from tests.support.browser import ask, wait_for_answer


def test_requests_are_lanes_with_their_why_and_a_trace(page, server):
    page.get_by_role("link", name="Live").click()
    words = "apple bear cat " * 20
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 400, "ignore_eos": True}
    clients = [threading.Thread(target=server.post, args=("/v1/chat/completions",), kwargs=body) for _ in range(3)]
    for client in clients:
        client.start()
    page.wait_for_selector("text=/[123] of 64 sequences/")
    page.wait_for_selector(".meter:has-text('Generated') .value:not(:text('0.0'))")
    page.locator(".requests summary").click()
    page.wait_for_selector(".requests td:text('decode')")
    for client in clients:
        client.join()
    page.wait_for_selector(".requests td:has-text('ended: length') >> nth=2")
    assert page.locator(".requests tr:has-text('ended: length')").first.locator("td").nth(4).inner_text() == "400"
    page.locator("canvas").click(position={"x": 300, "y": 45})
    events = page.locator(".why tbody tr")
    events.first.wait_for()
    whats = events.locator("td:nth-child(3)").all_inner_texts()
    assert {"admitted", "computed", "generated"} <= set(whats)
    with page.expect_download() as download:
        page.get_by_role("button", name="Trace for Perfetto").click()
    assert json.loads(download.value.path().read_text())["traceEvents"]
    page.get_by_role("link", name="Chat").click()
    ask(page, "What is 5 + 5?")
    assert "10" in wait_for_answer(page).locator(".markdown").inner_text()
