"""docs/step.html: its record is what the code does, agrees with the formulas, and can be played."""

import itertools
import json
import re
import shutil
from urllib.parse import parse_qs

import pytest

from docs.record_step import OURS, PAGE, SAMPLES, WEIGHTS, parts_of_page, record_run
from judge.measure import formula_of_bytes, formula_of_traffic
from tests.common import ROOT

HEAD, RECORD, TAIL = parts_of_page()
UNITS = len(WEIGHTS)


@pytest.mark.parametrize("W", SAMPLES)
@pytest.mark.parametrize("mode", OURS)
def test_page_has_what_the_code_does(mode, W):
    """If this fails after a change of the code: python docs/record_step.py"""
    of_code = json.loads(json.dumps(record_run(mode, W)))
    of_page = RECORD["runs"][f"{mode} {W}"]
    for now, then in zip(of_code, of_page):
        assert now == then
    assert len(of_code) == len(of_page)


@pytest.mark.parametrize("W", SAMPLES)
@pytest.mark.parametrize("mode", OURS)
def test_page_agrees_with_the_formulas(mode, W):
    """Of what ranks hold after the update, and send in a step. Each rank sends to each other, and
    where a message may be writing no value is shown."""
    cells, under_way, sent = {}, {}, [0] * W
    for event in RECORD["runs"][f"{mode} {W}"]:
        cells |= {key: text.split() for key, text in event["set"].items()}
        for number in event["ends"]:
            del under_way[str(number)]
        for number, messages in event["starts"].items():
            under_way[number] = event["what"], messages
            for rank, *_, n in messages:
                sent[rank] += n
            pairs = {(sender, receiver) for sender, receiver, *_ in messages}
            assert pairs == set(itertools.permutations(range(W), 2)), event
        for what, messages in under_way.values():
            is_reduce = what.startswith("start: reduce")  # what arrives is no cell yet
            for sender, receiver, row, unit, first, n in messages:
                key = f"{sender if is_reduce else receiver}{row}{unit}"
                for cell in cells[key][first:first + n]:
                    assert cell[0] in ("sS" if is_reduce else "~"), f"{key} has {cell}: {event}"
        if event["what"] == "update":
            held = event["held"]
    psi = UNITS * len(SAMPLES[W][0])
    assert held == [sum(formula_of_bytes(mode, W)) * psi] * W
    still_whole = 3 / UNITS  # the root and two blocks
    expected = formula_of_traffic(mode, 1, still_whole) * (W - 1) / W * psi
    assert sent == pytest.approx([expected] * W)


@pytest.mark.parametrize("mode", OURS)
def test_page_has_times_of_the_same_step(mode):
    """The timed step has the events of the other one, and in each exchange a rank sends as many of
    its elements; on each rank the clock goes on, and nothing arrives before it is sent."""
    of_mode = RECORD["times"]["runs"][mode]
    events = RECORD["runs"][f"{mode} 2"]
    marks = of_mode["marks"]
    assert marks.count("e") == len(events)
    per_element = 4 * RECORD["times"]["size"] ** 2 / len(SAMPLES[2][0])
    expected = []
    for event in events:
        for messages in event["starts"].values():
            expected.append(sum(n for rank, *_, n in messages if rank == 0) * per_element)
    assert of_mode["bytes"] == expected
    starts = [i for i, mark in enumerate(marks) if mark == "s"]
    for moments, arrived in zip(of_mode["times"], of_mode["arrived"], strict=True):
        assert len(moments) == len(marks) and moments == sorted(moments)
        for i, moment in zip(starts, arrived, strict=True):
            assert moment > max(of_rank[i] for of_rank in of_mode["times"])


def test_pages_lead_to_events():
    """A link to docs/step.html names a mode, ranks and an event that are there."""
    links = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        links += re.findall(r"step\.html#([^)\"]*)", page.read_text())
    assert len(links) >= 5, links
    for link in links:
        words = {key: value for key, [value] in parse_qs(link, strict_parsing=True).items()}
        assert {*words} <= {"mode", "ranks", "event", "beside", "tab", "curve", "predict", "asks",
                            "rate"}, link
        assert words.get("tab", "memory") in ("memory", "time"), link
        assert words.get("beside", "ddp") in OURS, link
        names = []
        for event in RECORD["runs"][f"{words['mode']} {words['ranks']}"]:
            name = re.sub(r"[^\w.]+", "-", event["what"])
            names.append(f"{name}-again" if name in names else name)
        assert words.get("event", "begin") in names, link


def test_page_loads_nothing():
    """It is one file, which names others only in links that a reader may follow."""
    assert not re.search(r"@import|\bfetch\(|XMLHttpRequest| src=|url\(", HEAD + TAIL)
    for link in re.findall(r'href="([^"]*)"', HEAD + TAIL):
        is_file = link.startswith("../") and (PAGE.parent / link).exists()
        assert is_file or link in ("data:,", "https://arxiv.org/abs/1910.02054"), link


@pytest.mark.parametrize("name", ["ddp 2", "zero3 3"])
def test_page_plays_to_its_end(name):
    """Each event is shown, and nothing is asked for. In the end each parameter has moved by 1, the
    learning rate, and gradients are gone."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser: apt-get install chromium")
    mode, W = name.split()
    n = len(RECORD["runs"][name])
    texts = "selector => [...document.querySelectorAll(selector)].map(e => e.textContent)"
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        # Without a GPU arrows that move would take a core.
        page = browser.new_page(reduced_motion="reduce")
        said, asked = [], []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url.split("#")[0]))
        page.clock.install()
        page.goto(f"{PAGE.as_uri()}#mode={mode}&ranks={W}")
        seen = page.evaluate(texts, "#events h2")
        page.keyboard.press("Space")
        while len(seen) < n and page.evaluate(texts, "#play") == ["stop"]:
            page.clock.run_for(1000)  # each event stays for longer
            title, = page.evaluate(texts, "#events h2")
            if title != seen[-1]:
                seen.append(title)
        cells = page.evaluate(texts, ".stage .cell")
        assert page.evaluate(texts, "#play") == ["play"]
        browser.close()
    assert said == []
    assert set(asked) <= {PAGE.as_uri(), "data:,"}
    events = RECORD["runs"][name]
    assert seen == [f"{event['what']}{i} of {n}" for i, event in enumerate(events, 1)]
    size = len(SAMPLES[int(W)][0])
    rows = [cells[i:i + UNITS * size] for i in range(0, len(cells), UNITS * size)]
    parameters, gradients = rows[::4], rows[1::4]
    for i, weight in enumerate(itertools.chain(*[weights[:size] for weights in WEIGHTS])):
        assert str(weight - 1) in [row[i] for row in parameters]
    assert set(itertools.chain(*gradients)) == {""}
