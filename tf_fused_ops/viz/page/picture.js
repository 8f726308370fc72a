// Places what is visible (with dagre) and writes it as SVG text.

const FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif";
const CHAR = 6.6;  // average width of a character at 12 px
const LABEL = 8;
const QUIET = new Set(["Const", "Placeholder", "Identity", "NoOp", "ReadVariableOp", "_Arg", "_Retval", "VarHandleOp"]);
const PREFIX = "TfFusedOps>";

const STYLE = `
text{font-family:${FONT};font-size:12px;fill:#1f2937}
.small{font-size:10px;fill:#6b7280}
.node rect{fill:#fff;stroke:#9ca3af;stroke-width:1}
.quiet rect{fill:#f9fafb;stroke:#d1d5db}
.quiet text{fill:#6b7280}
.scope rect,.part rect{fill:#eef1f5;stroke:#9ca3af}
.call rect{fill:#eef1f5;stroke:#6b7280;stroke-dasharray:none}
.removed rect{fill:#fde9dc;stroke:#d55e00;stroke-width:1.4}
.added rect{fill:#dcecfa;stroke:#0072b2;stroke-width:1.4}
.altered rect{fill:#fdf3cf;stroke:#b58900;stroke-width:1.4}
.rewired rect{stroke:#b58900;stroke-dasharray:3 2;stroke-width:1.4}
.fused rect{fill:#0072b2;stroke:#005a8c}
.fused text,.fused .small{fill:#fff}
.node text{text-anchor:middle}
.cluster rect{fill:#000;fill-opacity:.025;stroke:#cbd5e1}
.cluster text{font-size:11px;fill:#64748b}
.region rect{fill:#d55e00;fill-opacity:.05;stroke:#d55e00;stroke-width:1.2;stroke-dasharray:5 3}
.region text,.cluster text{paint-order:stroke;stroke:#fff;stroke-width:3px;stroke-linejoin:round}
.region text{font-size:11px;font-weight:600;fill:#b04a00}
.edge path{fill:none;stroke:#9ca3af;stroke-width:1.1}
.edge polygon{fill:#9ca3af}
.edge text{font-size:10px;fill:#6b7280;text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:3px}
.control path{stroke-dasharray:4 3}
.edge.removed path{stroke:#d55e00}.edge.removed polygon{fill:#d55e00}
.edge.added path{stroke:#0072b2}.edge.added polygon{fill:#0072b2}
.title{font-size:16px;font-weight:600}
.caption{font-size:13px;font-weight:600}
.plain{font-size:12px;fill:#4b5563}
.count{font-size:10px}
.minus{fill:#d55e00}.plus{fill:#0072b2}.tilde{fill:#946f00}
`;

