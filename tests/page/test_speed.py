"""The page's speed in a browser."""

import json

from tests.support.browser import answer_next, ask, open_page, wait_for_answer

BLOCKS = (
    "## A part\n\nSome words of a *paragraph* with `code`, **strong** ones and a [link](https://example.org).\n\n",
    "- one item of a list\n- another item of it\n  - and one below\n\n",
    "```python\nfor number in range(10):\n    print(number, 'in a line of code')\n```\n\n",
    "| name | value |\n|---|---|\n| a | 1 |\n| b | 2 |\n\n",
)
MAX_PAINT_MS = 500
MAX_TASK_MS = 50


def written(num_tokens):
    """A text in Markdown, in pieces of four characters: some long blocks, many short ones."""
    short = "".join(BLOCKS) * (num_tokens * 4 // 2 // sum(map(len, BLOCKS)))
    rest = num_tokens * 4 - len(short)
    long = "".join(f"{number}. an item of a long list, which ends late\n" for number in range(rest // 90))
    code = "```\n" + "a line of a long program, which ends late\n" * (rest // 90) + "```\n"
    whole = f"{short}{long}\nA paragraph.\n\n{code}"
    return [{"content": whole[at : at + 4]} for at in range(0, len(whole), 4)]


def main_thread_tasks(trace):
    """CPU milliseconds of each task of the page's main thread."""
    events = json.loads(trace)["traceEvents"]
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    tasks = [event for event in events if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) in threads]
    return sorted(task.get("tdur", 0) / 1000 for task in tasks)


def test_the_first_paint_is_fast(browser, server):
    def paint():
        with open_page(browser, server.url) as page:
            page.wait_for_selector(".welcome")
            return page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")

    times = [paint() for _ in range(5)]
    print(f"first contentful paint: {sorted(map(round, times))} ms")
    assert min(times) <= MAX_PAINT_MS


def test_a_stream_of_10000_tokens_stays_smooth(browser, page):
    deltas = written(10_000)
    answer_next(page, deltas, per_tick=4)
    browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
    ask(page, "Write much")
    wait_for_answer(page, seconds=100)
    tasks = main_thread_tasks(browser.stop_tracing())
    print(f"{len(deltas)} tokens, {len(tasks)} tasks; longest: {tasks[-5:]} ms of CPU")
    assert len(page.locator(".markdown").inner_text()) > 30_000
    assert tasks[-1] <= MAX_TASK_MS
