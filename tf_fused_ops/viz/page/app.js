// The page: panes with the sides of a comparison, and what one can do with them.

const MOST_VISIBLE = 500;  // more than this neither fits a screen nor is laid out in a moment
const PAGE_BUDGET = 40;
const MOST_FOUND = 200;

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { mode: data.sides.length > 1 ? "side by side" : data.sides[0].label, open: null, selected: null, region: null, details: { shapes: false, devices: false, layouts: false, constants: false } };
const trees = data.sides.map(buildTree);
let merged = null;
let panes = [];

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function shownTrees() {
  if (state.mode === "side by side") return trees;
  if (state.mode === "overlaid") {
    merged = merged || buildTree(overlay(data.sides[0], data.sides[1]));
    return [merged];
  }
  return [trees.find((tree) => tree.side.label === state.mode) || trees[0]];
}

function redraw({ fit = true, around = null } = {}) {
  const views = shownTrees().map((tree) => ({ tree, view: visible(tree, state.open, state.details) }));
  const count = Math.max(...views.map(({ view }) => view.leaves.length));
  if (count > MOST_VISIBLE) return false;
  const kept = panes.map((pane) => pane.box);
  byId("panes").replaceChildren();
  panes = views.map(({ tree, view }, i) => {
    const pane = makePane(tree, place(view, data, state.details));
    if (!fit && kept.length === views.length) pane.set(kept[i]);
    else pane.fit();
    return pane;
  });
  if (around) for (const pane of panes) pane.centre(around);
  mark();
  byId("status").textContent = `${views.map(({ tree, view }) => `${tree.side.label || "graph"}: ${view.leaves.length} items, ${view.edges.length} edges shown`).join(" · ")} — click: attributes, double click: open or close, wheel: zoom, drag: move`;
  return true;
}

function makePane(tree, placed) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.innerHTML = `<style>${STYLE}</style><g class="${tree.side.label}">${sideSvg(placed, data)}</g>`;
  const label = element("div", { className: "label" }, element("b", {}, tree.side.label), element("span", {}, costsText(tree.side.costs)));
  const frame = element("div", { className: "pane" }, label);
  frame.append(svg);
  byId("panes").append(frame);
  const pane = { tree, placed, svg, box: null };
  const size = () => [frame.clientWidth || 800, frame.clientHeight || 600];
  pane.set = (box) => {
    pane.box = box;
    const [width, height] = size();
    svg.setAttribute("viewBox", `${box.x} ${box.y} ${width / box.scale} ${height / box.scale}`);
  };
  pane.fit = () => {
    const [width, height] = size();
    const scale = Math.min(1.4, (width - 24) / placed.width, (height - 60) / placed.height);
    pane.set({ scale, x: (placed.width - width / scale) / 2, y: -40 / scale });
  };
  pane.zoom = (factor, px, py) => {
    const [width, height] = size();
    const { x, y, scale } = pane.box;
    const [at, down] = [px === undefined ? width / 2 : px, py === undefined ? height / 2 : py];
    const next = Math.min(6, Math.max(0.02, scale * factor));
    pane.set({ scale: next, x: x + at / scale - at / next, y: y + down / scale - down / next });
  };
  pane.centre = (key) => {
    const target = placed.leaves.find((leaf) => leaf.item.key === key) || placed.clusters.find((c) => c.item.key === key);
    if (!target) return;
    const [width, height] = size();
    const scale = Math.max(pane.box.scale, 0.8);
    pane.set({ scale, x: target.x - width / 2 / scale, y: target.y - height / 2 / scale });
  };
  listen(pane);
  return pane;
}

