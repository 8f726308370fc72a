"""The interactive page, driven in headless Chromium."""

import html as html_text
import json
import re
import shutil
import subprocess

import pytest
import tensorflow as tf
import viz_programs
from viz_programs import LOOP_SPECS

from tf_fused_ops import viz
from tf_fused_ops.viz import html, model, payload

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _BROWSERS)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# Collects whatever the console would show, and every attempt to load something.
WATCH = """<script>
window.problems = [];
window.addEventListener("error", (event) => problems.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (e) => problems.push(e.blockedURI));
console.error = (...text) => problems.push(text.join(" "));
</script>"""
HELPERS = """
const byClass = (name) => [...document.querySelectorAll(name)];
const pane = (number) => byClass("#panes .pane")[number];
const keys = (number = 0) => [...pane(number).querySelectorAll(".node")].map((g) => g.dataset.key);
const group = (key, number = 0) =>
  [...pane(number).querySelectorAll("[data-key]")].find((g) => g.dataset.key === key);
const click = (target, kind = "click") =>
  target.dispatchEvent(new MouseEvent(kind, { bubbles: true }));
const press = (text) => click(byClass("button").find((b) => b.textContent === text));
const search = (text) => {
  document.getElementById("search").value = text;
  document.getElementById("search").dispatchEvent(new Event("input"));
};
const shown = (id) => document.getElementById(id).innerText;
const box = () =>
  document.querySelector("#panes svg").getAttribute("viewBox").split(" ").map(Number);
"""


def drive(page, script, folder):
    """Opens a page, runs a script that sets entries of `found`, and returns them."""
    test = f"""<script>
const found = {{}};
{HELPERS}
try {{ {script} }} catch (error) {{ problems.push(String(error.stack)); }}
const result = document.createElement("pre");
result.id = "result";
result.textContent = JSON.stringify({{ found, problems, title: document.title }});
document.body.append(result);
</script></body>"""
    path = folder / "page.html"
    path.write_text(page.replace("<title>", f"{WATCH}<title>", 1).replace("</body>", test))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900",
               f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000",
               "--dump-dom", path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    written = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.S)
    assert written, done.stderr[-2000:]
    result = json.loads(html_text.unescape(written[1]))
    assert result["problems"] == []
    return result["found"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "loop.html"
    viz.draw(viz_programs.loop, path, input_signature=LOOP_SPECS)
    return path.read_text()


def test_opens_side_by_side(page, tmp_path):
    found = drive(
        page,
        """
found.panes = document.querySelectorAll(".pane").length;
found.labels = [...document.querySelectorAll(".pane .label b")].map((b) => b.textContent);
found.summary = shown("summary");
found.fused = document.querySelectorAll(".node.fused").length;
found.removed = document.querySelectorAll(".node.removed").length;
found.regions = [...document.querySelectorAll("#panes .region text")].map((t) => t.textContent);
""",
        tmp_path,
    )
    assert found["panes"] == 2 and found["labels"] == ["before", "after"]
    assert found["fused"] == 1 and found["removed"] >= 3
    assert found["regions"] == ["conv2d_bias_relu"]
    assert "Fused chains: 1" in found["summary"] and "kernels launched" in found["summary"]


def test_functions_open_and_close(page, tmp_path):
    found = drive(
        page,
        """
press("collapse");
found.closed = keys();
click(group("while"), "dblclick");
found.opened = keys();
click(group("while"), "dblclick");
found.again = keys();
press("expand"); press("expand"); press("expand");
found.all = keys();
""",
        tmp_path,
    )
    assert "while" in found["closed"] and found["closed"] == found["again"]
    assert len(found["opened"]) > len(found["closed"])
    assert "while!body/while/Conv2D" in found["all"]


def test_search_click_and_attributes(page, tmp_path):
    found = drive(
        page,
        """
press("collapse");
search("conv2d");
found.results = shown("found");
click(document.querySelector("#found li button"));
found.revealed = keys().filter((key) => key.includes("Conv2D"));
click(group("while!body/while/Conv2D").querySelector("rect"));
found.before = shown("selected");
const after = [...document.querySelectorAll(".node.fused")][0];
click(after.querySelector("rect"));
found.after = shown("selected");
found.marked = document.querySelectorAll(".selected").length;
click(document.querySelector("#regions button"));
found.region = shown("selected");
""",
        tmp_path,
    )
    assert "Conv2D" in found["results"] and "found" in found["results"].splitlines()[0]
    assert "while!body/while/Conv2D" in found["revealed"]
    assert "strides" in found["before"] and "[1, 1, 1, 1]" in found["before"]
    assert "float32[2,8,8,4]" in found["before"] and "removed" in found["before"]
    assert "Conv2DBiasAct" in found["after"] and "relu" in found["after"]
    assert "viz_programs.py:" in found["after"] and found["marked"] >= 1
    assert "Fuse Conv2D with BiasAdd and Relu" in found["region"]


def test_modes_details_and_zoom(page, tmp_path):
    found = drive(
        page,
        """
press("overlaid");
found.panes = document.querySelectorAll(".pane").length;
found.both = [byClass(".node.removed").length, byClass(".node.fused").length];
press("after");
found.after = document.querySelectorAll(".node.removed").length;
press("side by side");
press("shapes");
found.shapes = [...document.querySelectorAll(".edge text")].map((t) => t.textContent);
document.getElementById("fit").click();
const start = box();
document.getElementById("larger").click();
found.zoomed = box()[2] < start[2];
const svg = document.querySelector("#panes svg");
const at = (kind, x) =>
  svg.dispatchEvent(new PointerEvent(kind, { clientX: x, clientY: 300, pointerId: 1 }));
svg.setPointerCapture = () => {};
const still = box();
at("pointerdown", 200); at("pointermove", 260); at("pointerup", 260);
found.moved = box()[0] < still[0];
svg.dispatchEvent(new WheelEvent("wheel", { deltaY: 200, clientX: 100, clientY: 300 }));
found.out = box()[2] > still[2];
document.getElementById("fit").click();
found.fitted = Math.abs(box()[2] - start[2]) < 1;
""",
        tmp_path,
    )
    assert found["panes"] == 1 and min(found["both"]) >= 1
    assert found["after"] == 0
    assert any(text.startswith("f32[") for text in found["shapes"])
    assert found["zoomed"] and found["moved"] and found["out"] and found["fitted"]


def test_saved_picture_is_a_whole_svg(page, tmp_path):
    found = drive(
        page,
        """
let blob = null;
URL.createObjectURL = (given) => { blob = given; return "#"; };
URL.revokeObjectURL = () => {};
document.getElementById("save").click();
found.type = blob.type;
found.size = blob.size;
""",
        tmp_path,
    )
    assert found["type"] == "image/svg+xml" and found["size"] > 5000


def test_20000_nodes_stay_usable(tmp_path):
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    before = "x"
    for index in range(20_000):
        name = f"model/block_{index // 200}/layer_{index // 20}/relu_{index}"
        node = graph_def.node.add(name=name, op="Relu", input=[before])
        node.attr["T"].type = 1
        before = name
    program = model.read(graph_def)
    page = html.page(payload.make("large", "", viz.compare(program, program)))
    found = drive(
        page,
        """
found.first = keys().length;
const start = performance.now();
search("relu_12345");
click(document.querySelector("#found li button"));
found.seconds = (performance.now() - start) / 1000;
found.there = keys().some((key) => key.endsWith("/relu_12345"));
found.then = keys().length;
""",
        tmp_path,
    )
    assert found["first"] <= 100
    assert found["there"] and found["then"] <= 500
    assert found["seconds"] < 10
