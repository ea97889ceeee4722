"""docs/step.html: its record is what the code does, and what a browser shows is the record."""

import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from urllib.parse import parse_qs

import pytest
import torch.distributed as dist

from tests.common import ROOT
from tests.test_readme import PAGES
from tests.ranks import on_ranks
from verify import formula_of_bytes, formula_of_traffic

record_step = importlib.import_module("docs.record_step")  # a folder of pages is no package
MODES = [*record_step.MODES]
RUNS = [f"{mode} {W}" for mode in MODES for W in record_step.SAMPLES]
UNITS = 5


def sampled(*names):
    """All runs as parameters, of which these are enough without --full."""
    return [name if name in names else name for name in RUNS]


def runs_of_page():
    _, text, _ = record_step.parts_of_page()
    return record_step.runs_of(text)


@on_ranks(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_page_has_this_step(mode):
    """What the page has of a mode is what happens. It agrees with the formulas, of which the
    recorder knows nothing; and where a message may be writing no value is shown."""
    events, _ = record_step.record(mode)
    W = dist.get_world_size()
    name = f"{mode} {W}"
    actual = record_step.difference({name: runs_of_page()[name]}, {name: events})
    assert actual is None, actual
    psi = UNITS * len(record_step.SAMPLES[W][0])
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


@pytest.mark.parametrize("writes", [False, True])
def test_record_step_checks_and_writes(writes, tmp_path):
    """In a copy of the tree, in whose page one number is another: --check names the event and the
    command, and changes nothing. That command makes the page again what it was."""
    for pattern in ("*.py", "docs/*", "tests/*.py", "bench/*.py", "dropin/*.py"):
        for path in ROOT.glob(pattern):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(exist_ok=True)
            if path.is_file():
                shutil.copyfile(path, copy)
    page = tmp_path / "docs" / "step.html"
    text = page.read_text()
    assert text.count('"0g4":"m4 m8 x6 x-3"') == 1
    broken = text.replace('"0g4":"m4 m8 x6 x-3"', '"0g4":"m4 m8 x6 x-2"')
    page.write_text(broken)
    command = [sys.executable, "docs/record_step.py"]
    if writes:
        subprocess.run([*command, "--keep_times"], cwd=tmp_path, check=True)
        assert page.read_text() == text
        subprocess.run([*command, "--check"], cwd=tmp_path, check=True)
        return
    done = subprocess.run([*command, "--check"], cwd=tmp_path, capture_output=True, text=True)
    fact = "zero1 2 ranks, event 23, 'wait: reduce the bucket from blocks.3 on': the page has"
    assert done.returncode == 1 and fact in done.stderr, done
    assert done.stderr.strip().endswith("To record anew: python docs/record_step.py")
    assert page.read_text() == broken


def test_record_step_reads_what_it_writes():
    head, text, tail = record_step.parts_of_page()
    assert record_step.as_text(record_step.runs_of(text), record_step.times_on_page(text)) == text
    assert head + record_step.BEGIN + text + record_step.END + tail == record_step.PAGE.read_text()


def test_page_has_lines_of_code_that_are_there():
    """Each event has a line, of a file in which it still is."""
    texts = {}
    for path in ("dropin/ddp.py", "dropin/zero.py", "docs/record_step.py"):
        texts[path] = " ".join((ROOT / path).read_text().split())
    for name, events in runs_of_page().items():
        for event in events:
            file, line = event["line"]
            assert len(line) > 5 and line in texts[file], f"{file} has no line {line!r}: {event}"
            assert (file == "docs/record_step.py") == ("code" not in event), event


def times_of_page():
    _, text, _ = record_step.parts_of_page()
    return record_step.times_on_page(text)


@pytest.mark.parametrize("mode", MODES)
def test_page_has_times_of_the_same_step(mode):
    """The timed step has the events of the other one, and in each exchange a rank sends as many of
    its elements; on each rank the clock goes on, and nothing arrives before it is sent."""
    times = times_of_page()
    of_mode = times["runs"][mode]
    events = runs_of_page()[f"{mode} 2"]
    marks = of_mode["marks"]
    assert marks.count("e") == len(events)
    per_element = 4 * times["size"] ** 2 / len(record_step.SAMPLES[2][0])
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


def test_times_are_left_out_by_name(monkeypatch, capsys):
    """Where no link can be made the recorder says what it leaves out, and why, in one line."""
    time_step = importlib.import_module("docs.time_step")
    monkeypatch.setattr("bench.launch.os.geteuid", lambda: 1000)
    assert time_step.times_over_link() is None
    said = capsys.readouterr()
    assert re.fullmatch(r"left out: the step in time; .*keeps the times.*root.*\n", said.out), said
    assert said.err == ""


def test_times_are_recorded():
    """Over a real link, where one can be made."""
    time_step = importlib.import_module("docs.time_step")
    times = time_step.times_over_link()
    if times is None:
        pytest.skip("no link can be made here")
    for mode, of_mode in times_of_page()["runs"].items():
        for key in ("marks", "bytes"):
            assert times["runs"][mode][key] == of_mode[key], f"{mode}, {key}"


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
    for page in PAGES.values():
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
    head, _, tail = record_step.parts_of_page()
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
    return not request.url.startswith((record_step.PAGE.as_uri(), "data:"))


def open_page(page, address):
    page.goto("about:blank")  # or only the part behind # would be another one
    page.goto(f"{record_step.PAGE.as_uri()}#{address}")


def texts_of(page, selector):
    """Of all elements that it selects, by one call: each takes milliseconds."""
    return page.evaluate("""selector => [...document.querySelectorAll(selector)].map(
        element => element.textContent)""", selector)


def titles_of(page):
    """Of the event that is shown; of two modes two."""
    return texts_of(page, "#events h2")


LOOKS = {".": "none", "z": "blank", "v": "own", "o": "raw", "s": "way", "~": "way", "m": "own",
         "x": "old"}


def cells_expected(cells, W, owners):
    """[(text, looks)] of the record's cells, in the order of the page: rank, row, unit, element.
    owners: of the elements of a parameter; of DDP []."""
    actual = []
    for rank in range(W):
        for row in "pgmv":
            for unit in range(UNITS):
                for i, cell in enumerate(cells[f"{rank}{row}{unit}"]):
                    look = LOOKS[cell[0].lower()]
                    if look == "own" and owners and owners[i] != rank:
                        look = "copy"
                    text = "…" if cell == "~" else cell[1:].replace("-", "−")
                    looks = {"cell", look} | ({"twice"} if cell[0].isupper() else set())
                    actual.append((text, looks))
    return actual


def copies_of(cell):
    """How many times there is memory for a cell of the record."""
    if cell == ".":
        return 0
    return 2 if cell[0].isupper() else 1


def owners_of(mode, W):
    """Of the elements of a parameter: stages cut it into W equal chunks."""
    n = len(record_step.SAMPLES[W][0])
    return [] if mode == "ddp" else [i * W // n for i in range(n)]


# What the page shows of an event, in one call, as each takes milliseconds: texts; of a cell its
# text, its looks and [left, right, top, bottom]; of an arrow where it is, begins and ends.
STATE = """() => {
    const all = (selector, read) => [...document.querySelectorAll(selector)].map(read);
    const texts = selector => all(selector, element => element.textContent);
    const at = document.querySelector('.stage').getBoundingClientRect();
    const cells = all('.stage .cell', cell => {
        const { left, right, top, bottom } = cell.getBoundingClientRect();
        const sides = [left - at.left, right - at.left, top - at.top, bottom - at.top];
        return [cell.textContent, [...cell.classList], sides];
    });
    const arrows = all('.stage svg g', arrow => {
        const [, line, head] = arrow.children;
        const [, x, begin] = line.getAttribute('d').match(/M(\\S+) (\\S+)V/);
        const [, end] = head.getAttribute('d').match(/M\\S+ (\\S+)l/);
        return [+x, +begin, +end, line.classList.contains('new')];
    });
    return { cells, arrows, captions: texts('caption'), titles: texts('#events h2'),
             links: all('#events a', link => link.getAttribute('href')),
             sentences: texts('#events p') };
}"""


def assert_arrows(arrows, boxes, under_way, started, W):
    """There is an arrow for each message: from the cells that are sent to those on the other rank,
    in the same row; and it is thick if the message starts now."""
    n_elements = len(record_step.SAMPLES[W][0])
    n_arrows = 0
    for number, (_, messages) in under_way.items():
        for sender, receiver, row, unit, first, n in messages:
            n_arrows += 1
            ends = []
            for rank in (sender, receiver):
                place = ((4 * rank + "pgmv".index(row)) * UNITS + unit) * n_elements + first
                left, right = boxes[place][0], boxes[place + n - 1][1]
                ends.append(boxes[place][2:])
            is_down = receiver > sender
            y1, y2 = ends[0][is_down], ends[1][not is_down]
            actual = []
            for x, y_begin, y_end, is_new in arrows:
                if left < x < right and [y_begin, y_end] == pytest.approx([y1, y2], abs=0.5):
                    actual.append(is_new)
            assert actual == [number in started], f"{number}: {arrows}"
    assert len(arrows) == n_arrows, f"{len(arrows)} arrows for {n_arrows} messages"


def assert_sums(text, cells, unit):
    """What a sentence computes is right, and is in the first cell of the unit's gradients."""
    for left, right in re.findall(r"([\d−][\d −+·]*) = (−?\d+)", text):
        computed = eval(left.replace("·", "*").replace("−", "-"))
        assert computed == int(right.replace("−", "-")), text
        assert cells[f"0g{unit}"][0][1:] == str(computed), text


@pytest.mark.parametrize("name", sampled("ddp 2", "zero1 3", "zero3 2"))
def test_page_shows_each_event(page, name):
    """At each event, one key press after the other, the page shows the record's numbers, looks,
    messages, bytes and counts of elements that were sent; and one sentence, with a function."""
    mode, W = name.split()
    open_page(page, f"mode={mode}&ranks={W}")
    most = [0] * int(W)
    events = runs_of_page()[name]
    n_sums = 0
    for i, (event, cells, under_way) in enumerate(states_of(events)):
        sent = sent_by_ranks(events[:i + 1], int(W))
        most = [max(pair) for pair in zip(most, event["held"])]
        shown = page.evaluate(STATE)
        actual = []
        for text, looks, _ in shown["cells"]:
            actual.append((text, set(looks) - {"long", "changed", "was"}))
        assert actual == cells_expected(cells, int(W), owners_of(mode, int(W))), event
        expected = []
        for rank, held in enumerate(event["held"]):
            of_rank = [row for key, row in cells.items() if key[0] == str(rank)]
            n_numbers = sum(copies_of(cell) for cell in itertools.chain(*of_rank))
            assert held == 4 * n_numbers, event
            expected.append(f"rank {rank}{held} bytes (most so far {most[rank]}), {sent[rank]} "
                            f"elements sent")
        assert shown["captions"] == expected, event
        boxes = [sides for *_, sides in shown["cells"]]
        assert_arrows(shown["arrows"], boxes, under_way, event.get("starts", {}), int(W))
        [title], [text, code] = shown["titles"], shown["sentences"]
        assert title == f"{event['what']}{i + 1} of {len(events)}"
        assert len(text) > 20 and re.search(r"\.\)?$", text), text
        assert not re.search("undefined|null|NaN", text + code), text
        file, line = event["line"]
        assert code.endswith(f"{file.split('/')[-1]}: {line}"), code
        assert shown["links"] == [f"../{file}"] and (record_step.PAGE.parent / ".." / file).exists()
        functions = event.get("code", [])
        assert code.startswith("code: ") and all(name in code for name in functions), code
        block = re.search(r"blocks\.(\d)", event["what"])
        assert_sums(text, cells, int(block[1]) + 1 if block else 0)
        n_sums += " = " in text
        page.keyboard.press("ArrowRight")
    assert n_sums == UNITS + (UNITS if mode != "ddp" else 3), f"{n_sums} sentences with numbers"
    took = texts_of(page, f"#took tbody tr:nth-child({MODES.index(mode) + 1}) td")
    assert took == [str(events[0]["held"][0]), str(most[0]), str(sent[0])], took


SENTENCES = """
ddp 3, loss: Each rank has the loss of its own sample: 18, 33, 15. Next comes loss.backward()
ddp 2, backward-the-root: Meanwhile the gradients of block 3, block 2, block 1 and block 0 are under
zero1 2, zero_grad: The step is over: each rank has sent 20 elements.
zero2 2, wait-reduce-the-bucket-from-blocks.3-on: Only one bucket is under way at a time, so the ra
zero2 2, wait-reduce-the-bucket-from-blocks.3-on: sent is of no use any more.
zero3 2, start-unshard-blocks.1-again: each rank sends the chunk that it owns to the other rank. Thi
zero3 2, start-unshard-blocks.1-again: This is the second time in this step, as it was freed in the
zero3 3, free-blocks.0: Block 0 has done its part, and block 2 has to be gathered. Beside the root o
zero3 2, backward-blocks.3: They are still whole.
zero3 2, backward-blocks.1: Their all-gather is under way.
zero3 3, free-blocks.1-again: The backward is over. What was gathered of block 1 is freed.
"""


def test_page_says_what_happens(page):
    """Some sentences, labels and headings, word by word."""
    open_page(page, "mode=zero2&ranks=2&event=wait-reduce-the-bucket-from-the-root-on")
    assert texts_of(page, "#events p")[0].startswith("Each rank"), "no bucket is sent after it"
    for mode, W, event, sentence in re.findall(r"(\w+) (\d), ([\w.-]+): (.*)", SENTENCES):
        open_page(page, f"mode={mode}&ranks={W}&event={event}")
        [text, _] = texts_of(page, "#events p")
        assert sentence in text, text
    labels = texts_of(page, ".rank:first-of-type .long")
    assert labels == ["parameters", "gradients", "Adam: average", "Adam: squares"]
    heads = ", ".join(texts_of(page, "#took thead th"))
    assert heads == "on 3 ranks, bytes between steps, bytes at most, elements sent in the step"
    open_page(page, "mode=ddp&ranks=2&event=start-reduce-the-bucket-from-blocks.3-on")
    assert texts_of(page, "#phase") == ["backward"]
    assert texts_of(page, ".stage .changed") == []
    assert set(texts_of(page, "th.now")) == {"block 3"}
    legend = texts_of(page, "#legend li")
    assert legend[1] == "memory without a value" and legend[7] == "3old, or of no use any more"
    open_page(page, "mode=zero1&ranks=2&event=update")
    assert len(texts_of(page, ".stage .changed")) == 2 * 10 * 3  # of both ranks
    widths = page.evaluate("""[...document.querySelectorAll('.rank .meter i')].map(
        part => part.style.width)""")
    assert widths == ["75%", "80%"] * 2  # 8 psi + 8 psi/W of 16 psi; at most a gradient waits
    label = page.evaluate("document.querySelector('[role=img]').ariaLabel")
    assert label == "0, 1, 1 (old, or of no use any more), 3 (old, or of no use any more)", label


@pytest.mark.parametrize("name", sampled("zero3 3"))
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
    n_elements = len(record_step.SAMPLES[int(W)][0])
    rows = [shown[i:i + UNITS * n_elements] for i in range(0, len(shown), UNITS * n_elements)]
    weights = [values[:n_elements] for values in record_step.WEIGHTS]
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


@pytest.mark.parametrize("name", sampled("zero2 2"))
def test_page_opens_at_events(page, name):
    """Each event has an address, by name. Another mode opens at the same moment."""
    mode, W = name.split()
    events = runs_of_page()[name]
    names = names_of(events)
    assert len(set(names)) == len(names)
    open_page(page, f"mode={mode}&ranks={W}&event={names[-1]}")
    titles = page.evaluate("""async names => {
        const titles = [];
        const words = new URLSearchParams(location.hash.slice(1));
        for (const name of names) {
            const changed = new Promise(end => addEventListener('hashchange', end, { once: true }));
            words.set('event', name);
            location.hash = words;
            await changed;
            titles.push(document.querySelector('#events h2').textContent);
        }
        return titles;
    }""", names)
    n = len(events)
    assert titles == [f"{event['what']}{i} of {n}" for i, event in enumerate(events, 1)]
    assert "event=zero_grad" in page.url
    open_page(page, f"mode={mode}&ranks={W}&event=backward-blocks.1")
    for other in MODES:
        page.click(f"#modes [data-mode={other}]")
        assert titles_of(page)[0].startswith("backward: blocks.1")
    page.click("#ranks [data-ranks='3']")
    assert page.locator("caption").count() == 3
    assert "mode=zero3" in page.url and "ranks=3" in page.url


def moments_of(events):
    """For each event how many have come, up to it, of those that all modes have in common."""
    actual = []
    n = 0
    for event in events:
        n += event["what"].split(":")[0] in ("forward", "loss", "backward", "update", "zero_grad")
        actual.append(n)
    return actual


def test_page_shows_two(page):
    """Two modes side by side: both play to their ends, and each says what it does."""
    open_page(page, "mode=ddp&ranks=2&beside=zero3")
    assert page.locator(".stage").count() == 2
    all_moments = [moments_of(runs_of_page()[name]) for name in ("ddp 2", "zero3 2")]
    seen = [set(), set()]
    for _ in range(len(all_moments[0]) + len(all_moments[1])):
        now = []
        for seen_of_mode, moments, title in zip(seen, all_moments, titles_of(page)):
            number = int(re.search(r", (\d+) of", title)[1])
            seen_of_mode.add(number)
            now.append(moments[number - 1])
        assert now[0] == now[1], titles_of(page)
        page.keyboard.press("ArrowRight")
    assert [len(numbers) for numbers in seen] == [len(moments) for moments in all_moments]
    assert all(title.startswith("zero_grad") for title in titles_of(page)), titles_of(page)
    page.select_option("#beside", "")
    assert page.locator(".stage").count() == 1 and "beside" not in page.url


def test_page_is_for_everyone(page):
    """Keys, 400 pixels, dark colours, names for what is not text, and a still without controls."""
    open_page(page, "mode=zero3&ranks=3&event=backward-blocks.1")
    page.keyboard.press("End")
    assert titles_of(page)[0].startswith("zero_grad")
    page.keyboard.press("Home")
    assert titles_of(page)[0].startswith("begin")
    page.focus("#slider")
    page.keyboard.press("ArrowRight")
    assert re.search(r"2 of \d+$", titles_of(page)[0])
    page.focus("#back")
    page.keyboard.press("Enter")
    assert titles_of(page)[0].startswith("begin")
    page.keyboard.press("ArrowLeft")
    assert titles_of(page)[0].startswith("begin")
    names = page.evaluate("""[...document.querySelectorAll(
        'button, select, input, [role=img], [role=group]')].map(element => element.ariaLabel
        || element.textContent || element.labels?.[0]?.textContent)""")
    assert len(names) > 60 and all(names), names
    labels = page.evaluate("[...document.querySelectorAll('[role=img]')].map(c => c.ariaLabel)")
    assert labels[0] == "1, no memory, no memory", labels[0]
    page.set_viewport_size(dict(width=400, height=800))
    for address in ("mode=zero3&ranks=2&beside=ddp", "mode=zero2&ranks=3", "tab=memory"):
        open_page(page, address)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, address
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    open_page(page, "mode=zero3&ranks=2&event=update&still=1")
    assert not page.locator("#slider").is_visible() and page.locator(".stage").is_visible()
    assert "still=1" in page.url
    open_page(page, "mode=zero9&ranks=7&event=nothing")
    assert titles_of(page) == ["begin1 of 25"]


# What the memory curve shows, in one call: of a line its rank and points, of a grey one its bytes
# and height, of what marks the event and the peaks where they are; and the texts at the peaks.
CURVE = """() => {
    const all = (selector, read) => [...document.querySelectorAll(`#curve ${selector}`)].map(read);
    const number = (element, name) => +element.getAttribute(name);
    const points = text => {
        const points = [];
        let [x, y] = [0, 0];
        const parts = text.matchAll(/([MHV])([\\d.]+)(?: ([\\d.]+))?/g);
        for (const [, letter, first, second] of parts) {
            x = letter === 'V' ? x : +first;
            y = letter === 'H' ? y : +(second ?? first);
            points.push([letter, x, y]);
        }
        return points;
    };
    return {
        lines: all('[data-rank]', line => [+line.dataset.rank, points(line.getAttribute('d'))]),
        grid: all('.grid', line => [+line.dataset.bytes, points(line.getAttribute('d'))[0][2]]),
        at: all('.at', line => points(line.getAttribute('d'))[0][1]),
        dots: all('.dot', dot => [number(dot, 'cx'), number(dot, 'cy')]),
        peaks: all('.peak', dot => [number(dot, 'cx'), number(dot, 'cy')]),
        texts: all('.most', text => text.textContent),
    };
}"""


def bytes_of_line(points, to_bytes):
    """What a line shows at each event: it goes to an event, and then up or down."""
    actual = []
    for letter, _, y in points:
        if letter in "MV":
            actual.append(round(to_bytes(y)))
    return actual


@pytest.mark.parametrize("name", sampled("ddp 2", "zero3 3"))
def test_page_draws_memory(page, name):
    """The curve of each rank has the record's bytes at each event; the largest ones are marked, and
    said; the mark of the event stands at it, on the curve."""
    mode, W = name.split()
    open_page(page, f"mode={mode}&ranks={W}")
    events = runs_of_page()[name]
    shown = page.evaluate(CURVE)
    (zero, y_0), (full, y_full) = shown["grid"]
    assert [zero, full] == [0, 16 * UNITS * len(record_step.SAMPLES[int(W)][0])]

    def to_bytes(y):
        return full * (y_0 - y) / (y_0 - y_full)

    assert [rank for rank, _ in shown["lines"]] == [*range(int(W))]
    for rank, points in shown["lines"]:
        held = [event["held"][rank] for event in events]
        assert bytes_of_line(points, to_bytes) == held, f"rank {rank}"
    most = max(events[i]["held"][0] for i in range(len(events)))
    first = [event["held"][0] for event in events].index(most)
    _, points = shown["lines"][0]
    places = [x for letter, x, _ in points if letter in "MV"]
    [[x, y]], [text] = shown["peaks"], shown["texts"]  # all ranks have the same
    assert x == places[first] and round(to_bytes(y)) == most
    assert text == f"{'both' if W == '2' else 'all'} ranks: at most {most}"
    for i in (0, 5, len(events) - 1):
        page.evaluate("i => go(i)", i)
        shown = page.evaluate(CURVE)
        assert shown["at"] == [places[i]]
        assert [[x, round(to_bytes(y))] for x, y in shown["dots"]] == [
            [places[i], events[i]["held"][0]]]


def test_page_goes_where_the_curve_is_clicked(page):
    """And where its keys lead. Another mode's curve is beside it, and it can be put away."""
    open_page(page, "mode=zero3&ranks=2")
    n = len(runs_of_page()["zero3 2"])
    box = page.locator("#curve").bounding_box()
    thumb = 8  # of the slider below it
    for i in (0, 7, n - 1):
        x = box["x"] + thumb + i * (box["width"] - 2 * thumb) / (n - 1)
        page.mouse.click(x, box["y"] + 60)
        assert titles_of(page)[0].endswith(f"{i + 1} of {n}")
        assert page.evaluate(CURVE)["at"][0] + box["x"] == pytest.approx(x, abs=0.5)
    page.focus("#curve")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert titles_of(page)[0].endswith(f"2 of {n}")
    page.keyboard.press("Enter")
    assert "232 bytes (most so far 232)" in texts_of(page, "caption")[0]
    label, value = page.locator("#curve").evaluate("e => [e.ariaLabel, e.ariaValueText]")
    assert "both ranks: at most 232, at event 45, gradient: the root" in label, label
    assert value == "gradient: the root: 232, 232 bytes", value
    page.select_option("#beside", "ddp")
    shown = page.evaluate(CURVE)
    assert shown["texts"] == ["Zero3, both ranks: at most 232", "DDP, both ranks: at most 352"]
    assert len(shown["lines"]) == 4
    page.click("#curve-switch")
    assert not page.locator("#curve").is_visible() and "curve=0" in page.url
    open_page(page, "mode=zero3&ranks=2&curve=0")
    assert not page.locator("#curve").is_visible() and page.locator("#slider").is_visible()
    page.click("#curve-switch")
    assert page.locator("#curve").is_visible() and "curve" not in page.url


@pytest.mark.parametrize("name", sampled("zero1 3", "zero3 3"))
def test_page_has_room_for_cells(page, name):
    """In a window of 1200 x 900 pixels all cells are above the panel at each event, also where
    the page opens, or shows an answer. Where they cannot be, the panel hides what is behind it.
    In a window that is lower than that it is below them."""
    page.set_viewport_size(dict(width=1200, height=900))
    mode, W = name.split()
    open_page(page, f"mode={mode}&ranks={W}")
    hidden = page.evaluate("""() => steps.filter((events, i) => {
        go(i);
        const { bottom } = document.getElementById('panel').getBoundingClientRect();
        const hides = hidesCells() || bottom > 900;
        if (i > 0) {
            showAnswers(i);
        }
        return hides || hidesCells();
    }).map(events => events[0].what)""")
    assert hidden == []
    page.set_viewport_size(dict(width=1200, height=600))
    [covered, seen] = page.evaluate("""() => {
        const panel = document.getElementById('panel');
        const sides = panel.getBoundingClientRect();
        let [covered, seen] = [0, 0];
        const all = document.querySelectorAll('.stage :is(.cell, caption b, thead th)');
        for (const element of all) {
            const { left, right, top, bottom } = element.getBoundingClientRect();
            const [x, y] = [(left + right) / 2, (top + bottom) / 2];
            if (y > sides.top && y < Math.min(sides.bottom, innerHeight)) {
                covered++;
                seen += !panel.contains(document.elementFromPoint(x, y));
            }
        }
        return [covered, seen];
    }""")
    assert covered > 20 and seen == 0, f"{seen} of {covered} are in front of the panel"
    colour = page.evaluate("getComputedStyle(document.getElementById('panel')).backgroundColor")
    assert colour.startswith("rgb("), f"{colour} is not opaque"
    page.set_viewport_size(dict(width=640, height=400))  # as a window of 1280 x 800 at 200 %
    assert not page.evaluate("hidesCells()"), "the panel does not stay in front"


@pytest.mark.parametrize("name", sampled("zero1 2", "zero3 3"))
def test_page_asks_before_it_shows(page, name):
    """Where the page is to ask, it does so before each event that changes what a rank holds, or
    sends, and before no other. What it shows meanwhile is the event before, without the answer.
    The next key shows the event, with the record's numbers as an answer."""
    mode, W = name.split()
    events = runs_of_page()[name]
    open_page(page, f"mode={mode}&ranks={W}&predict=1")
    asked = """() => [document.querySelectorAll('#reveal').length,
        document.getElementById('events').textContent,
        document.querySelector('caption').textContent,
        +document.getElementById('slider').value]"""
    for i, event in enumerate(events[1:], 1):
        n_before = sent_by_ranks(events[:i], int(W))
        n_sent = [now - before for now, before in
                  zip(sent_by_ranks(events[:i + 1], int(W)), n_before)]
        rank = i % int(W)
        _, _, caption, _ = page.evaluate(asked)
        page.keyboard.press("ArrowRight")
        is_asked, text, caption_now, at = page.evaluate(asked)
        assert is_asked == bool("set" in event or "starts" in event), event
        if is_asked:
            assert f"Next comes {event['what']}" in text and caption_now == caption and at == i - 1
            page.keyboard.press("ArrowRight")
            has_question, text_then, _, at = page.evaluate(asked)
            assert not has_question and len(text_then) > len(text), text_then
            text = text_then
        assert at == i
        sends = f"How many elements will rank {rank} send? {n_sent[rank]}, which"
        assert (sends in text) == ("starts" in event), text
        held = [events[k]["held"][rank] for k in (i - 1, i)]
        bytes_held = f"will rank {rank} hold after this? Now it is {held[0]}. {held[1]} bytes."
        assert (bytes_held in text) == (held[0] != held[1]), text


def test_page_hides_answers(page):
    """By default nothing is asked. Where it is, the answer is nowhere on the page before the reader
    wants it, by the button or a key; and the question has an address."""
    open_page(page, "mode=zero2&ranks=2&event=gradient-blocks.2")
    page.keyboard.press("ArrowRight")
    assert titles_of(page)[0].startswith("wait: reduce") and "predict" not in page.url
    page.click("#back")
    page.click("#predict-switch")
    assert "predict=1" in page.url and page.locator("#predict-switch").get_attribute(
        "aria-pressed") == "true"
    page.click("#next")
    question = "What will rank 0 hold of the gradients of block 3 after this?"
    answer = "All 4 numbers (2: mean gradients over all ranks; 2: numbers that are old"
    assert question in texts_of(page, ".asked")[0] and answer not in page.content()
    assert "event=gradient-blocks.2" in page.url and "asks=1" in page.url
    address = page.url.split("#")[1]
    open_page(page, address)
    assert question in texts_of(page, ".asked")[0] and answer not in page.content()
    assert texts_of(page, "#curve .most") == []  # the peak comes later
    page.focus("#reveal")
    page.keyboard.press("Enter")
    assert texts_of(page, ".answers")[0].startswith(f"{question} {answer}")
    assert len(texts_of(page, "#curve .most")) == 1
    assert page.evaluate("document.activeElement.id") == "next"
    assert titles_of(page)[0].startswith("wait: reduce") and "asks" not in page.url
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert texts_of(page, ".asked") == []
    page.keyboard.press("Space")  # playing stops at a question
    page.wait_for_selector("#reveal", timeout=60_000)
    assert texts_of(page, "#play") == ["play"]
    open_page(page, "mode=zero3&ranks=2&beside=ddp&predict=1&event=backward-blocks.3&asks=1")
    [text] = texts_of(page, ".asked")
    assert "Zero3, What will" in text and "DDP, What will" in text, text
    open_page(page, "mode=zero2&ranks=2&event=begin&asks=1")  # nobody wants to be asked
    assert "event=begin" in page.url and texts_of(page, ".asked") == []


# Of the step in time: of each mode that is shown its bars, [class, begin, end], texts of its ranks,
# and where the event stands, in parts of the width.
LANES = """() => [...document.querySelectorAll('.lanes')].map(svg => {
    const all = (selector, read) => [...svg.querySelectorAll(selector)].map(read);
    return {
        bars: all('[data-begin]', ({ classList, dataset }) =>
            [classList[0], +dataset.begin, +dataset.end]),
        widths: all('[data-begin]', bar => +bar.getAttribute('width')),
        texts: all('.name', text => text.textContent),
        at: all('.at', line => +line.getAttribute('d').match(/M([\\d.]+)/)[1]),
        label: svg.ariaLabel,
    };
})"""


def replayed(of_mode, rate, recorded_rate):
    """(times of marks, arrivals) of both ranks at a rate: computing takes as long as it did; a
    message takes n / rate, after those before it, and what it took beyond that, which is smaller in
    proportion on a faster link."""
    def ideal(starts, rate):
        ends = [0]
        for start, n_bytes in zip(starts, of_mode["bytes"]):
            ends.append(max(start, ends[-1]) + 8 * n_bytes / (1e3 * rate))
        return ends[1:]

    marks, was, had_arrived = of_mode["marks"], of_mode["times"], of_mode["arrived"]
    both = [*zip(*was)]
    on_link = ideal([max(both[i]) for i, mark in enumerate(marks) if mark == "s"], recorded_rate)
    moments, arrived, starts = [[], []], [[], []], []
    for i, mark in enumerate(marks):
        for rank in range(2):
            now = moments[rank][-1] if i else 0
            took = was[rank][i] - (was[rank][i - 1] if i else 0)
            if mark[0] == "d":
                number = int(mark[1:]) - 1
                now = max(now, arrived[rank][number])
                took = was[rank][i] - max(was[rank][i - 1], had_arrived[rank][number])
            moments[rank].append(now + took)
        if mark == "s":
            starts.append(max(moments[0][i], moments[1][i]))
            k = len(starts) - 1
            for rank in range(2):
                later = (had_arrived[rank][k] - on_link[k]) * min(1, recorded_rate / rate)
                arrived[rank].append(max(starts[k], ideal(starts, rate)[k] + later))
    return moments, arrived


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rate", [None, 200, 5000])
def test_page_shows_times(page, mode, rate):
    """At the recorded rate what was recorded, and at others what the formula gives: each wait in
    red, each message from its start until it has arrived; and what is exposed, in ms."""
    times = times_of_page()
    of_mode = times["runs"][mode]
    open_page(page, f"mode={mode}&tab=time" + (f"&rate={rate}" if rate else ""))
    moments, arrived = of_mode["times"], of_mode["arrived"]
    if rate:
        moments, arrived = replayed(of_mode, rate, times["rate"])
    [shown] = page.evaluate(LANES)
    waits, sends, computes = [], [], 0
    texts = []
    for rank in range(2):
        exposed = 0
        starts = [i for i, mark in enumerate(of_mode["marks"]) if mark == "s"]
        sends += zip([moments[rank][i] for i in starts], arrived[rank])
        for i, mark in enumerate(of_mode["marks"]):
            if mark[0] == "d":
                begin = moments[rank][i - 1]
                end = max(begin, arrived[rank][int(mark[1:]) - 1])
                waits.append((begin, end))
                exposed += end - begin
        computes += moments[rank][-1] - exposed
        texts.append((moments[rank][-1], exposed))

    def close(pairs):
        return [pytest.approx(pair, abs=1e-3) for pair in pairs]

    of_kind = {}
    for kind, *ends in shown["bars"]:
        of_kind.setdefault(kind, []).append(tuple(ends))
    assert of_kind["waits"] == close(waits)
    of_messages = [tuple(ends) for kind, *ends in shown["bars"] if kind in
                   ("parameters", "gradients")]
    assert of_messages == close(sends)
    computed = sum(end - begin for kind in ("forward", "backward", "update")
                   for begin, end in of_kind[kind])
    assert computed == pytest.approx(computes, abs=0.1)
    for text, numbers in zip(shown["texts"], texts, strict=True):
        actual = re.search(r": ([\d.]+) ms, ([\d.]+) ms exposed", text)
        assert [float(actual[1]), float(actual[2])] == pytest.approx(numbers, abs=0.6), text
    note = texts_of(page, "#rate-note")[0]
    assert ("as it was recorded" in note) == (rate is None), note
    assert ("and not recorded" in note and "n / rate" in note) == (rate is not None), note
    row = texts_of(page, f"#costs tbody tr:nth-child({MODES.index(mode) + 1}) td")
    slowest = max(texts)
    assert [float(row[0]), float(row[2])] == pytest.approx(slowest, abs=0.6), row


def test_page_moves_in_time(page):
    """By a click, by keys, by the slider of the rate; there are two ranks, and there may be two
    modes; an address says all of it."""
    open_page(page, "mode=zero3&ranks=3&tab=time&event=loss")
    assert titles_of(page)[0].startswith("loss") and "ranks=2" in page.url
    assert page.locator("#ranks [data-ranks='3']").is_disabled()
    [shown] = page.evaluate(LANES)
    assert re.match(r"Zero3 in time: rank 0 takes \d+ ms, of which it waits [\d.]+ ms; rank 1",
                    shown["label"])
    of_mode = times_of_page()["runs"]["zero3"]
    places = [i for i, mark in enumerate(of_mode["marks"]) if mark == "e"]
    names = names_of(runs_of_page()["zero3 2"])
    scale = shown["at"][0] / of_mode["times"][0][places[names.index("loss")]]
    box = page.locator(".lanes").bounding_box()
    for rank, name in ((0, "forward-blocks.3"), (1, "update")):
        ms = of_mode["times"][rank][places[names.index(name)]]
        page.mouse.click(box["x"] + scale * ms, box["y"] + 25 + 60 * rank)
        # Another event may come in the same half of a ms.
        assert page.evaluate(LANES)[0]["at"][rank] == pytest.approx(scale * ms, abs=2)
        assert "event=loss" not in page.url
    page.keyboard.press("End")
    end = f"zero_grad: at {of_mode['times'][0][-1]:.0f} ms on rank 0, "
    assert end in texts_of(page, "#moment")[0], texts_of(page, "#moment")
    page.focus(".lanes")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert titles_of(page)[0].startswith("wait: unshard the root")
    page.focus("#rate")
    page.keyboard.press("ArrowRight")
    assert "rate=1500" in page.url and texts_of(page, "#rate-now") == ["1.5 Gbit/s"]
    assert page.locator("#rate").get_attribute("aria-valuetext") == "1.5 Gbit/s"
    page.keyboard.press("End")
    assert "rate=100000" in page.url
    assert titles_of(page)[0].startswith("wait: unshard the root")
    page.select_option("#beside", "ddp")
    assert page.locator(".lanes").count() == 2
    page.click("#tab-step")
    assert "rate" not in page.url and "tab" not in page.url
    assert page.locator(".stage").first.is_visible() and not page.locator("#times").is_visible()
    page.set_viewport_size(dict(width=400, height=800))
    open_page(page, "mode=zero1&tab=time&beside=zero3&event=loss")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    box = page.locator(".lanes").first.bounding_box()
    panel = page.locator("#panel").bounding_box()
    assert box["y"] + box["height"] < panel["y"], "the panel hides the lanes"


PARTS = dict(fp32=(4, 4), bf16=(2, 2))  # bytes of param_dtype and reduce_dtype


@pytest.mark.parametrize("dtypes", [*PARTS, "paper"])
def test_page_has_verifys_formulas(page, dtypes):
    """Bytes that a rank holds, and elements that it sends."""
    open_page(page, "tab=memory")
    page.select_option("#in-dtypes", dtypes)
    for psi, W, n, blocks in ((7e9, 8, 1, 32), (124e6, 3, 4, 12), (1e3, 1, 2, 1)):
        for key, value in dict(psi=psi, W=W, n=n, blocks=blocks).items():
            page.fill(f"#in-{key}", f"{value:g}")
        for mode in MODES:
            section = page.locator(f"#answers [data-mode={mode}]")
            actual = json.loads(section.evaluate("e => JSON.stringify(e.dataset)"))
            if dtypes == "paper":
                whole = dict(ddp=16, zero1=4, zero2=2, zero3=0)[mode]
                held = (whole + (16 - whole) / W) * psi
            else:
                held = sum(formula_of_bytes(mode, W, *PARTS[dtypes])) * psi
            if dtypes != "fp32" and mode == "ddp":
                held = 16 * psi
            two_blocks = min(2 / blocks, 1)
            gathered = two_blocks * psi * (4 if dtypes == "fp32" else 2) if mode == "zero3" else 0
            sent = formula_of_traffic(mode, n, two_blocks) * (W - 1) / W * psi
            for key, expected in dict(held=held, gathered=gathered, sent=sent).items():
                assert float(actual[key]) == pytest.approx(expected), f"{mode} {key} {actual}"
    page.fill("#in-psi", "7e9")
    page.fill("#in-W", "8")
    shown = page.locator("#answers h2 span:last-child").all_text_contents()
    expected = {"fp32": "112 63 38.5 14", "bf16": "112 28 28 14", "paper": "112 38.5 26.25 14"}
    assert " ".join(shown).replace(" GB", "") == expected[dtypes], shown


def test_page_computes_what_is_typed(page):
    """The text of an answer, its bar, and what is said of what is no number."""
    open_page(page, "tab=memory")
    page.fill("#in-psi", "7,000M")
    [holds, sends] = texts_of(page, "#answers [data-mode=zero2] p")
    assert holds == "4 Psi + 12 Psi/W: parameters 28 GB, gradients 3.5 GB, Adam 7 GB."
    assert sends.startswith("Sends 12.25 billion elements in a step, 49 GB: (n + 1) (W-1)/W Psi in")
    [holds, _] = texts_of(page, "#answers [data-mode=zero3] p")
    assert "16 Psi/W" in holds and "two of the blocks are whole: 1.75 GB more" in holds
    widths = page.evaluate("""[...document.querySelectorAll('[data-mode=zero1] .stack i')].map(
        piece => parseFloat(piece.style.width))""")
    assert widths == [25, 25, 6.25, 0], widths
    for key, text in dict(psi="a lot", W="2.5", n="0", blocks="").items():
        before = page.input_value(f"#in-{key}")
        page.fill(f"#in-{key}", text)
        assert page.locator("#answers").text_content().endswith(f'not "{text}".')
        page.fill(f"#in-{key}", before)
    assert page.locator("#answers h2").count() == 4