function listen(pane) {
  const { svg } = pane;
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { left, top } = svg.getBoundingClientRect();
    pane.zoom(Math.exp(-event.deltaY * 0.0016), event.clientX - left, event.clientY - top);
  }, { passive: false });
  let from = null;
  svg.addEventListener("pointerdown", (event) => { from = { x: event.clientX, y: event.clientY, box: pane.box, moved: false }; });
  svg.addEventListener("pointermove", (event) => {
    if (!from) return;
    const [dx, dy] = [event.clientX - from.x, event.clientY - from.y];
    if (!from.moved && Math.abs(dx) + Math.abs(dy) < 4) return;
    if (!from.moved) svg.setPointerCapture(event.pointerId);
    from.moved = true;
    svg.classList.add("dragged");
    pane.set({ ...from.box, x: from.box.x - dx / from.box.scale, y: from.box.y - dy / from.box.scale });
  });
  const end = () => { svg.classList.remove("dragged"); setTimeout(() => { from = null; }); };
  svg.addEventListener("pointerup", end);
  svg.addEventListener("pointercancel", end);
  svg.addEventListener("click", (event) => {
    if (from && from.moved) return;
    const region = event.target.closest("[data-region]");
    const item = event.target.closest("[data-key]");
    if (item) select(item.dataset.key);
    else if (region) selectRegion(Number(region.dataset.region));
    else select(null);
  });
  svg.addEventListener("dblclick", (event) => {
    const item = event.target.closest("[data-key]");
    if (item) toggle(item.dataset.key);
  });
}

function toggle(key) {
  const item = itemOf(key);
  if (!item || !item.children) return;
  const was = state.open.has(key);
  if (was) state.open.delete(key);
  else state.open.add(key);
  if (redraw({ around: key })) return;
  state.open.delete(key);
  redraw();
  byId("status").textContent = `${key} holds too many items to show all of them at once; close other scopes first`;
}

function itemOf(key) {
  for (const tree of shownTrees()) if (tree.byKey.has(key)) return tree.byKey.get(key);
  for (const tree of trees) if (tree.byKey.has(key)) return tree.byKey.get(key);
  return null;
}

// Opens what an item is in, and brings it to the middle.
function reveal(key) {
  for (const tree of shownTrees()) {
    const item = tree.byKey.get(key);
    for (let above = item && item.parent; above; above = above.parent) if (!above.gone) state.open.add(above.key);
    if (item && item.node && isAside(item.node)) state.details.constants = true;
  }
  if (!redraw({ around: key })) {
    state.open = new Set([""]);
    reveal(key);
  }
  select(key);
}

function select(key) {
  state.selected = key;
  state.region = null;
  const section = byId("selected");
  section.hidden = key === null;
  section.replaceChildren();
  if (key !== null) describe(section, key);
  mark();
}

function selectRegion(number) {
  state.selected = null;
  state.region = number;
  const section = byId("selected");
  section.hidden = false;
  section.replaceChildren(...regionParts(number));
  mark();
}

function mark() {
  for (const { svg, placed } of panes) {
    const members = new Set(placed.leaves.filter((leaf) => state.region !== null && leaf.item.node && leaf.item.node.region === state.region).map((leaf) => leaf.item.key));
    for (const group of svg.querySelectorAll("[data-key]")) group.classList.toggle("selected", group.dataset.key === state.selected || members.has(group.dataset.key));
  }
}

function rows(pairs) {
  return element("table", {}, element("tbody", {}, ...pairs.map(([name, value]) => element("tr", {}, element("th", {}, name), element("td", {}, value)))));
}

function describe(section, key) {
  const found = shownTrees().map((tree) => [tree.side.label, tree.byKey.get(key)]).filter(([, item]) => item);
  const item = found.length ? found[0][1] : itemOf(key);
  if (!item) return;
  section.append(element("h2", {}, item.node ? item.node.op : item.label), element("div", { className: "small" }, key));
  if (item.children) section.append(element("p", {}, element("button", { onclick: () => toggle(key) }, state.open.has(key) ? "close" : `open (${item.total.ops} ops)`)));
  for (const [label, { node }] of found) {
    if (!node) continue;
    const differs = found.length > 1 && found.every(([, other]) => other.node) && (node.change || found.some(([, other]) => other.node.change));
    if (node.change || differs) section.append(element("div", { className: `note ${node.change || ""}` }, `${label}: ${node.change || "same"}`, ...(node.notes || []).map((note) => element("div", { className: "small" }, note))));
  }
  for (const [label, { node }] of found.slice(-1)) {
    if (!node) continue;
    const text = (i) => data.strings[i];
    const pairs = [];
    (node.out || []).forEach((i, port) => pairs.push([`output ${port}`, text(i)]));
    if (node.device !== undefined) pairs.push(["device", text(node.device)]);
    if (node.source !== undefined) pairs.push(["made at", text(node.source)]);
    for (const i of node.attrs || []) {
      const [name] = text(i).split(":", 1);
      pairs.push([name, text(i).slice(name.length + 2)]);
    }
    section.append(element("h2", {}, found.length > 1 ? `attributes, ${label}` : "attributes"), rows(pairs));
    section.append(...neighbours(found[found.length - 1][1]));
  }
  if (item.node && item.node.region !== undefined) section.append(...regionParts(item.node.region));
}

