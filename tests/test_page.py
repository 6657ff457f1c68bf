"""The report's page, in a real browser: what one sees, points at, clicks and copies, without a word on the console."""

import base64
import copy
import json
import re
import shutil

import numpy as np
import pytest

from equipoise.report.page import packed, page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver here")
pytestmark = pytest.mark.xdist_group("browser")  # all in one process, which shares its browser

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='hacked=1'> <!-- & \"q\" 'q' [0] {{js}} ]]> \\u003c"
)


def cell(column, ours, paper, state="close", **more):
    difference = None if ours is None or paper is None else ours - paper
    empty = {"std": None, "seeds": 1, "why": None, "command": f"equipoise run --cell {column}", "runs": ["a/run 0"]}
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
        "command": f"equipoise run il-baseline --seed {i} --loss balanced",
        "average": 60.0 + i,
        "final": 50.0,
        "base": 55.0,
        "new": 45.0,
        "settings": {"loss": "balanced", "seed": str(i)},
        "steps": steps,
        "confusion": counts.tolist(),
        "class_order": [10 * (k + 1) for k in range(classes)],
        "base_classes": 2,
        "hardware": "a GPU",
        "versions": "torch 2",
        "seconds": 4.5,
        "reused": None,
    }


def sample():
    """A bit of everything: all states of a cell, all scales of an axis, values that are missing."""
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
    names = [{"name": name, "quoted": quoted, "cells": cells} for name, quoted, cells in rows]
    table = {"title": "Table 1", "caption": "What.", "metric": "accuracy, %", "columns": columns, "rows": names}
    line = {"spread": None, "dashed": False, "group": 0}
    lines = {
        "kind": "lines",
        "caption": "…",
        "y": {"label": "accuracy, %"},
        "series": [
            {**line, "name": "first", "x": [10, 20, 30], "y": [80.0, 70.5, 60.0], "spread": [1.0, 2.25, 3.0]},
            {**line, "name": "second", "x": [10, 20, 30], "y": [50.0, 40.125, None], "group": 1, "dashed": True},
        ],
    }
    linear = {"label": "classes", "scale": "linear", "threshold": None, "ticks": None}
    symlog = {"label": "epsilon", "scale": "symlog", "threshold": 0.1, "ticks": None}
    few = [{**line, "name": "few", "x": [0, 0.05, 0.1, 1, 10, 100], "y": [1, 2, 3, 4, 5, 6]}]
    log = {"label": "rate", "scale": "log", "threshold": None, "ticks": [0.01, 0.1, 1]}
    rates = [{**line, "name": "rates", "x": [0, 0.01, 0.1, 1], "y": [0, 2, 3, 4]}]
    return {
        "title": "A title",
        "subtitle": "A sentence.",
        "made": {"equipoise": "0.1.0", "runs": 3, "hardware": ["a GPU"], "torch": ["2.11.0"]},
        "states": {"close": "within 0.5 points"},
        "headline": [
            {"name": "one", "ours": 43.75, "std": 0.5, "paper": 43.8, "seeds": 3, "state": "close"},
            {"name": "two", "ours": None, "std": None, "paper": 62.0, "seeds": 0},
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
                "panels": [{"name": "run 1", "run": "a/run 1"}, {"name": "gone", "run": "not there"}],
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
        path.write_text(page(data), encoding="utf-8")
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


def point_at(driver, element, x, y):
    """Move the pointer to a place in an element, counted from its upper left corner."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    middle = element.rect["width"] / 2, element.rect["height"] / 2
    ActionChains(driver, duration=0).move_to_element_with_offset(element, x - middle[0], y - middle[1]).perform()


def matrix(driver):
    """The confusion matrix of the figure, scrolled to and painted: until a frame after that it has a size of no use."""
    driver.execute_script("arguments[0].scrollIntoView()", one(driver, "#figure-confusion"))
    canvas = one(driver, "#figure-confusion canvas")
    painted = "return arguments[0].closest('.matrix').style.getPropertyValue('--side')"
    until(driver, lambda: driver.execute_script(painted, canvas))
    assert canvas.rect["width"] > 200
    return canvas


def tooltip(driver):
    return one(driver, "#tooltip").text


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
    button = all_of(driver, "#table-t1 button.cell")[2]
    click(driver, button)
    detail = one(driver, "#table-t1 .detail")
    assert "C-high, CIFAR, 5 steps: measured 62.50 ± 0.31 (3 seeds); paper 61.00; difference +1.50, near" in detail.text
    assert "equipoise run --cell c5" in detail.text
    one(driver, "#filter").send_keys("odd")  # hides the run that the link leads to
    click(driver, detail.find_element("link text", "Method even, seed 0"))
    run = driver.find_element("id", "run-a/run 0")
    until(driver, lambda: run.get_attribute("open") and run.is_displayed())
    until(driver, lambda: -5 < driver.execute_script("return arguments[0].getBoundingClientRect().top", run) < 300)
    click(driver, button)
    assert all_of(driver, "#table-t1 .detail") == []


@needs_browser
def test_an_address_opens_its_run(opened):
    driver = opened(sample(), fragment="#run-a%2Frun%202")
    until(driver, lambda: driver.find_element("id", "run-a/run 2").get_attribute("open"))
    text = driver.find_element("id", "run-a/run 2").text
    for part in ("62.00", "equipoise run il-baseline --seed 2", "a GPU", "torch 2", "a/run 2", "balanced", "88.50"):
        assert part in text


@needs_browser
def test_line_charts_show_all_values_at_an_x(opened):
    driver = opened(sample())
    svg = one(driver, "#figure-lines svg.lines")
    dots = driver.execute_script(
        "return [...arguments[0].querySelectorAll('circle.mark')].map(c => [c.cx.baseVal.value, c.cy.baseVal.value])",
        svg,
    )
    point_at(driver, svg, dots[1][0] + 8, dots[1][1])
    lines = tooltip(driver).split("\n")
    assert lines[0] == "classes: 20"
    assert [" ".join(line.split()) for line in lines[1:]] == ["first 70.50 ± 2.25", "second 40.13"]
    assert "first" in one(driver, "#tooltip .nearest").text
    point_at(driver, svg, dots[2][0], dots[2][1] + 60)
    assert tooltip(driver).split("\n") == ["classes: 30", "first 60.00 ± 3.00"]  # the other has no value there
    driver.execute_script("arguments[0].focus()", svg)
    ActionChains(driver).send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT).perform()
    assert "classes: 10" in tooltip(driver)
    ActionChains(driver).send_keys(Keys.ESCAPE).perform()
    assert not one(driver, "#tooltip").is_displayed()


@needs_browser
def test_the_legend_hides_lines(opened):
    driver = opened(sample())
    one(driver, "#figure-lines svg.lines")
    button = all_of(driver, "#figure-lines .legend button")[0]
    assert len(all_of(driver, "#figure-lines .series")) == 2
    assert len(all_of(driver, "#figure-lines .band")) == 1
    click(driver, button)
    assert button.get_attribute("aria-pressed") == "false"
    assert len(all_of(driver, "#figure-lines .series")) == 1
    assert all_of(driver, "#figure-lines .band") == []
    click(driver, button)
    assert len(all_of(driver, "#figure-lines .series")) == 2


@needs_browser
def test_axes_are_linear_below_the_threshold_and_logarithmic_above(opened):
    driver = opened(sample())
    one(driver, "#figure-symlog svg.lines")
    script = (
        "return [...document.querySelectorAll(arguments[0] + ' svg.lines circle.mark')].map(c => c.cx.baseVal.value)"
    )
    zero, half, threshold, *above = driver.execute_script(script, "#figure-symlog")
    assert half - zero == pytest.approx(threshold - half, rel=0.01)
    assert np.diff([threshold, *above]) == pytest.approx([threshold - zero] * 3, rel=0.01)
    labels = [text.text for text in all_of(driver, "#figure-symlog text.tick[text-anchor=middle]")]
    assert labels == ["0", "0.1", "1", "10", "100"]
    powers = driver.execute_script(script, "#figure-log")  # without 0, for which a log axis has no place
    assert len(powers) == 3
    assert powers[1] - powers[0] == pytest.approx(powers[2] - powers[1])


@needs_browser
@pytest.mark.parametrize(
    ("classes", "labels"), [(range(50, 101, 5), range(50, 101, 5)), (range(50, 101, 2), range(50, 101, 10))]
)
def test_an_axis_names_every_step_or_round_numbers_if_there_are_many(opened, classes, labels):
    data = sample()
    figure = data["figures"][0]
    figure["x"]["ticks"] = list(classes)
    figure["series"] = [{**figure["series"][0], "x": list(classes), "y": [1.0] * len(classes), "spread": None}]
    driver = opened(data)
    one(driver, "#figure-lines svg.lines")
    named = [text.text for text in all_of(driver, "#figure-lines text.tick[text-anchor=middle]")]
    assert named == [str(number) for number in labels]


@needs_browser
def test_matrices_show_class_and_count(opened):
    data = sample()
    counts = data["runs"][1]["confusion"]
    driver = opened(data)
    assert all_of(driver, "canvas") == []  # drawn only when it comes into view
    assert "No confusion matrix" in one(driver, "#figure-confusion").text  # the panel whose run is not there
    canvas = matrix(driver)
    side = canvas.rect["width"] / 6
    for row, column in ((1, 2), (2, 1), (3, 3), (0, 5), (5, 0), (4, 4)):
        point_at(driver, canvas, (column + 0.5) * side, (row + 0.5) * side)
        lines = tooltip(driver).split("\n")
        assert lines[0] == f"true class {10 * (row + 1)}, predicted class {10 * (column + 1)}"
        assert lines[1] == f"{counts[row][column]} of {sum(counts[row])} images"
    driver.execute_script("arguments[0].focus()", canvas)
    ActionChains(driver).send_keys(Keys.ARROW_UP, Keys.ARROW_LEFT).perform()
    assert tooltip(driver).startswith("true class 40, predicted class 40\n20000 of")


@needs_browser
def test_a_tap_shows_values_until_another_tap(opened):
    driver = opened(sample(), width=390, height=844, phone=True)

    def tap(element):
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        script = "const r = arguments[0].getBoundingClientRect(); return {x: r.x + r.width / 2, y: r.y + r.height / 2}"
        place = driver.execute_script(script, element)
        until(driver, lambda: driver.execute_script(script, element) == place)
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [place]})
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    tap(one(driver, "#figure-lines svg.lines"))
    until(driver, lambda: "classes: 20" in tooltip(driver))
    assert one(driver, "#tooltip").is_displayed()
    tap(matrix(driver))
    until(driver, lambda: "true class" in tooltip(driver))
    assert "classes: 20" not in tooltip(driver)
    tap(one(driver, "#figure-confusion figcaption"))
    until(driver, lambda: not one(driver, "#tooltip").is_displayed())


@needs_browser
def test_paper_is_white_and_has_every_matrix(opened):
    driver = opened(sample(), theme="dark")
    dark = background(driver)
    driver.execute_script(
        "addEventListener('beforeprint', () => (window.printed = getComputedStyle(document.body).color))"
    )
    driver.execute_cdp_cmd("Page.printToPDF", {})
    assert max(map(int, re.findall(r"\d+", driver.execute_script("return window.printed")))) < 100  # dark text
    assert len(all_of(driver, "#figure-confusion canvas")) == 1
    assert background(driver) == dark


@needs_browser
def test_cells_of_a_matrix_are_whole_pixels_and_darker_for_more(opened):
    data = sample()
    data["runs"][1]["confusion"] = [[0, 1, 10, 100], [0, 0, 0, 111], [0, 0, 111, 0], [0, 0, 0, 111]]
    light, dark = [], []
    for theme, seen in (("light", light), ("dark", dark)):
        driver = opened(data, theme=theme)
        canvas = matrix(driver)
        size = driver.execute_script("return [arguments[0].width, arguments[0].getBoundingClientRect().width]", canvas)
        assert size[0] == size[1] and size[0] % 4 == 0
        script = """const [canvas] = arguments; const cell = canvas.width / 4;
            const { data } = canvas.getContext('2d').getImageData(0, 0.3 * cell, canvas.width, 1);
            const at = (k) => data.slice(4 * Math.round((k + 0.3) * cell)).slice(0, 3);
            return [0, 1, 2, 3].map((k) => at(k).reduce((a, b) => a + b, 0))"""
        seen += driver.execute_script(script, canvas)
    assert light == sorted(light, reverse=True) and len(set(light)) == 4
    assert dark == sorted(dark) and len(set(dark)) == 4


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
    command = "equipoise run il-baseline --seed 1 --loss balanced"
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
    click(driver, all_of(driver, "button.cell")[0])
    one(driver, "#figure-lines svg.lines")
    assert driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    assert one(driver, "nav").rect["height"] < 60
    table = one(driver, "#table-t1 .scroll")
    driver.execute_script("arguments[0].scrollLeft = 200", table)
    assert table.find_element("css selector", "tbody th").location["x"] == table.location["x"]  # names stay in sight
    assert one(driver, "#table-t1 .detail").rect["width"] <= 390


@needs_browser
def test_a_hundred_runs_are_small_and_quick(opened):
    data = sample()
    generator = np.random.default_rng(0)
    for i in range(100):
        run = a_run(i)
        shares = np.full(100, 0.004) + generator.random(100) ** 12 / 20
        counts = [generator.multinomial(100, np.roll(shares, k) / shares.sum()).tolist() for k in range(100)]
        steps = [{**run["steps"][0], "step": t, "top1": generator.random() * 100} for t in range(26)]
        data["runs"].append(
            {**run, "id": f"big {i}", "confusion": counts, "class_order": list(range(100)), "steps": steps}
        )
    assert len(page(data).encode()) < 3_000_000
    driver = opened(data)
    assert len(all_of(driver, "details")) == 103
    assert driver.execute_script("return performance.timing.domComplete - performance.timing.domLoading") < 5000


@needs_browser
def test_hostile_names_are_only_text(opened):
    def spoilt(value, key=None):
        if isinstance(value, dict):
            return {k: spoilt(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [spoilt(v, key) for v in value]
        keep = ("kind", "scale", "state", "column", "id", "run", "runs")
        return f"{value} {HOSTILE}" if isinstance(value, str) and key not in keep else value

    data = spoilt(sample())
    for run in data["runs"]:
        run["id"] += HOSTILE
    data["tables"][0]["id"] += HOSTILE
    data["tables"][0]["rows"][0]["cells"][0]["runs"] = [data["runs"][0]["id"]]
    data["figures"][-1]["panels"][0]["run"] = data["runs"][1]["id"]
    data["runs"][0]["settings"][HOSTILE] = HOSTILE
    driver = opened(data, width=390, phone=True)
    flat = " ".join(HOSTILE.split())
    assert driver.title == f"A title {flat}"
    assert one(driver, "h1").text == f"A title {flat}"
    click(driver, all_of(driver, "button.cell")[0])
    link = one(driver, ".detail a")
    assert link.text == f"Method even, seed 0 {flat}"
    click(driver, link)
    run = driver.execute_script("return document.getElementById(arguments[0])", f"run-{data['runs'][0]['id']}")
    until(driver, lambda: run.get_attribute("open"))
    assert run.find_element("css selector", ".command code").text == f"{sample()['runs'][0]['command']} {flat}"
    assert all_of(driver, "main img, main script") == []
    assert driver.execute_script("return window.hacked") is None
    assert driver.execute_script("return document.documentElement.scrollWidth") == 390


def without(*keys):
    data = sample()
    for key in keys:
        del data[key]
    return data


@needs_browser
@pytest.mark.parametrize(
    ("data", "sections"),
    [
        ({}, ["Runs"]),
        (without("headline", "made", "states"), ["Tables", "Figures", "Cost", "Runs"]),
        ({**sample(), "runs": [], "costs": None}, ["At a glance", "Tables", "Figures", "Runs"]),
        ({"title": "t", "runs": [a_run(0)], "tables": [], "figures": [], "headline": [], "costs": None}, ["Runs"]),
        ({"runs": [{"id": "bare", "title": "bare"}], "headline": [{"name": "n", "ours": None, "paper": None}]}, None),
        ({"tables": [{"id": "e", "title": "empty", "columns": [], "rows": []}], "figures": []}, ["Tables", "Runs"]),
        ({**sample(), "figures": [{**sample()["figures"][0], "series": []}]}, None),
    ],
)
def test_parts_may_be_missing(opened, data, sections):
    driver = opened(data)
    shown = [link.text for link in all_of(driver, "nav a")]
    assert shown[-1] == "Runs" and (sections is None or shown == sections)
    driver.execute_script("for (const each of document.querySelectorAll('summary, button.cell')) each.click()")
    until(driver, lambda: len(all_of(driver, ".run")) == len(all_of(driver, "details")))


def test_the_same_records_make_the_same_page():
    data = sample()
    before = copy.deepcopy(data)
    assert page(data) == page(copy.deepcopy(data))
    assert data == before  # and the data was left as it was


def test_what_is_no_number_becomes_none():
    data = sample()
    data["runs"][0]["average"] = float("nan")
    data["figures"][0]["series"][0]["y"][0] = float("inf")
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(data), re.DOTALL)[1]
    inside = json.loads(text)
    assert inside["runs"][0]["average"] is None and inside["figures"][0]["series"][0]["y"][0] is None


def test_packed_matrices_are_small_and_whole():
    counts = [[0, 300], [0, 5]]
    assert packed(counts) == {"size": 2, "cells": base64.b64encode(bytes([1, 300 & 127 | 128, 2, 1, 5])).decode()}
    assert packed([[0, 0], [0, 0]]) == {"size": 2, "cells": ""}
    assert packed([]) is None and packed(None) is None
    with pytest.raises(ValueError, match="'a run'"):
        packed([[1, 2], [3]], "a run")
    with pytest.raises(ValueError, match="square of counts"):
        packed([[1, -2], [3, 4]])