function escapeText(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

function textWidth(text, size = 12) {
  let width = 0;
  for (const c of String(text)) width += "iljtfI.,:;|!'[]()/ ".includes(c) ? 0.55 : "mwMW@…".includes(c) ? 1.5 : c >= "A" && c <= "Z" ? 1.15 : 1;
  return (width * CHAR * size) / 12;
}

function shorten(text, longest = 34) {
  return text.length <= longest ? text : `${text.slice(0, 12)}…${text.slice(13 - longest)}`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function costsText(costs) {
  if (!costs) return "";
  const bound = costs.unknown ? "≥ " : "";  // tensors of unknown shape are not counted
  return `${plural(costs.ops, "op")} · ${plural(costs.kernels, "kernel")} · ${bound}${bytesText(costs.bytes)} between ops`;
}

// Returns the lines of text in a leaf: [text, CSS class] each.
function leafLines(leaf, data, options) {
  const { item } = leaf;
  const node = item.node;
  if (!node) return [[shorten(item.label), ""], [plural(item.total.ops, "op"), "small"]];
  const op = node.op.replace(PREFIX, "");
  const lines = [[op, ""]];
  if (op === "Const" && node.attrs) {
    const value = node.attrs.map((i) => data.strings[i]).find((text) => text.startsWith("value: "));
    const literal = value && value.match(/\[\] (.*)$/);
    const number = literal && Number(literal[1]);
    const text = literal && (Number.isFinite(number) ? String(Number(number.toPrecision(6))) : literal[1]);
    lines.push([literal ? shorten(text, 16) : shorten(item.label, 20), "small"]);
  } else if (!leaf.stand) lines.push([shorten(item.label), "small"]);
  if (leaf.alone) lines.push([data.regions[node.region].rule, "small"]);
  if (item.kind === "call" && !leaf.stand) lines.push([`runs ${plural(item.total.ops - 1, "op")}`, "small"]);
  if (options.devices && node.device !== undefined) lines.push([data.strings[node.device].replace(/^.*device:/, ""), "small"]);
  if (options.layouts && node.layout) lines.push([node.layout, "small"]);
  return lines;
}

function leafClasses(leaf) {
  const { item } = leaf;
  const node = item.node;
  const names = ["node", item.kind];
  if (node && node.change) names.push(node.change);
  if (node && QUIET.has(node.op)) names.push("quiet");
  if (node && (node.op.startsWith(PREFIX) || (node.change === "added" && node.op.includes("Fused")))) names.push("fused");
  return names.join(" ");
}

function tally(item) {
  const signs = [["removed", "−", "minus"], ["added", "+", "plus"], ["altered", "~", "tilde"], ["rewired", "~", "tilde"]];
  return signs.filter(([kind]) => item.total.changes[kind]).map(([kind, sign, name]) => [`${sign}${item.total.changes[kind]}`, name]);
}

// Returns a box per fused region and parent cluster for the nodes that were replaced; other members name their rule.
function regionClusters(view) {
  const boxes = new Map();
  for (const leaf of view.leaves) {
    const region = leaf.item.node ? leaf.item.node.region : undefined;
    if (region === undefined || leaf.stand) continue;
    if (leaf.item.node.change !== "removed") {
      leaf.alone = true;
      continue;
    }
    const key = `${region}\n${leaf.parent ? leaf.parent.item.key : ""}`;
    if (!boxes.has(key)) boxes.set(key, { region, parent: leaf.parent, members: [], id: `region ${key}` });
    boxes.get(key).members.push(leaf);
  }
  for (const box of boxes.values()) if (box.members.length === 1) box.members[0].alone = true;
  return [...boxes.values()].filter((box) => box.members.length > 1);
}

// Returns the placed view: {width, height, leaves, clusters, regions, edges}, with x, y (centres), w, h and points.
function place(view, data, options) {
  const graph = new dagre.graphlib.Graph({ compound: true, multigraph: false });
  graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 34, edgesep: 10, marginx: 8, marginy: 8 });
  const regions = regionClusters(view);
  for (const leaf of view.leaves) {
    leaf.lines = leafLines(leaf, data, options);
    leaf.tally = leaf.item.node ? [] : tally(leaf.item);
    const width = Math.max(...leaf.lines.map(([text, name]) => textWidth(text, name ? 10 : 12)), leaf.tally.length * 26);
    leaf.w = width + 18;
    leaf.h = leaf.lines.length * 13 + 9 + (leaf.tally.length ? 12 : 0);
    graph.setNode(leaf.id, { width: leaf.w, height: leaf.h });
  }
  const clusterId = (cluster) => `cluster ${cluster.item.key}`;
  for (const cluster of view.clusters) graph.setNode(clusterId(cluster), {});
  const inRegion = new Map();
  for (const box of regions) {
    graph.setNode(box.id, {});
    for (const leaf of box.members) inRegion.set(leaf, box);
    if (box.parent) graph.setParent(box.id, clusterId(box.parent));
  }
  for (const cluster of view.clusters) if (cluster.parent) graph.setParent(clusterId(cluster), clusterId(cluster.parent));
  for (const leaf of view.leaves) {
    const box = inRegion.get(leaf);
    if (box) graph.setParent(leaf.id, box.id);
    else if (leaf.parent) graph.setParent(leaf.id, clusterId(leaf.parent));
  }
  for (const edge of view.edges) {
    edge.text = edgeText(edge, data, options);
    const label = edge.text ? { width: textWidth(edge.text, 10) + 6, height: 12, labelpos: "c" } : {};
    graph.setEdge(edge.from.id, edge.to.id, { ...label, weight: edge.control ? 1 : 2 });
  }
  dagre.layout(graph);
  for (const leaf of view.leaves) Object.assign(leaf, pick(graph.node(leaf.id)));
  const box = (id) => {  // A little higher than dagre makes it, for the label.
    const { x, y, width, height } = graph.node(id);
    return { x, y: y - LABEL / 2, w: width, h: height + LABEL };
  };
  for (const cluster of view.clusters) Object.assign(cluster, box(clusterId(cluster)));
  for (const region of regions) Object.assign(region, box(region.id));
  for (const edge of view.edges) {
    const placed = graph.edge(edge.from.id, edge.to.id);
    edge.points = placed.points;
    edge.at = edge.text ? { x: placed.x, y: placed.y } : null;
  }
  const { width, height } = graph.graph();
  return { width: Math.max(width || 0, 60), height: Math.max(height || 0, 30), ...view, regions };
}

