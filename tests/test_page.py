"""docs/step.html: its record agrees with the formulas, and what a browser shows is the record."""

import itertools
import json
import re
import shutil
from urllib.parse import parse_qs

import pytest

from tests.common import ROOT
from judge.measure import formula_of_bytes, formula_of_traffic

PAGE = ROOT / "docs" / "step.html"
BEGIN, END = '<script id="record" type="application/json">\n', "\n</script><!-- record -->"
MODES = ["ddp", "zero1", "zero2", "zero3"]
# What was recorded: by world size the sample of each rank, and the weights of each block.
SAMPLES = {2: [[2, 0, 4, -2], [2, 4, 0, 6]], 3: [[3, -3, 6], [0, 6, 3], [3, 3, -3]]}
WEIGHTS = [[1, 2, 1, 3], [2, 1, 1, 1], [1, 1, 3, 1], [1, 2, 1, 1], [2, 1, 1, 1]]
RUNS = [f"{mode} {W}" for mode in MODES for W in SAMPLES]
UNITS = 5


def parts_of_page():
    """What is before the record, the record, and what is after it."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    text, _, tail = rest.partition(END)
    return head, text, tail


def record_of_page():
    _, text, _ = parts_of_page()
    return json.loads(text)


def runs_of_page():
    return record_of_page()["runs"]


@pytest.mark.parametrize("name", RUNS)
def test_page_agrees_with_the_formulas(name):
    """Of what ranks hold at first, and send in a step; and where a message may be writing no value
    is shown."""
    mode, W = name.split()
    W = int(W)
    events = runs_of_page()[name]
    psi = UNITS * len(SAMPLES[W][0])
    assert events[0]["held"] == [sum(formula_of_bytes(mode, W)) * psi] * W
    still_whole = 3 / UNITS  # the root and two blocks
    expected = formula_of_traffic(mode, 1, still_whole) * (W - 1) / W * psi
    assert sent_by_ranks(events, W) == pytest.approx([expected] * W)
    for event, cells, under_way in states_of(events):
        for what, messages in under_way.values():
            is_reduce = what.startswith("start: reduce")  # what arrives is no cell yet
            for sender, receiver, row, unit, first, n in messages:
                rank = sender if is_reduce else receiver
                for cell in cells[f"{rank}{row}{unit}"][first:first + n]:
                    is_marked = cell[0] in "sS" if is_reduce else cell[0] == "~"
                    assert is_marked, f"{cell} of {row} {unit} on rank {rank}: {event}"
        for number, messages in event.get("starts", {}).items():
            pairs = {(message[0], message[1]) for message in messages}
            assert pairs == set(itertools.permutations(range(W), 2)), f"{number}: {event}"


def states_of(events):
    """For each event: (the event, all cells, {number of an exchange that is under way: (the event
    that started it, its messages)})."""
    cells, under_way = {}, {}
    states = []
    for event in events:
        cells = cells | {key: text.split() for key, text in event.get("set", {}).items()}
        under_way = dict(under_way)
        for number in event.get("ends", ()):
            del under_way[str(number)]
        for number, messages in event.get("starts", {}).items():
            under_way[number] = event["what"], messages
        states.append((event, cells, under_way))
    return states


def sent_by_ranks(events, W):
    """Elements that each rank has sent by these events."""
    sent = [0] * W
    for event in events:
        for messages in event.get("starts", {}).values():
            for rank, *_, n in messages:
                sent[rank] += n
    return sent


@pytest.mark.parametrize("mode", MODES)
def test_page_has_times_of_the_same_step(mode):
    """The timed step has the events of the other one, and in each exchange a rank sends as many of
    its elements; on each rank the clock goes on, and nothing arrives before it is sent."""
    times = record_of_page()["times"]
    of_mode = times["runs"][mode]
    events = runs_of_page()[f"{mode} 2"]
    marks = of_mode["marks"]
    assert marks.count("e") == len(events)
    per_element = 4 * times["size"] ** 2 / len(SAMPLES[2][0])
    expected = []
    for event in events:
        for messages in event.get("starts", {}).values():
            expected.append(sum(n for rank, *_, n in messages if rank == 0) * per_element)
    assert of_mode["bytes"] == expected
    starts = [i for i, mark in enumerate(marks) if mark == "s"]
    for moments, arrived in zip(of_mode["times"], of_mode["arrived"], strict=True):
        assert len(moments) == len(marks) and moments == sorted(moments)
        for i, moment in zip(starts, arrived, strict=True):
            assert moment > max(of_rank[i] for of_rank in of_mode["times"])


def names_of(events):
    """The events of a run as addresses name them."""
    names = []
    for event in events:
        name = re.sub(r"[^\w.]+", "-", event["what"])
        names.append(f"{name}-again" if name in names else name)
    return names


def test_pages_lead_to_events():
    """A link to docs/step.html names a mode, ranks and an event that are there."""
    links = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        links += re.findall(r"step\.html#([^)\"]*)", page.read_text())
    assert len(links) >= 5, links
    runs = runs_of_page()
    for link in links:
        words = parse_qs(link, strict_parsing=True)
        assert {*words} <= {"mode", "ranks", "event", "beside", "tab", "curve",
                            "predict", "asks", "rate"}, link
        assert words.get("tab", ["memory"])[0] in ("memory", "time"), link
        [mode], [W] = words["mode"], words["ranks"]
        for event in words.get("event", []):
            assert event in names_of(runs[f"{mode} {W}"]), link
        assert words.get("beside", ["ddp"])[0] in MODES, link


def test_page_loads_nothing():
    """The page is one file: it names no other, but for links that a reader may follow."""
    head, _, tail = parts_of_page()
    assert not re.search(r"@import|\bfetch\(|XMLHttpRequest| src=|url\(", head + tail)
    [icon, paper] = re.findall(r'href="([^"]*)"', head + tail)
    assert icon == "data:," and paper == "https://arxiv.org/abs/1910.02054"


# -------------------------------------------------------------------------------------------------
# in a browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    with api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path)


@pytest.fixture
def page(browser):
    """An open page, whose console stays empty, and which asks for nothing but itself."""
    # Without a GPU arrows that move would take a core.
    page = browser.new_page(viewport=dict(width=1120, height=900), reduced_motion="reduce")
    errors = []
    page.on("pageerror", lambda error: errors.append(f"error: {error}"))
    page.on("console", lambda message: errors.append(f"console: {message.text}"))
    page.on("request", lambda request: errors.append(request.url) if is_foreign(request) else None)
    yield page
    page.close()
    assert errors == [], errors


def is_foreign(request):
    return not request.url.startswith((PAGE.as_uri(), "data:"))


def open_page(page, address):
    page.goto("about:blank")  # or only the part behind # would be another one
    page.goto(f"{PAGE.as_uri()}#{address}")


def texts_of(page, selector):
    """Of all elements that it selects, by one call: each takes milliseconds."""
    return page.evaluate("""selector => [...document.querySelectorAll(selector)].map(
        element => element.textContent)""", selector)


def titles_of(page):
    """Of the event that is shown; of two modes two."""
    return texts_of(page, "#events h2")


@pytest.mark.parametrize("name", ["ddp 2", "zero3 3"])
def test_page_plays_to_its_end(page, name):
    """Playing shows each event, and the last one ends the step: every parameter has moved by 1, the
    learning rate, whichever mode it is; and gradients are gone."""
    mode, W = name.split()
    page.clock.install()
    open_page(page, f"mode={mode}&ranks={W}")
    events = runs_of_page()[name]
    n = len(events)
    assert events[-1]["what"] == "zero_grad"
    seen = titles_of(page)
    page.keyboard.press("Space")
    while page.locator("#play").text_content() == "stop" and len(seen) <= n:
        page.clock.run_for(2000)  # each event stays for longer
        if titles_of(page) != seen[-1:]:
            seen += titles_of(page)
    if titles_of(page) != seen[-1:]:  # it came between the last look and the end of playing
        seen += titles_of(page)
    assert seen == [f"{event['what']}{i} of {n}" for i, event in enumerate(events, 1)]
    assert "event=zero_grad" in page.url
    shown = texts_of(page, ".stage .cell")
    n_elements = len(SAMPLES[int(W)][0])
    rows = [shown[i:i + UNITS * n_elements] for i in range(0, len(shown), UNITS * n_elements)]
    weights = [values[:n_elements] for values in WEIGHTS]
    for i, weight in enumerate(sum(weights, [])):
        of_ranks = [rows[4 * rank][i] for rank in range(int(W))]
        assert str(weight - 1) in of_ranks, f"element {i}: {of_ranks}, expected is {weight - 1}"
        assert {rows[4 * rank + 1][i] for rank in range(int(W))} == {""}
    page.keyboard.press("Space")  # from the begin
    page.clock.run_for(1000)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.clock.run_for(60_000)
    assert titles_of(page)[0].endswith(f"2 of {n}")
    page.keyboard.press("Space")
    page.keyboard.press("End")
    page.clock.run_for(60_000)
    assert page.locator("#play").text_content() == "play"
