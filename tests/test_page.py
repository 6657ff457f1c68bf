"""The report's page: what is written, and, in a real browser, what one sees, clicks and copies, in silence."""

import base64
import copy
import io
import re
import shutil
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from equipoise.report.figures import draw, encode_matrix, plt, render_svg
from equipoise.report.page import render_page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver here")

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='hacked=1'> <!-- & \"q\" 'q' [0] {{js}} ]]> \\u003c"
)


def cell(column, ours, paper, state="close", **more):
    difference = None if ours is None or paper is None else ours - paper
    empty = {"std": None, "seeds": 1, "why": None, "command": f"equipoise run --cell {column}", "runs": ["a/run 0"]}
    empty["source"] = "paper"
    return {"column": column, "ours": ours, "paper": paper, "difference": difference, "state": state, **empty, **more}


def a_run(i, classes=6):
    counts = np.random.default_rng(i).integers(0, 4, (classes, classes)) * 3
    counts[1, 2], counts[2, 1], counts[3, 3] = 127 + i, 128, 20_000
    steps = [
        {
            "step": t,
            "classes": 2 + 2 * t,
            "top1": 90.5 - 10 * t - i,
            "top5": 99.0,
            "base": 80.0,
            "new": 70.0 if t else None,
        }
        | {"latest": 75.0, "seconds": 1.5, "alpha": None}
        for t in range(classes // 2)
    ]
    return {
        "id": f"a/run {i}",
        "title": f"Method {'odd' if i % 2 else 'even'}, seed {i}",
        "command": f"equipoise run il-baseline --seed {i} --remedy balanced",
        "average": 60.0 + i,
        "final": 50.0,
        "base": 55.0,
        "new": 45.0,
        "settings": {"method.remedy.name": "balanced", "seed": str(i)},
        "steps": steps,
        "confusion": counts.tolist(),
        "hardware": "a GPU",
        "versions": "torch 2",
        "seconds": 4.5,
        "reused": None,
    }


def bare_run():
    """Without anything that a record need not have."""
    nothing = dict.fromkeys(("command", "base", "new", "seconds", "reused"))
    return {**a_run(0), **nothing, "versions": "", "settings": {}, "steps": a_run(0)["steps"][:1]}


def panel(name, run):
    result = {"run": {"protocol": {"base": 2}}, "class_order": range(6), "final": {"top1": 50.0}}
    return {"name": name, "result": {**result, "confusion": run["confusion"]}}


def sample():
    """A bit of everything: all states of a cell, all scales of an axis, values that are missing; figures as data."""
    columns = [
        {"id": "c5", "group": "CIFAR", "title": "5 steps"},
        {"id": "i5", "group": "ImageNet", "title": "5 steps"},
    ]
    needs = {"ours": None, "state": "needs data", "why": "needs imagenet"}
    rows = [
        ("B-low", False, [cell("c5", 40.25, 40.0), cell("i5", paper=50.0, **needs)]),
        ("C-high", False, [cell("c5", 62.5, 61.0, "near", std=0.31, seeds=3), cell("i5", paper=70.0, **needs)]),
        ("A-missing", False, [cell("c5", None, 99.0, "missing"), cell("i5", None, None, "none")]),
        ("D-middle", False, [cell("c5", 50.0, 55.0, "off", why="measured otherwise"), cell("i5", paper=60.0, **needs)]),
        ("Q1", True, [cell("c5", None, 45.0, "quoted", command=None, runs=[]), cell("i5", None, None, "none")]),
        ("Q2", True, [cell("c5", None, 80.0, "quoted", command=None, runs=[]), cell("i5", None, None, "none")]),
    ]
    names = [{"name": name, "quoted": quoted, "elsewhere": "", "cells": cells} for name, quoted, cells in rows]
    table = {"title": "Table 1", "caption": "What.", "names": "method", "columns": columns, "rows": names}
    line = {"spread": None, "dashed": False, "group": 0}
    lines = {
        "kind": "lines",
        "caption": "…",
        "series": [
            {**line, "name": "first", "x": [10, 20, 30], "y": [80.0, 70.5, 60.0], "spread": [1.0, 2.25, 3.0]},
            {**line, "name": "second", "x": [10, 20, 30], "y": [50.0, 40.125, 30.0], "group": 1, "dashed": True},
        ],
    }
    linear = {"label": "classes", "scale": "linear"}
    symlog = {"label": "epsilon", "scale": "symlog", "threshold": 0.1}
    few = [{**line, "name": "few", "x": [0, 0.05, 0.1, 1, 10, 100], "y": [1, 2, 3, 4, 5, 6]}]
    log = {"label": "rate", "scale": "log"}
    rates = [{**line, "name": "rates", "x": [0, 0.01, 0.1, 1], "y": [0, 2, 3, 4]}]
    return {
        "title": "A title",
        "subtitle": "A sentence.",
        "made": {"equipoise": "0.1.0", "runs": 3, "hardware": ["a GPU"], "torch": ["2.11.0"]},
        "states": {"close": "within 0.5 points"},
        "headline_caption": "Both numbers.",
        "headline": [
            {"name": "one", "ours": 43.75, "std": 0.5, "paper": 43.8, "seeds": 3, "state": "close"},
            {"name": "two", "ours": None, "std": None, "paper": 62.0, "seeds": 0, "state": "missing"},
        ],
        "tables": [{**table, "id": "t1"}, {**table, "id": "t2", "title": "Table 2"}],
        "figures": [
            {**lines, "id": "lines", "title": "Lines", "x": linear},
            {**lines, "id": "symlog", "title": "Epsilon", "x": symlog, "series": few},
            {**lines, "id": "log", "title": "Rate", "x": log, "series": rates},
            {
                "id": "confusion",
                "kind": "confusion",
                "title": "Confusion",
                "caption": "…",
                "panels": [panel("run 1", a_run(1))],
            },
        ],
        "costs": {
            "title": "Costs",
            "caption": "…",
            "columns": ["", "s", "MiB"],
            "rows": [["x", "2.5", "1,906"], ["y", "10", "92"]],
        },
        "runs": [a_run(i) for i in range(3)],
    }


DRAWN = {}
"""figures, each drawn once: most pages here have the same"""


def drawn(data):
    """The data with its figures drawn, as `report` does it."""
    for figure in data["figures"]:
        if repr(figure) not in DRAWN:
            DRAWN[repr(figure)] = render_svg(draw(figure), figure["title"])
    plt.close("all")
    return {**data, "figures": [{**figure, "svg": DRAWN[repr(figure)]} for figure in data["figures"]]}


EMPTY = {"headline": [], "states": {}, "tables": [], "figures": [], "costs": None, "runs": []}
"""of what a report may have none"""


def without(*keys):
    return sample() | {key: EMPTY[key] for key in keys}


@pytest.fixture(scope="module")
def browser():
    """One browser for all tests here."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    # Some errors reach the window and not the console.
    watch = "window.errors = []; addEventListener('error', (e) => errors.push(String(e.message)), true)"
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": watch})
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of some data from file://, in a window of some size; in the end nothing may have complained."""

    def show(data, width=1280, height=900, theme="light", phone=False, fragment=""):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": theme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        path = tmp_path / "report.html"
        path.write_text(render_page(drawn(data)), encoding="utf-8")
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(path.as_uri() + fragment)
        return browser

    yield show
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"]
    assert complaints + browser.execute_script("return window.errors || []") == []
    browser.execute_script("try { localStorage.clear() } catch {}")


def all_of(driver, selector):
    return driver.find_elements("css selector", selector)


def one(driver, selector):
    return WebDriverWait(driver, 10).until(lambda d: next(iter(all_of(d, selector)), None), f"no {selector}")


def until(driver, condition):
    return WebDriverWait(driver, 10).until(lambda _: condition())


def click(driver, element):
    """Click an element in the middle of the window: at its edge the sticky bar would be in the way."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def names(driver, table="t1", body="measured"):
    rows = all_of(driver, f"#table-{table} tbody.{body} tr:not(.detail-row) th")
    return [row.text.split("\n")[0].removesuffix(" quoted").removesuffix("quoted").strip() for row in rows]


def background(driver):
    return driver.execute_script("return getComputedStyle(document.body).backgroundColor")


@needs_browser
def test_it_opens_from_a_file_and_asks_for_nothing(opened):
    driver = opened(sample())
    assert driver.title == "A title"
    assert one(driver, "h1").text == "A title"
    assert [link.text for link in all_of(driver, "nav a")] == ["At a glance", "Tables", "Figures", "Cost", "Runs"]
    assert one(driver, "#made").text == "Equipoise 0.1.0 · 3 runs · a GPU · torch 2.11.0"
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@needs_browser
def test_the_headline_has_both_numbers(opened):
    driver = opened(sample())
    assert [mark.text for mark in all_of(driver, ".headline .difference.close")] == ["−0.05"]
    assert len(all_of(driver, ".headline .difference.close i.state")) == 1
    rows = [row.text.split("\n") for row in all_of(driver, ".headline tbody tr")]
    assert [" ".join(row) for row in rows] == ["one 43.75 ± 0.50 43.80 −0.05", "two – 62.00"]
    dots = driver.execute_script(
        "return [...document.querySelectorAll('.headline tbody circle')].map(c => [c.classList[0], c.cx.baseVal.value])"
    )
    assert [kind for kind, _ in dots] == ["ring", "dot", "ring"]
    assert 0 < dots[0][1] - dots[1][1] < 5 < dots[2][1] - dots[0][1]


@needs_browser
def test_headers_sort_and_a_third_click_restores(opened):
    driver = opened(sample())
    given = ["B-low", "C-high", "A-missing", "D-middle"]
    assert names(driver) == given
    header = all_of(driver, "#table-t1 thead tr:last-child th")[1]
    button = header.find_element("css selector", "button")
    click(driver, button)  # by what was measured: the paper's 99 is not taken for it
    assert names(driver) == ["C-high", "D-middle", "B-low", "A-missing"]
    assert names(driver, body="quoted") == ["Q2", "Q1"]
    assert header.get_attribute("aria-sort") == "descending"
    click(driver, button)
    assert names(driver) == ["B-low", "D-middle", "C-high", "A-missing"]
    assert names(driver, body="quoted") == ["Q1", "Q2"]
    click(driver, button)
    assert names(driver) == given
    assert header.get_attribute("aria-sort") is None
    assert names(driver, "t2") == given  # the other table was left alone


@needs_browser
def test_headers_sort_by_the_keyboard(opened):
    driver = opened(sample())
    first = one(driver, "#table-t1 thead tr:last-child th button")
    driver.execute_script("arguments[0].focus()", first)
    ActionChains(driver).send_keys(Keys.ENTER).perform()
    assert names(driver) == ["A-missing", "B-low", "C-high", "D-middle"]
    ActionChains(driver).send_keys(Keys.SPACE).perform()
    assert names(driver) == ["D-middle", "C-high", "B-low", "A-missing"]
    costs = all_of(driver, "#costs th button")
    click(driver, costs[2])
    assert [row.text for row in all_of(driver, "#costs tbody th")] == ["x", "y"]  # 1,906 is more than 92
    click(driver, costs[1])
    assert [row.text for row in all_of(driver, "#costs tbody th")] == ["y", "x"]  # and 10 more than 2.5


@needs_browser
def test_cells_say_what_they_are(opened):
    driver = opened(sample())
    rows = all_of(driver, "#table-t1 tbody tr")
    words = [[td.text.replace("\n", " ") for td in row.find_elements("css selector", "td")] for row in rows]
    assert words[0] == ["40.25 40.00 +0.25", "needs imagenet 50.00"]
    assert words[1] == ["62.50 ± 0.31 61.00 +1.50", "needs imagenet 70.00"]
    assert words[2] == ["– 99.00", ""]
    assert words[3] == ["50.00 55.00 −5.00ʲ", "needs imagenet 60.00"]
    assert words[4] == ["45.00", ""]
    assert "quoted" in rows[4].text
    said = rows[3].find_element("css selector", "button.cell").get_attribute("aria-label")
    assert said == "measured 50.00 (1 seed); paper 55.00; difference −5.00, off; measured otherwise"


@needs_browser
def test_a_cell_tells_its_command_and_leads_to_its_run(opened):
    driver = opened(sample())
    one(driver, "#filter").send_keys("odd")  # hides the run that the link will lead to
    button = all_of(driver, "#table-t1 button.cell")[2]
    click(driver, button)
    detail = one(driver, "#table-t1 .detail:popover-open")
    assert "C-high, CIFAR, 5 steps: measured 62.50 ± 0.31 (3 seeds); paper 61.00; difference +1.50, near" in detail.text
    assert "equipoise run --cell c5" in detail.text
    click(driver, detail.find_element("link text", "Method even, seed 0"))
    run = driver.find_element("id", "run-a/run 0")
    until(driver, lambda: run.get_attribute("open") and run.is_displayed())
    until(driver, lambda: -5 < driver.execute_script("return arguments[0].getBoundingClientRect().top", run) < 300)
    assert all_of(driver, "#table-t1 .detail:popover-open") == []
    click(driver, button)
    assert len(all_of(driver, "#table-t1 .detail:popover-open")) == 1
    click(driver, button)
    assert all_of(driver, "#table-t1 .detail:popover-open") == []


@needs_browser
def test_an_address_opens_its_run(opened):
    driver = opened(sample(), fragment="#run-a%2Frun%202")
    until(driver, lambda: driver.find_element("id", "run-a/run 2").get_attribute("open"))
    text = driver.find_element("id", "run-a/run 2").text
    for part in ("62.00", "equipoise run il-baseline --seed 2", "a GPU", "torch 2", "a/run 2", "balanced", "88.50"):
        assert part in text


@needs_browser
def test_paper_is_white(opened):
    driver = opened(sample(), theme="dark")
    click(driver, one(driver, "#theme"))  # chosen by hand, too
    click(driver, one(driver, "#theme"))
    dark = background(driver)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    printed = driver.execute_script("return getComputedStyle(document.body).color")
    assert max(map(int, re.findall(r"\d+", printed)[:3])) < 100  # dark text
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert background(driver) == dark


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_have_the_colours_of_the_theme(opened, theme):
    driver = opened(sample(), theme=theme)
    script = "return getComputedStyle(document.querySelector('#figure-lines svg text')).fill"
    assert driver.execute_script(script) == driver.execute_script("return getComputedStyle(document.body).color")
    # A rect of Selenium's is rounded.
    script = "return ['', ' svg'].map((s) => document.querySelector('#figure-lines' + s).getBoundingClientRect().width)"
    room, width = driver.execute_script(script)
    assert 300 < width <= room


@needs_browser
def test_the_theme_follows_the_system_and_the_button(opened):
    driver = opened(sample(), theme="dark")
    dark = background(driver)
    click(driver, one(driver, "#theme"))
    light = background(driver)
    assert sum(map(int, re.findall(r"\d+", light)[:3])) > 600 > 200 > sum(map(int, re.findall(r"\d+", dark)[:3]))
    driver.refresh()
    assert background(driver) == light  # it was chosen, and stays
    click(driver, one(driver, "#theme"))
    assert background(driver) == dark


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_of_text_can_be_read(opened, theme):
    driver = opened(sample(), theme=theme)

    def luminance(name):
        script = "document.body.style.color = `var(${arguments[0]})`; return getComputedStyle(document.body).color"
        rgb = [int(v) / 255 for v in re.findall(r"\d+", driver.execute_script(script, name))[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
        return np.dot(linear, [0.2126, 0.7152, 0.0722])

    grounds = [luminance(name) for name in ("--ground", "--raised")]
    least = dict.fromkeys(("--text", "--quiet", "--accent", "--close", "--near", "--off"), 4.5)
    for name, ratio in (least | {f"--series-{k}": 3 for k in range(8)}).items():  # WCAG AA: text, and lines of charts
        for ground in grounds:
            lighter, darker = max(luminance(name), ground), min(luminance(name), ground)
            assert (lighter + 0.05) / (darker + 0.05) >= ratio, name


@needs_browser
def test_the_filter_wants_every_word(opened):
    driver = opened(sample())
    box = one(driver, "#filter")

    def left():
        return [entry.text.split("\n")[0] for entry in all_of(driver, "details") if entry.is_displayed()]

    box.send_keys("EVEN balanced")
    assert left() == ["Method even, seed 0", "Method even, seed 2"]
    assert one(driver, ".count").text == "2 of 3 runs"
    box.send_keys(" nothing-has-this")
    assert left() == []
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(Keys.BACKSPACE)
    assert len(left()) == 3
    assert one(driver, ".count").text == "3 runs"


@needs_browser
@pytest.mark.parametrize("way", ["allowed", "refused", "impossible"])
def test_commands_are_copied_or_at_least_selected(opened, way):
    driver = opened(sample(), fragment="#run-a%2Frun%201")
    command = "equipoise run il-baseline --seed 1 --remedy balanced"
    if way != "allowed":
        driver.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error('refused'))")
    if way == "impossible":
        driver.execute_script("document.execCommand = () => false")
    button = one(driver, "details[open] .copy")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    click(driver, button)
    until(driver, lambda: button.text == ("Press Ctrl+C" if way == "impossible" else "Copied"))
    if way == "impossible":
        assert driver.execute_script("return String(getSelection())") == command
    else:
        box = one(driver, "#filter")
        box.send_keys(Keys.CONTROL, "v")
        assert box.get_attribute("value") == command


@needs_browser
def test_a_phone_scrolls_one_way_only(opened):
    data = sample()
    for table in data["tables"]:
        table["columns"] += [{"id": f"more-{i}", "group": "More", "title": f"{i} steps"} for i in range(6)]
        table["rows"][0]["cells"] += [cell(f"more-{i}", 50.0 + i, 50.0) for i in range(6)]
    data["runs"][0]["settings"]["data"] = "c314287ca85cab7fec0fa1ab" * 4
    driver = opened(data, width=390, height=844, phone=True)
    for entry in all_of(driver, "summary"):
        click(driver, entry)
    one(driver, "#figure-lines svg")
    assert driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    assert one(driver, "nav").rect["height"] < 60
    table = one(driver, "#table-t1 .scroll")
    driver.execute_script("arguments[0].scrollLeft = 200", table)
    assert table.find_element("css selector", "tbody th").location["x"] == table.location["x"]  # names stay in sight
    click(driver, all_of(driver, "button.cell")[0])
    detail = one(driver, ".detail:popover-open").rect
    assert 0 <= detail["x"] <= detail["x"] + detail["width"] <= 390


@needs_browser
def test_a_hundred_runs_are_small_and_quick(opened):
    data = sample()
    generator = np.random.default_rng(0)
    for i in range(100):
        run = a_run(i)
        shares = np.full(100, 0.004) + generator.random(100) ** 12 / 20
        counts = [generator.multinomial(100, np.roll(shares, k) / shares.sum()).tolist() for k in range(100)]
        steps = [{**run["steps"][0], "step": t, "top1": generator.random() * 100} for t in range(26)]
        data["runs"].append({**run, "id": f"big {i}", "confusion": counts, "steps": steps})
    assert len(render_page(drawn(data)).encode()) < 4_000_000
    driver = opened(data)
    assert len(all_of(driver, "details")) == 103
    assert driver.execute_script("return performance.timing.domComplete - performance.timing.domLoading") < 5000


@needs_browser
def test_hostile_names_are_only_text(opened):
    data = hostile()
    driver = opened(data, width=390, phone=True)
    flat = " ".join(HOSTILE.split())
    assert driver.title == f"A title {flat}"
    assert one(driver, "h1").text == f"A title {flat}"
    click(driver, all_of(driver, "button.cell")[0])
    link = one(driver, ".detail:popover-open a")
    assert link.text == f"Method even, seed 0 {flat}"
    click(driver, link)
    run = driver.execute_script("return document.getElementById(arguments[0])", f"run-{data['runs'][0]['id']}")
    until(driver, lambda: run.get_attribute("open"))
    assert run.find_element("css selector", ".command code").text == f"{sample()['runs'][0]['command']} {flat}"
    assert all_of(driver, "main img:not([src^='data:image/png']), main script") == []
    assert driver.execute_script("return window.hacked") is None
    assert driver.execute_script("return document.documentElement.scrollWidth") == 390


# What is written, without a browser ---------------------------------------------------------------------------------


class Tree(HTMLParser):
    """The elements of a page, each as its tag, its attributes, its text and its elements; none may be left open."""

    def __init__(self, text):
        super().__init__()
        self.all, self.open = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", "inside": [], **dict(attributes)}
        self.all.append(element)
        for above in self.open:
            above["inside"].append(element)
        if tag not in ("meta", "link", "img", "input"):
            self.open.append(element)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1]["tag"] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag, self.getpos()

    def handle_data(self, text):
        for element in self.open:
            element["text"] += text

    def find(self, tag, inside=None, **attributes):
        every = self.all if inside is None else inside["inside"]
        attributes = {name.rstrip("_"): value for name, value in attributes.items()}
        return [e for e in every if e["tag"] == tag and all(e.get(k) == v for k, v in attributes.items())]


@pytest.fixture(scope="module")
def tree():
    return Tree(render_page(drawn(sample())))


def test_ids_are_unique_and_links_lead_to_them(tree):
    ids = [element["id"] for element in tree.all if "id" in element]
    assert len(ids) == len(set(ids)) > 20, "in drawings too"
    for link in tree.find("a"):
        assert unquote(link["href"].removeprefix("#")) in ids
    targets = [button["popovertarget"] for button in tree.find("button", class_="cell")]
    assert targets and set(targets) <= set(ids)
    outside = [e for e in tree.all if re.match("https?:", e.get("src") or e.get("href") or "")]
    assert outside == []


def test_sections_are_named_at_the_top(tree):
    (links,) = tree.find("div", id="sections")
    names = ["At a glance", "Tables", "Figures", "Cost", "Runs"]
    assert [link["text"] for link in tree.find("a", links)] == names
    (made,) = tree.find("p", id="made")
    assert made["text"] == "Equipoise 0.1.0 · 3 runs · a GPU · torch 2.11.0"


def test_a_cell_has_both_numbers_and_says_so_in_words(tree):
    (table,) = tree.find("section", id="table-t1")
    cells = [[td["text"] for td in tree.find("div", row, class_="cell") + tree.find("button", row, class_="cell")]
             for row in tree.find("tr", table)[2:]]  # fmt: skip
    words = {c for row in cells for c in row}
    assert {"40.2540.00 +0.25", "62.50 ± 0.3161.00 +1.50", "50.0055.00 −5.00ʲ", "45.00", "–99.00"} <= words
    assert "needs imagenet50.00" in words
    said = {button["aria-label"] for button in tree.find("button", table, class_="cell")}
    assert "measured 50.00 (1 seed); paper 55.00; difference −5.00, off; measured otherwise" in said
    details = [detail["text"] for detail in tree.find("div", table, class_="detail")]
    assert any(
        d.startswith("C-high, CIFAR, 5 steps: measured 62.50 ± 0.31 (3 seeds); paper 61.00; difference +1.50, near")
        and "equipoise run --cell c5" in d and d.endswith("From this run:Method even, seed 0")
        for d in details
    )  # fmt: skip


def test_what_is_measured_is_sorted_apart_from_what_is_published(tree):
    (table,) = tree.find("section", id="table-t1")
    ranks = {}
    for row in tree.find("tr", table)[2:]:
        name, first = tree.find("th", row)[0], tree.find("td", row)[0]
        ranks[name["data-key"]] = (first.get("data-rank"), first.get("data-key"))
    assert ranks["C-high"] == ("0", "62.5") and ranks["A-missing"] == ("1", "99.0") and ranks["Q2"] == ("1", "80.0")
    assert [body["class"] for body in tree.find("tbody", table)] == ["measured", "quoted"]
    (costs,) = tree.find("section", id="costs")
    assert [td["data-key"] for td in tree.find("td", costs)] == ["2.5", "1906.0", "10.0", "92.0"]


def test_the_headline_is_drawn_where_its_numbers_are(tree):
    (chart,) = tree.find("table", class_="headline")
    rows = tree.find("tr", chart)[1:3]
    assert [row["text"] for row in rows] == ["one43.75 ± 0.5043.80−0.05", "two–62.00"]
    (ring,), (dot,) = (tree.find("circle", rows[0], class_=name) for name in ("ring", "dot"))
    (other,) = tree.find("circle", rows[1])
    at = [float(circle["cx"].rstrip("%")) for circle in (dot, ring, other)]
    assert other["class"] == "ring" and 0 < at[1] - at[0] < 2 < at[2] - at[1] and min(at) >= 0 and max(at) <= 100
    (whisker,) = tree.find("line", chart, class_="whisker")
    assert float(whisker["x1"].rstrip("%")) < at[0] < float(whisker["x2"].rstrip("%"))


def test_a_run_has_all_that_is_known_of_it(tree):
    (run,) = tree.find("details", id="run-a/run 2")
    for part in ("62.00", "equipoise run il-baseline --seed 2", "a GPU", "torch 2", "a/run 2", "balanced", "88.50"):
        assert part in run["text"]
    (code,) = tree.find("code", run)
    assert code["text"] == "equipoise run il-baseline --seed 2 --remedy balanced"
    (image,) = tree.find("img", run)
    assert image["src"].startswith("data:image/png;base64,")


def test_a_drawing_has_the_colours_and_fonts_of_the_page():
    figure = sample()["figures"][0]
    texts = [render_svg(draw(figure), figure["title"]) for _ in range(2)]
    plt.close("all")
    assert texts[0] == texts[1]
    assert not re.search("#[0-9a-f]{6}|DejaVu|<metadata|<style|<!--", texts[0].replace("#ffffff", ""))
    assert {"var(--series-0)", "var(--series-1)", "var(--faint)", "currentColor"} <= set(
        re.findall(r"var\(--[\w-]+\)|currentColor", texts[0])
    )
    tree = Tree(texts[0])
    assert tree.all[0]["aria-label"] == "Lines" and tree.all[0]["role"] == "img"
    words = [element["text"] for element in tree.find("text")]
    assert {"first", "second", "classes", "accuracy, %", "10", "20", "30"} <= set(words) and "Lines" not in words


@pytest.mark.parametrize(("classes", "every"), [(range(50, 101, 5), True), (range(50, 101, 2), False)])
def test_an_axis_names_every_step_or_round_numbers_if_there_are_many(classes, every):
    figure = sample()["figures"][0]
    figure["series"] = [{**figure["series"][0], "x": list(classes), "y": [1.0] * len(classes), "spread": None}]
    drawn = draw(figure)
    named = [text.get_text() for text in drawn.axes[0].get_xticklabels()]
    plt.close("all")
    assert (named == [str(number) for number in classes]) == every and len(named) <= 12


def spoilt(value, key=None):
    if isinstance(value, dict):
        return {k: spoilt(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [spoilt(v, key) for v in value]
    keep = ("kind", "scale", "state", "column", "id", "run", "runs", "elsewhere")
    return f"{value} {HOSTILE}" if isinstance(value, str) and key not in keep else value


def hostile():
    data = spoilt(sample())
    for run in data["runs"]:
        run["id"] += HOSTILE
    data["tables"][0]["id"] += HOSTILE
    data["tables"][0]["rows"][0]["cells"][0]["runs"] = [data["runs"][0]["id"]]
    data["tables"][0]["rows"][4]["elsewhere"] = data["tables"][0]["id"]
    for figure, plain in zip(data["figures"], sample()["figures"]):  # in a drawing there is less room
        for part in ("x", "series"):
            figure |= {part: plain[part]} if part in plain else {}
        if "series" in figure:
            figure["series"][0]["name"] += HOSTILE[:60]
    data["figures"][-1]["panels"] = [panel(HOSTILE[:30], data["runs"][1])]
    data["runs"][0]["settings"][HOSTILE] = HOSTILE
    return data


def test_hostile_names_are_only_text_as_it_is_written():
    tree, plain = Tree(render_page(drawn(hostile()))), Tree(render_page(drawn(sample())))
    assert [element["tag"] for element in tree.find("script")] == ["script"] * 2
    assert len(tree.find("img")) == len(plain.find("img")) and not any("onerror" in image for image in tree.find("img"))
    (title,) = tree.find("title")
    assert title["text"] == f"A title {HOSTILE}"
    ids = {element["id"] for element in tree.all if "id" in element}
    assert all(unquote(link["href"].removeprefix("#")) in ids for link in tree.find("a"))
    assert any(HOSTILE[:60] in words["text"] for words in tree.find("text")), "in a drawing"


@pytest.mark.parametrize(
    ("data", "sections"),
    [
        (without(*EMPTY), ["Runs"]),
        (without("headline", "states"), ["Tables", "Figures", "Cost", "Runs"]),
        (without("runs", "costs"), ["At a glance", "Tables", "Figures", "Runs"]),
        (without("tables", "figures", "headline", "costs"), ["Runs"]),
        ({**without(*EMPTY), "runs": [bare_run()], "headline": [sample()["headline"][1]]}, ["At a glance", "Runs"]),
        ({**without(*EMPTY), "tables": [{**sample()["tables"][0], "columns": [], "rows": []}]}, ["Tables", "Runs"]),
    ],
)
def test_parts_may_be_missing(data, sections):
    tree = Tree(render_page(drawn(data)))
    (links,) = tree.find("div", id="sections")
    shown = [link["text"] for link in tree.find("a", links)]
    assert shown[-1] == "Runs" and (sections is None or shown == sections)
    assert len(tree.find("div", class_="run")) == len(tree.find("details")) == len(data.get("runs", []))


@needs_browser
@pytest.mark.parametrize("data", [without(*EMPTY), without("headline", "states"), without("runs", "costs")])
def test_parts_may_be_missing_and_nothing_complains(opened, data):
    driver = opened(data)
    driver.execute_script("for (const each of document.querySelectorAll('summary, button.cell')) each.click()")
    until(driver, lambda: len(all_of(driver, "details[open]")) == len(all_of(driver, "details")))
    assert len(all_of(driver, "details[open]")) == len(data.get("runs", []))


def test_the_same_records_make_the_same_page():
    data = drawn(sample())
    before = copy.deepcopy(data)
    assert render_page(data) == render_page(copy.deepcopy(data))
    assert data == before  # and the data was left as it was


def test_what_is_no_number_is_a_dash():
    data = sample()
    data["runs"][0] |= {"average": float("nan"), "final": float("inf")}
    data["headline"][0]["ours"] = float("nan")
    data["tables"][0]["rows"][0]["cells"][0] |= {"ours": float("nan"), "difference": float("nan")}
    tree = Tree(text := render_page(drawn(data)))
    numbers = tree.find("span", tree.find("details", id="run-a/run 0")[0], class_="numbers")
    assert numbers[0]["text"] == "average –final –" and not re.search(r"\bnan\b|\binf\b", text)


def test_a_matrix_is_a_pixel_for_a_cell():
    counts = [[0, 1, 10], [100, 0, 3], [0, 0, 1000]]
    address = encode_matrix(counts)
    assert address == encode_matrix(counts)
    with Image.open(io.BytesIO(base64.b64decode(address.removeprefix("data:image/png;base64,")))) as picture:
        seen = np.asarray(picture.convert("RGB")).astype(int).sum(2)
    assert seen.shape == (3, 3)
    assert (np.argsort(seen.ravel(), kind="stable") == np.argsort(np.ravel(counts), kind="stable")).all()
    assert seen[0, 0] == seen[1, 1] < seen[0, 1] < seen[1, 2] < seen[0, 2] < seen[1, 0] < seen[2, 2]
    with pytest.raises(ValueError, match="'a run'"):
        encode_matrix([[1, 2], [3]], "a run")
    with pytest.raises(ValueError, match="square of counts"):
        encode_matrix([[1, -2], [3, 4]])