function pick({ x, y }) {
  return { x, y };
}

function edgeText(edge, data, options) {
  const parts = [];
  const scalar = edge.from.item.node && edge.from.item.node.op === "Const" && edge.tensors.size === 1 && data.strings[[...edge.tensors][0]].endsWith("[]");
  if (options.shapes && edge.tensors.size && !scalar) {
    const [first, ...rest] = [...edge.tensors].map((i) => data.strings[i]);
    parts.push(rest.length ? `${edge.tensors.size} tensors` : first.replace("float", "f").replace("int", "i"));
  } else if (edge.count > 1 && edge.tensors.size > 1) parts.push(`${edge.tensors.size} tensors`);
  const ports = [...edge.ports].filter((port) => port > 0);
  if (ports.length && edge.tensors.size < 2) parts.unshift(`:${[...edge.ports].join(",")}`);
  return parts.join(" ");
}

function round(value) {
  return Math.round(value * 10) / 10;
}

// A smooth curve through the points of an edge.
function curve(points) {
  const p = points.map(({ x, y }) => [round(x), round(y)]);
  if (p.length < 3) return `M${p.join("L")}`;
  let path = `M${p[0]}`;
  for (let i = 1; i < p.length - 1; i++) {
    const last = i === p.length - 2;
    const end = last ? p[i + 1] : [round((p[i][0] + p[i + 1][0]) / 2), round((p[i][1] + p[i + 1][1]) / 2)];
    path += `Q${p[i]} ${end}`;
  }
  return path;
}

function arrow(points) {
  const end = points[points.length - 1];
  const before = points[points.length - 2];
  const angle = Math.atan2(end.y - before.y, end.x - before.x);
  const corner = (turn) => `${round(end.x - 7 * Math.cos(angle + turn))},${round(end.y - 7 * Math.sin(angle + turn))}`;
  return `<polygon points="${round(end.x)},${round(end.y)} ${corner(0.42)} ${corner(-0.42)}"/>`;
}

function rectangle({ x, y, w, h }, radius) {
  return `<rect x="${round(x - w / 2)}" y="${round(y - h / 2)}" width="${round(w)}" height="${round(h)}" rx="${radius}"/>`;
}

function leafSvg(leaf) {
  const radius = leaf.item.node ? 4 : 8;
  let y = leaf.y - leaf.h / 2 + 15;
  let text = "";
  for (const [line, name] of leaf.lines) {
    text += `<text class="${name}" x="${round(leaf.x)}" y="${round(y)}">${escapeText(line)}</text>`;
    y += 13;
  }
  if (leaf.tally.length) {
    const spans = leaf.tally.map(([count, name]) => `<tspan class="${name}" dx="3">${count}</tspan>`).join("");
    text += `<text class="count" x="${round(leaf.x)}" y="${round(y)}">${spans}</text>`;
  }
  const shadow = leaf.item.children && !leaf.stand ? rectangle({ ...leaf, x: leaf.x + 3, y: leaf.y + 3 }, radius) : "";
  return `<g class="${leafClasses(leaf)}" data-key="${escapeText(leaf.item.key)}"><title>${escapeText(leaf.item.key)}</title>${shadow}${rectangle(leaf, radius)}${text}</g>`;
}

function clusterSvg(cluster) {
  const label = cluster.item.node ? `${cluster.item.node.op} ${cluster.item.label}` : cluster.item.label;
  return `<g class="cluster" data-key="${escapeText(cluster.item.key)}"><title>${escapeText(cluster.item.key)}</title>${rectangle(cluster, 6)}<text x="${round(cluster.x - cluster.w / 2 + 6)}" y="${round(cluster.y - cluster.h / 2 + 12)}">${escapeText(shorten(label, 40))}</text></g>`;
}

function regionSvg(region) {
  return `<g class="region" data-region="${region.region}">${rectangle(region, 8)}</g>`;
}