function neighbours(item) {
  const tree = shownTrees().find((t) => t.byKey.get(item.key) === item);
  if (!tree) return [];
  const list = (title, edges, end) => (edges.length ? [element("h2", {}, title), element("ul", {}, ...edges.slice(0, 30).map((edge) => jump(edge[end].key, `${edge[end].node.op} ${edge[end].label}${edge.control ? " (control)" : end === "from" && edge.port ? `:${edge.port}` : ""}`)))] : []);
  return [...list("reads", tree.edges.filter((edge) => edge.to === item), "from"), ...list("read by", tree.edges.filter((edge) => edge.from === item), "to")];
}

function jump(key, text) {
  return element("li", {}, element("button", { onclick: () => reveal(key), title: key }, text));
}

function regionParts(number) {
  const region = data.regions[number];
  const parts = [element("h2", {}, `fused: ${region.rule}`)];
  if (region.source) parts.push(element("div", { className: "small" }, region.source));
  for (const note of region.notes) parts.push(element("div", { className: "note added small" }, note));
  for (const tree of trees) {
    const members = tree.items.filter((item) => item.node && item.node.region === number);
    if (members.length) parts.push(element("h2", {}, tree.side.label), element("ul", {}, ...members.map((item) => jump(item.key, `${item.node.op.replace(PREFIX, "")} ${item.label}`))));
  }
  return parts;
}

// The fused chains by rule; a click shows one.
function regionList() {
  const members = new Map();
  for (const tree of [...trees].reverse()) for (const item of tree.items) if (item.node && item.node.region !== undefined && !members.has(item.node.region)) members.set(item.node.region, item);
  const groups = new Map();
  data.regions.forEach((region, i) => groups.set(region.rule, [...(groups.get(region.rule) || []), i]));
  const entry = (i) => {
    const item = members.get(i);
    const show = () => { if (item) reveal(item.key); selectRegion(i); };
    const source = data.regions[i].source;
    return element("li", {}, element("button", { onclick: show, title: source || "" }, item ? item.key.replace(/_fused$/, "") : data.regions[i].rule, element("span", { className: "small" }, source ? ` ${source.split("/").pop()}` : "")));
  };
  const list = element("div", { id: "regions" });
  for (const [rule, numbers] of groups) list.append(element("details", { open: data.regions.length <= 12 }, element("summary", {}, `${rule} × ${numbers.length}`), element("ul", {}, ...numbers.map(entry))));
  return list;
}

function summarise() {
  const number = (value) => element("td", { className: "number" }, value);
  const header = element("tr", {}, element("th", {}), ...data.sides.map((side) => element("th", { className: "number" }, side.label)));
  const line = (name, value) => element("tr", {}, element("th", {}, name), ...data.sides.map((side) => number(value(side.costs))));
  const table = element("table", {}, element("tbody", {}, header, line("ops", (c) => c.ops), line("kernels launched", (c) => c.kernels), line("bytes between ops", (c) => `${c.unknown ? "≥ " : ""}${bytesText(c.bytes)}`)));
  const parts = [element("h2", {}, "Counts"), table];
  const kinds = { removed: "removed", added: "added", altered: "attributes altered", rewired: "reads something else" };
  const legend = Object.entries(kinds).map(([kind, text]) => [kind, data.changes[kind] === undefined ? text : `${text}: ${data.changes[kind]}`]);
  legend.push(["fused", "fused op"], ["region", "fused chain"], ["", "unchanged"], ["scope", "scope or function: double click opens"], ["control", "control edge"]);
  parts.push(element("h2", {}, "Legend"), element("ul", {}, ...legend.map(([kind, text]) => element("li", {}, element("span", { className: `swatch ${kind}` }), text))));
  if (data.regions.length) parts.push(element("h2", {}, `Fused chains: ${data.regions.length}`), regionList());
  byId("summary").replaceChildren(...parts);
}

