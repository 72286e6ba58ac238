"""A headless Chromium on the page at `/`, and answers that it gets instead of the server's."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

AXE = Path(os.environ.get("PAGE_TOOLS", "")) / "axe.min.js"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")

_ANSWERS = """
window.answers = [];
window.bodies = [];
const fetchFromServer = window.fetch;
window.fetch = async (input, init) => {
  if (!String(input).includes("chat/completions")) return fetchFromServer(input, init);
  window.bodies.push(JSON.parse(init.body));
  if (!window.answers.length) return fetchFromServer(input, init);
  const { deltas, perTick, finish } = window.answers.shift();
  const encoder = new TextEncoder();
  const stream = new ReadableStream({
    async start(controller) {
      const send = (chunk) => controller.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
      for (const [index, delta] of deltas.entries()) {
        if (init.signal.aborted) return controller.error(new DOMException("stopped", "AbortError"));
        send({ id: "chatcmpl-1", choices: [{ index: 0, delta, finish_reason: null, logprobs: null }] });
        if (index % perTick === perTick - 1) await new Promise((resolve) => setTimeout(resolve, 4));
      }
      send({ id: "chatcmpl-1", choices: [{ index: 0, delta: {}, finish_reason: finish, logprobs: null }] });
      const usage = { prompt_tokens: 10, completion_tokens: deltas.length };
      send({ id: "chatcmpl-1", choices: [], usage });
      controller.close();
    },
  });
  return new Response(stream, { headers: { "content-type": "text/event-stream" } });
};
"""


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A browser of playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def open_page(browser: Any, url: str, width: int = 1280, height: int = 800, **options: Any) -> Iterator[Any]:
    """A fresh profile's page; no message of the browser may be an error."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(_ANSWERS)
    page.goto(url)
    page.wait_for_selector("header")
    yield page
    context.close()
    assert [error for error in errors if "Failed to load resource" not in error] == []  # a status, which tests expect


def answer_next(page: Any, deltas: Sequence[dict[str, Any]], per_tick: int = 1000, finish: str = "stop") -> None:
    """The page's next request gets these deltas; `per_tick` of them every 4 milliseconds."""
    page.evaluate("(answer) => answers.push(answer)", {"deltas": deltas, "perTick": per_tick, "finish": finish})


def ask(page: Any, text: str) -> None:
    """Send a message by the keyboard."""
    page.fill("#message", text)
    page.press("#message", "Enter")


def wait_for_answer(page: Any, number: int = 0, seconds: float = 30.0) -> Any:
    """The answer of this number, once it has ended."""
    answer = page.locator("article.answer").nth(number)
    page.wait_for_function(
        "(n) => document.querySelectorAll('article.answer')[n]?.getAttribute('aria-busy') === 'false'",
        arg=number,
        timeout=seconds * 1000,
    )
    return answer


def violations(page: Any) -> list[str]:
    """What axe finds wrong with the page as it is."""
    page.context.new_cdp_session(page).send("Runtime.evaluate", {"expression": AXE.read_text()})
    found = page.evaluate("async () => JSON.stringify((await axe.run()).violations)")
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in json.loads(found)]
