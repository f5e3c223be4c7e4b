"""The page in a real browser: every tab, the filters, the zoom, the difference, and not a word on the console."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tarry.reports.page import page
from tarry.reports.reading import read
from tests.reports.browser import EXECUTABLE, MISSING, Browser
from tests.reports.lines import end, event, graph, layers, stage, sync, write
from tests.reports.test_page import hostile_run

pytestmark = [pytest.mark.process, pytest.mark.skipif(EXECUTABLE is None, reason=MISSING)]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.problems.clear()
    chromium.size(1280, 900)
    yield chromium
    assert chromium.problems == []


def _lines(steps: int = 40, nodes: int = 4) -> list[dict[str, Any]]:
    """A run with a bit of everything."""
    lines = [sync(0.1 + 0.01 * k, 0.009, "reference" if k < 5 else "compiled") for k in range(steps)]
    last = 0.1 + 0.01 * steps
    here = {"file": __file__, "line": 30}
    lines += [event("read", 0.1 + 0.1 * k, seconds=0.05, method="item", **here) for k in range(4)]
    lines.append(
        event(
            "fallback", last, seconds=0.01, op="aten::nonzero", reason="its result depends on data", file="b.py", line=4
        )
    )
    lines.append(event("compile", 0.1, seconds=0.1, operations=9, lines=["a.py:1", "a.py:9"]))
    larger = layers(nodes)
    larger.insert(2, ("aten::inserted", [0], "model", "/home/me/model.py:77"))
    return [
        *lines,
        graph("aa", operators=len(larger) - 1),
        stage("aa", layers(nodes)),
        stage("aa", layers(nodes), of="lowered"),
        {"kind": "program", "graph": "aa", "text": "def call():\n    pass"},
        graph("bb", "input f32[7] is f32[8] now (a.py:1)", operators=len(larger), origin="stored", background=True),
        stage("bb", larger),
        end(last),
    ]


def _open(browser: Browser, tmp_path: Path, *files: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page([read(file) for file in files]), encoding="utf-8")
    browser.open(path)


def _text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


def _visit_all(browser: Browser) -> None:
    """Open every tab, and every view of the graph that is open, in light and dark, wide and narrow."""
    for width, dark in ((1280, False), (800, True)):
        browser.size(width, 900, dark)
        for tab in browser.evaluate("[...document.querySelectorAll('#tabs button')].map(e => e.dataset.tab)"):
            browser.click(f'[data-tab="{tab}"]')
            assert browser.evaluate("document.querySelector('#main').dataset.tab") == tab
            assert browser.evaluate("document.querySelector('#main').innerText.length") > 15
            if tab == "Graphs":
                browser.wait_for(
                    "document.querySelector('#graph [data-view]') || !document.querySelector('tr[data-graph]')"
                )
                for k in range(browser.evaluate("document.querySelectorAll('#graph button[data-view]').length")):
                    browser.evaluate(f"document.querySelectorAll('#graph button[data-view]')[{k}].click()")
            browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{tab} is too wide at {width}"
            )


def test_every_tab_and_view_of_a_run(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    _visit_all(browser)


def test_the_verdict_stands_on_top(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    assert "warm" in _text(browser, "#verdict")
    advice = _text(browser, "#advice")
    assert ".item() waits for a value" in advice
    assert "read less" in advice
    browser.wait_for("document.querySelector('[data-plot=steps] canvas')")
    assert browser.evaluate("document.querySelector('[data-plot=steps]').dataset.points") == "40"


def test_a_place_shows_its_source(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    browser.click("#advice .place")
    assert Path(__file__).read_text().splitlines()[29] in _text(browser, "#source .here")
    browser.evaluate("dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.evaluate("document.querySelector('#source').hidden")


def test_the_timeline_zooms_and_moves(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    browser.click('[data-tab="Timeline"]')
    browser.wait_for("Number(document.querySelector('canvas.timeline').dataset.drawn) > 40")

    def view() -> tuple[int, int]:
        found = browser.evaluate(
            "(({from, to}) => [Number(from), Number(to)])(document.querySelector('canvas.timeline').dataset)"
        )
        return found[0], found[1]

    whole = view()
    browser.click('[data-act="Zoom in"]')
    closer = view()
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=0.05)
    canvas = "document.querySelector('canvas.timeline')"
    browser.evaluate(f"{canvas}.dispatchEvent(new WheelEvent('wheel', {{deltaY: -500, cancelable: true}}))")
    assert view()[1] - view()[0] < closer[1] - closer[0]
    browser.evaluate(
        "document.querySelector('canvas.timeline').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}))"
    )
    browser.choose('[aria-label="Go to step"]', "20")
    assert view()[0] <= 290_000 <= view()[1]
    browser.click('[data-act="All"]')
    assert view() == pytest.approx(whole, abs=5_000)


def test_the_trace_is_one_that_chrome_reads(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    trace = browser.evaluate("chromeTrace(state.data.runs)")
    complete = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert {each["name"] for each in complete} == {"record", "reference", "execute", "compile", "read", "fallback"}
    assert all(each["dur"] >= 0 and each["ts"] >= 0 and isinstance(each["tid"], int) for each in complete)
    browser.evaluate("HTMLAnchorElement.prototype.click = () => {}")
    browser.evaluate("URL.createObjectURL = (blob) => { window.saved = blob; return 'blob:null/x'; }")
    browser.click('[data-tab="Timeline"]')
    browser.click('[data-act="Export trace"]')
    assert browser.evaluate("window.saved.text().then(text => JSON.parse(text).traceEvents.length)") == len(
        trace["traceEvents"]
    )


def test_graphs_are_filtered_and_opened(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    browser.click('[data-tab="Graphs"]')
    browser.wait_for("document.querySelectorAll('#graph .row').length")
    assert browser.evaluate("document.querySelectorAll('tr[data-graph]').length") == 2
    browser.type("#main input[type=search]", "F32[7]")
    browser.wait_for("document.querySelectorAll('tr[data-graph]').length === 1")
    assert "from disk, background" in _text(browser, "tr[data-graph]")
    browser.type("#graph input[type=search]", "inserted")
    browser.wait_for("document.querySelectorAll('#text .row').length === 1")
    assert "model.py:77" in _text(browser, "#text .row")


def test_the_difference_of_two_graphs(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    browser.click('[data-tab="Graphs"]')
    browser.wait_for("document.querySelector('[data-view=Difference]')")
    browser.click("[data-view=Difference]")
    browser.wait_for("document.querySelectorAll('#difference .added').length === 1")
    assert "aten::inserted" in _text(browser, "#difference .added")
    assert browser.evaluate("document.querySelectorAll('#difference .removed').length") == 0
    assert "equal lines" in _text(browser, "#difference .gap")


def test_the_picture_folds_layers_and_opens_them(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines(nodes=12)))
    browser.click('[data-tab="Graphs"]')
    browser.wait_for("document.querySelector('[data-graph=aa]')")
    browser.click("[data-graph=aa]")
    browser.wait_for("document.querySelector('#graph h2')?.textContent.startsWith('Graph aa')")
    browser.click("[data-view=Picture]")
    assert browser.wait_for("document.querySelectorAll('#picture [data-box=\"0-11: 12 alike\"]').length") == 2
    before = browser.evaluate("Number(document.querySelector('#picture').dataset.boxes)")
    browser.click('#picture [data-box="0-11: 12 alike"]')
    browser.wait_for(f"Number(document.querySelector('#picture').dataset.boxes) === {before + 11}")


def test_costs_and_events_are_filtered(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    browser.click('[data-tab="Costs"]')
    groups = "[...document.querySelectorAll('[data-group]')].map(e => e.dataset.group)"
    assert browser.evaluate(groups) == ["reads", "fallbacks", "compiles"]
    browser.type("#main input[type=search]", "nonzero")
    browser.wait_for(f"({groups}).length === 1")
    browser.click('[data-tab="Events"]')
    browser.type("#main input[type=search]", "nonzero")
    browser.wait_for("document.querySelectorAll('#events .row').length === 1")


def test_memory_shows_what_is_alive_at_the_peak(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines()))
    browser.click('[data-tab="Memory"]')
    browser.wait_for("document.querySelector('#alive tbody tr') && document.querySelector('[data-plot=memory] canvas')")
    assert "input f32[1]" in _text(browser, "#alive")
    assert "model.py:" in _text(browser, "#alive")


def test_two_runs_and_ranks(browser: Browser, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{k}.json", _lines(40 + k)) for k in range(2)]
    _open(browser, tmp_path, *files)
    assert "Figures" in _text(browser, "#compare")
    _visit_all(browser)
    files = [write(tmp_path / f"{k}.json", _lines(40 + k), rank=k, world_size=3) for k in range(3)]
    _open(browser, tmp_path, *files)
    assert "rank 2" in _text(browser, "#compare")
    _visit_all(browser)
    browser.choose("#head select", "2")
    assert browser.evaluate("state.run.name") == "rank 2"


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, hostile_run(tmp_path / "a.json"))
    browser.evaluate("window.alert = () => { throw new Error('a script of the program ran'); }")
    _visit_all(browser)
    browser.click('[data-tab="Overview"]')
    browser.click("#main .place")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert "onerror=alert(1)" in _text(browser, "#advice")


def test_a_run_without_anything(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", []))
    _visit_all(browser)


@pytest.mark.slow
def test_a_large_graph_and_a_long_run_stay_usable(browser: Browser, tmp_path: Path) -> None:
    _open(browser, tmp_path, write(tmp_path / "a.json", _lines(10_000, nodes=3_333)))
    _visit_all(browser)
    browser.click('[data-tab="Graphs"]')
    browser.wait_for("document.querySelector('#text')")
    assert browser.evaluate("document.querySelectorAll('#text .row').length") < 100  # of 20,000
    browser.evaluate("document.querySelector('#text').scrollTop = 1e9")
    browser.wait_for("[...document.querySelectorAll('#text .row')].some(e => e.textContent.includes('_foreach_add_'))")
    browser.click('[data-tab="Timeline"]')
    browser.wait_for("Number(document.querySelector('canvas.timeline').dataset.drawn) > 100")
    assert browser.evaluate("Number(document.querySelector('canvas.timeline').dataset.drawn)") < 15_000