function find(text) {
  const section = byId("found");
  section.replaceChildren();
  section.hidden = !text;
  if (!text) return;
  const wanted = text.toLowerCase();
  const opOf = (item) => (item.node ? item.node.op.replace(PREFIX, "").toLowerCase() : "");
  const found = new Map();
  for (const tree of shownTrees()) {
    for (const item of tree.items) {
      if (!item.gone && item.key && (item.key.toLowerCase().includes(wanted) || opOf(item).includes(wanted))) found.set(item.key, item);
    }
  }
  // Ops of exactly that type or name come first.
  const rank = (item) => (opOf(item) === wanted || item.label.toLowerCase() === wanted ? 0 : 1);
  const shown = [...found.values()].sort((a, b) => rank(a) - rank(b)).slice(0, MOST_FOUND);
  section.append(element("h2", {}, `${found.size} found${found.size > shown.length ? `, the first ${shown.length}` : ""}`), element("ul", {}, ...shown.map((item) => jump(item.key, `${item.node ? item.node.op.replace(PREFIX, "") : item.kind} ${item.key}`))));
}

function level(opening) {
  const next = new Set(opening ? state.open : [""]);
  if (opening) for (const tree of shownTrees()) for (const { item } of visible(tree, state.open, state.details).leaves) if (item.children) next.add(item.key);
  const before = state.open;
  state.open = next;
  if (redraw()) return;
  state.open = before;
  byId("status").textContent = "One more level would be too many items at once; open single scopes by double click";
}

function save() {
  const sides = panes.map(({ tree, placed }) => [tree.side.label, tree.side.costs, placed]);
  const link = element("a", { href: URL.createObjectURL(new Blob([pictureSvg(data, sides)], { type: "image/svg+xml" })), download: `${data.title.replace(/[^\w.-]+/g, "_")}.svg` });
  link.click();
  URL.revokeObjectURL(link.href);
}

function pressed(group, names, current, press) {
  byId(group).replaceChildren(...names.map((name) => element("button", { onclick: () => press(name), ariaPressed: String(current(name)) }, name)));
}

function tools() {
  const modes = data.sides.length > 1 ? ["side by side", "overlaid", "before", "after"] : [];
  pressed("modes", modes, (name) => name === state.mode, (name) => { state.mode = name; tools(); redraw(); });
  // "constants" stands for everything that `isAside`.
  pressed("details", Object.keys(state.details), (name) => state.details[name], (name) => { state.details[name] = !state.details[name]; tools(); redraw({ fit: false }); });
}

function start() {
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.subtitle;
  state.open = initiallyOpen(trees, PAGE_BUDGET);
  tools();
  summarise();
  redraw();
  byId("open").onclick = () => level(true);
  byId("close").onclick = () => level(false);
  byId("fit").onclick = () => panes.forEach((pane) => pane.fit());
  byId("larger").onclick = () => panes.forEach((pane) => pane.zoom(1.3));
  byId("smaller").onclick = () => panes.forEach((pane) => pane.zoom(1 / 1.3));
  byId("save").onclick = save;
  byId("search").addEventListener("input", (event) => find(event.target.value.trim()));
  byId("search").addEventListener("keydown", (event) => {
    const first = byId("found").querySelector("li button");
    if (event.key === "Enter" && first) first.click();
    if (event.key === "Escape") { event.target.value = ""; find(""); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT") return;
    if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
    if (event.key === "0") panes.forEach((pane) => pane.fit());
    if (event.key === "+" || event.key === "=") panes.forEach((pane) => pane.zoom(1.3));
    if (event.key === "-") panes.forEach((pane) => pane.zoom(1 / 1.3));
    if (event.key === "Escape") select(null);
  });
  window.addEventListener("resize", () => panes.forEach((pane) => pane.fit()));
}

start();