// The labels come after the edges, so that none runs through them.
function regionLabelSvg(region, data) {
  const at = `x="${round(region.x - region.w / 2 + 6)}" y="${round(region.y - region.h / 2 + 13)}"`;
  return `<g class="region" data-region="${region.region}"><text ${at}>${escapeText(data.regions[region.region].rule)}</text></g>`;
}

function edgeSvg(edge) {
  const names = ["edge", edge.control ? "control" : "", edge.change || ""].filter(Boolean).join(" ");
  const text = edge.at ? `<text x="${round(edge.at.x)}" y="${round(edge.at.y + 3)}">${escapeText(edge.text)}</text>` : "";
  return `<g class="${names}"><path d="${curve(edge.points)}"/>${arrow(edge.points)}${text}</g>`;
}

// Returns the content of one side as SVG groups.
function sideSvg(placed, data) {
  return [
    ...placed.clusters.map(clusterSvg),
    ...placed.regions.map((region) => regionSvg(region)),
    ...placed.edges.map(edgeSvg),
    ...placed.regions.map((region) => regionLabelSvg(region, data)),
    ...placed.leaves.map(leafSvg),
  ].join("\n");
}

const LEGEND = [
  ["node removed", "removed"], ["node added", "added"], ["node added fused", "fused op"], ["node altered", "attributes altered"],
  ["node rewired", "reads something else"], ["node", "unchanged"], ["region", "fused chain"],
];

function legendSvg(y) {
  let x = 12;
  const parts = LEGEND.map(([name, text]) => {
    const entry = `<g class="${name}"><rect x="${x}" y="${y - 10}" width="22" height="13" rx="3"/></g><text class="plain" x="${x + 28}" y="${y + 1}">${text}</text>`;
    x += 44 + textWidth(text);
    return entry;
  });
  parts.push(`<g class="edge control"><path d="M${round(x)} ${y - 3}h24"/></g><text class="plain" x="${round(x + 30)}" y="${y + 1}">control edge</text>`);
  return { svg: parts.join(""), width: x + 110 };
}

// Returns a whole picture: all sides next to each other under a title, with counts and legend.
function pictureSvg(data, sides) {
  const gap = 40;
  const head = data.subtitle ? 64 : 48;
  let x = 12;
  let body = "";
  let height = 0;
  for (const [label, costs, placed] of sides) {
    const caption = label ? `${label}: ` : "";
    const width = Math.max(placed.width, textWidth(caption + costsText(costs), 12.5));
    body += `<g class="${label}"><text class="caption" x="${round(x + 4)}" y="${head + 14}">${escapeText(caption)}<tspan class="plain">${escapeText(costsText(costs))}</tspan></text>`;
    body += `<g transform="translate(${round(x)},${head + 22})">${sideSvg(placed, data)}</g></g>`;
    x += width + gap;
    height = Math.max(height, placed.height);
  }
  const bottom = head + 22 + height + 26;
  const legend = sides.length > 1 ? legendSvg(bottom) : { svg: "", width: 0 };
  const width = Math.ceil(Math.max(x - gap + 12, legend.width, textWidth(data.title, 16) + 24));
  const total = Math.ceil(sides.length > 1 ? bottom + 16 : bottom - 14);
  const subtitle = data.subtitle ? `<text class="plain" x="16" y="46">${escapeText(data.subtitle)}</text>` : "";
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${total}" viewBox="0 0 ${width} ${total}"><style>${STYLE}</style><rect width="100%" height="100%" fill="#fff"/><text class="title" x="16" y="26">${escapeText(data.title)}</text>${subtitle}${body}${legend.svg}</svg>`;
}

// Draws a payload with everything decided: used where there is no page.
function draw(data, choice) {
  const trees = data.sides.map(buildTree);
  const open = choice.open ? new Set(["", ...choice.open]) : initiallyOpen(trees, choice.budget);
  if (choice.everything) for (const tree of trees) for (const item of tree.items) open.add(item.key);
  const sides = trees.map((tree) => {
    const options = { constants: choice.constants, ...choice.details };
    const view = visible(tree, open, options);
    if (choice.shapesBelow && view.leaves.length <= choice.shapesBelow) options.shapes = true;
    return [tree.side.label, tree.side.costs, place(view, data, options)];
  });
  return { svg: pictureSvg(data, sides), visible: sides.map(([, , placed]) => placed.leaves.map((leaf) => leaf.id)) };
}
