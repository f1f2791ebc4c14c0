"""The report in a real browser: headless Chromium, driven over its debugging pipe, without a network.

A reader's hands are a mouse and a keyboard: the tests move and press those, and look at what is to be seen.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_mechanism
from fake_runs import HEAD, fake
from xsalab.experiment.outcome import outcome
from xsalab.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--remote-debugging-pipe", "--window-size=1200,900",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and answers on 4.
LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
ARMS = """
[arms.standard]
[arms.xsa]
variant = "xsa"
[arms.half]
variant = "xsa"
alpha = 0.5
[controls]
positive = { "optim.lr_scale" = 0.5 }
twin = false
"""
SEEDS = 8
MARKS = """arm => [...document.querySelectorAll("[data-arm]:not(.key)")].filter(e => e.dataset.arm === arm)"""


class Browser:
    """One page in one Chromium. Everything that it says, its console and its requests among it, is kept."""

    def __init__(self, folder: Path, page: Path) -> None:
        commands, to_browser = os.pipe()
        from_browser, answers = os.pipe()
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(commands), str(answers), str(CHROMIUM), *FLAGS,
             f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(commands, answers), stdout=self.log, stderr=self.log,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self.write, self.read = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb")
        self.waiting, self.count, self.session = b"", 0, ""
        self.heard: list[dict[str, Any]] = []
        self.patience = threading.Timer(60, self.process.kill)  # a browser that hangs ends, and so does the reading
        self.patience.start()
        target = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Page.navigate", url=page.as_uri())
        while not any(message.get("method") == "Page.loadEventFired" for message in self.heard):
            self.heard.append(self._next())

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            piece = os.read(self.read.fileno(), 1 << 20)
            assert piece, f"the browser has gone: {Path(self.log.name).read_text(errors='replace')[-600:]}"
            self.waiting += piece
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its answer."""
        self.count += 1
        call = {"id": self.count, "method": method, "params": parameters}
        self.write.write(json.dumps(call | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        self.write.flush()
        while (message := self._next()).get("id") != self.count:
            self.heard.append(message)
        assert "error" not in message, message
        return message["result"]

    def value(self, script: str, *arguments: Any) -> Any:
        """What a JavaScript function gives for the arguments."""
        call = f"({script})({', '.join(json.dumps(argument) for argument in arguments)})"
        found = self("Runtime.evaluate", expression=call, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """A place on an element, scrolled into view."""
        return tuple(self.value(
            """(selector, across, down) => {
                const element = document.querySelector(selector);
                element.scrollIntoView({block: "center", behavior: "instant"});
                const box = element.getBoundingClientRect();
                return [box.x + across * box.width, box.y + down * box.height];
            }""",
            selector, across, down,
        ))  # fmt: skip

    def mouse(self, kind: str, at: tuple[float, float], **more: Any) -> None:
        self("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **more)

    def press(self, at: tuple[float, float], to: tuple[float, float] | None = None, times: int = 1) -> None:
        """A click, or a drag."""
        self.mouse("mouseMoved", at)
        for count in range(1, times + 1):
            self.mouse("mousePressed", at, button="left", buttons=1, clickCount=count)
            if to is not None:
                self.mouse("mouseMoved", ((at[0] + to[0]) / 2, (at[1] + to[1]) / 2), button="left", buttons=1)
                self.mouse("mouseMoved", to, button="left", buttons=1)
            self.mouse("mouseReleased", to or at, button="left", clickCount=count)

    def key(self, key: str, text: str = "") -> None:
        codes = {"Enter": 13, " ": 32, "Escape": 27, "+": 187}
        self("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=codes[key])
        self("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def complaints(self) -> list[Any]:
        """Errors and warnings of the page, of its policy and of the console."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [message["params"] for message in self.heard if message.get("method") in bad]

    def close(self) -> None:
        self.patience.cancel()
        self.process.terminate()
        self.process.wait(20)
        for end in (self.write, self.read, self.log):
            end.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 arms × 8 seeds × 300 steps with diagnoses of 6 × 6 heads: as large as a report is meant to be."""
    folder = tmp_path_factory.mktemp("browser")
    toml = HEAD.replace("[0, 1, 2, 3, 4, 5]", str(list(range(SEEDS)))) + ARMS
    experiment, store = fake(folder, toml, steps=300)
    content = outcome(experiment, store)
    pairs = {row["treatment"]: row["baseline"] for row in content["contrasts"]}
    content["mechanism"] = [fake_mechanism.mechanism("base", pairs, experiment.seeds)]
    content["stability"] = fake_mechanism.stability(["base"], list(experiment.arms), SEEDS)
    return write_report(experiment, store, content)


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"), page)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """Nothing that a test does makes the console complain."""
    yield
    assert browser.complaints() == []


def test_the_page_is_small_and_soon_there_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    assert page.stat().st_size < 8e6
    ready = browser.value("() => performance.getEntriesByType('navigation')[0].loadEventStart")
    assert 0 < ready < 2000, "milliseconds until the load event; the script runs before it"
    assert browser.value("() => document.documentElement.className") == "js", "the policy let the page's script run"
    asked = [message["params"]["request"]["url"] for message in browser.heard
             if message.get("method") == "Network.requestWillBeSent"]  # fmt: skip
    assert asked == [page.as_uri()]
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?:https?:)?//[\w.-]+", text.replace("http://www.w3.org/2000/svg", "").split("<pre>")[0])


def test_a_policy_lets_no_other_script_run(browser: Browser) -> None:
    """F170: even a script that found its way into the page would not run; and that is all the console says."""
    browser.value("() => { const s = document.createElement('script'); s.textContent = 'window.bad = 1'; "
                  "document.body.append(s); s.remove() }")  # fmt: skip
    assert browser.value("() => window.bad === undefined")
    browser.value("() => 0")
    told = browser.complaints()
    assert len(told) == 1
    assert "Content Security Policy" in str(told[0])
    browser.heard = [message for message in browser.heard if message.get("params") is not told[0]]


def visible(browser: Browser, arm: str) -> set[bool]:
    shown = "e => getComputedStyle(e).display !== 'none'"
    return set(browser.value(f"arm => ({MARKS})(arm).map({shown})", arm))


@pytest.mark.parametrize("how", ["mouse", "Enter", " "], ids=["mouse", "enter", "space"])
def test_a_legend_entry_hides_its_arm_everywhere_and_brings_it_back(browser: Browser, how: str) -> None:
    entry = '#curves .key[data-arm="xsa"]'

    def act() -> None:
        if how == "mouse":
            browser.press(browser.place(entry))
        else:
            browser.value("selector => document.querySelector(selector).focus()", entry)
            browser.key(how, "\r" if how == "Enter" else " ")

    def pressed() -> list[str]:
        keys = """() => [...document.querySelectorAll('.key[data-arm="xsa"]')].map(e => e.ariaPressed)"""
        return list(set(browser.value(keys)))

    where = browser.value("() => scrollY")
    assert browser.value(f"arm => ({MARKS})(arm).length", "xsa") > SEEDS
    assert (visible(browser, "xsa"), pressed()) == ({True}, ["true"])
    act()
    assert (visible(browser, "xsa"), pressed()) == ({False}, ["false"])
    assert visible(browser, "standard") == {True}
    if how == " ":
        assert browser.value("() => scrollY") == where, "the space bar does not scroll"
    act()
    assert (visible(browser, "xsa"), pressed()) == ({True}, ["true"])


PLOT, FRAME = "#curves .plot", "#curves .panel"
MATRIX = f"() => document.querySelector('{PLOT} > g').getAttribute('transform')"
TICKS = f"() => [...document.querySelector('{PLOT}').parentNode.querySelectorAll('.axes text')].map(e => e.textContent)"


def test_a_box_zooms_and_a_double_click_goes_back(browser: Browser) -> None:
    before = browser.value(MATRIX), browser.value(TICKS)
    browser.press(browser.place(FRAME, 0.5, 0.4), to=browser.place(FRAME, 0.7, 0.8))
    after = browser.value(MATRIX), browser.value(TICKS)
    across = [float(matrix.split("(")[1].split()[0]) for matrix, _ in (before, after)]
    assert across[1] / across[0] == pytest.approx(5, rel=0.02), "a fifth of the width is now the whole"
    assert after[1] != before[1], "the axes say where we are"
    assert "150" in after[1]
    assert "0" not in after[1]
    browser.press(browser.place(FRAME), times=2)
    assert numbers(browser.value(MATRIX)) == pytest.approx(numbers(before[0]), rel=1e-5)
    assert browser.value(TICKS) == before[1]


def numbers(matrix: str) -> list[float]:
    return [float(part) for part in re.findall(r"-?[\d.]+(?:e-?\d+)?", matrix)]


def test_keys_and_the_wheel_zoom_and_escape_goes_back(browser: Browser) -> None:
    before = numbers(browser.value(MATRIX))
    at = browser.place(FRAME)
    browser.mouse("mouseWheel", at, deltaX=0, deltaY=-100, modifiers=2)
    wheeled = numbers(browser.value(MATRIX))
    assert wheeled[0] > before[0]
    browser.value(f"() => document.querySelector('{PLOT}').parentNode.focus()")
    browser.key("+", "+")
    assert numbers(browser.value(MATRIX))[0] > wheeled[0]
    browser.key("Escape")
    assert numbers(browser.value(MATRIX)) == pytest.approx(before, rel=1e-5)


def test_the_tooltip_of_a_line_says_seed_step_and_the_exact_value(browser: Browser) -> None:
    """Checked against the number in the page's own JSON: the null control's difference has a run and a step."""
    x, y = browser.value(f"""() => {{
        const plot = document.querySelector("{PLOT}");
        plot.scrollIntoView({{block: "center", behavior: "instant"}});
        const path = plot.querySelector("path[data-arm='xsa']");
        const [step, value] = path.getAttribute("d").slice(1).split("L")[200].split(" ").map(Number);
        const at = new DOMPoint(step, value).matrixTransform(plot.querySelector("g").getScreenCTM());
        return [at.x, at.y];
    }}""")
    browser.mouse("mouseMoved", (x, y))
    told = browser.value("() => document.querySelector('.tip').textContent")
    arm, seed, step, value = re.fullmatch(r"([\w@ ]+), seed (\d), step (\d+): ([\d.]+)", told).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert step == "200"
    drawn = browser.value(
        f"""(arm, nth) => [...document.querySelectorAll("{PLOT} path")].filter(p => p.dataset.arm === arm)[nth]
            .getAttribute("d").slice(1).split("L")[200]""",
        arm, int(seed),
    )  # fmt: skip
    assert drawn.split(" ") == [step, value]
    assert not browser.value("() => document.querySelector('.tip').hidden")


def test_the_tooltip_of_a_dot_and_of_a_cell(browser: Browser) -> None:
    for selector, pattern in (
        ("#intervals circle", r"seed 0: [−\d.]+ bpb"),
        (".map.chosen [data-name] rect", r"standard, layer 0, head 0: [+−\d.e]+"),
    ):
        browser.mouse("mouseMoved", (2, 2))
        browser.mouse("mouseMoved", browser.place(selector))
        told = browser.value("() => document.querySelector('.tip').textContent")
        assert re.fullmatch(pattern, told)
        browser.mouse("mouseMoved", (2, 2))
        assert browser.value("() => document.querySelector('.tip').hidden")
        assert browser.value(f"() => document.querySelector('{selector} title').textContent"), "the mark's own is back"


def test_one_measure_is_chosen_and_paper_shows_five(browser: Browser) -> None:
    shown = """() => [...document.querySelectorAll(".map")].filter(e => getComputedStyle(e).display !== "none")
        .map(e => e.dataset.measure)"""
    assert browser.value(shown) == ["cos_before"]
    browser.value("""() => { const s = document.querySelector("select");
        s.value = "entropy"; s.dispatchEvent(new Event("change")); }""")
    assert browser.value(shown) == ["entropy"]
    browser("Emulation.setEmulatedMedia", media="print")
    assert browser.value(shown) == ["cos_before", "cos_after", "self_weight", "reach", "alpha_gradient"]
    controls = """() => [...document.querySelectorAll(".choice, .hint")].map(e => getComputedStyle(e).display)"""
    assert set(browser.value(controls)) == {"none"}
    browser("Emulation.setEmulatedMedia", media="")


def test_nothing_is_wider_than_the_page_and_headings_are_in_order(browser: Browser) -> None:
    assert browser.value("() => document.documentElement.scrollWidth <= innerWidth")
    levels = browser.value("() => [...document.querySelectorAll('h1,h2,h3,h4,h5')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    assert browser.value("() => [...document.querySelectorAll('svg[role=img]')].every(e => e.ariaLabel)")
    links = "() => [...document.querySelectorAll('a')].map(a => a.getAttribute('href'))"
    assert all(browser.value("link => document.querySelector(link) !== null", link) for link in browser.value(links))
