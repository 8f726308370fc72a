// The tree of scopes of a program, and what of it is visible while some scopes are open.
//
// Items of the tree: {key, label, kind, parent, children, node, graph}. kind is "node" (an op), "scope" (a name scope),
// "call" (an op that runs functions; its children are their bodies), "body" and "part" (a run of a scope with too many
// children). Keys are made of names, so that both sides of a comparison share them.

const MOST_CHILDREN = 80;
const FEW_CHILDREN = 25;
const SERIES = 8;
const SMALL_SCOPE = 6;
const MOST_WAITED = 8;
const MOST_ITEMS = 60000;

function buildTree(side) {
  const tree = { side, items: [], edges: [], byGraph: new Map(), root: null };
  const graphs = new Map(side.graphs.map((graph) => [graph.name, graph]));
  tree.root = newItem(tree, { key: "", label: "", kind: "scope", parent: null, children: [] });
  instantiate(tree, graphs, side.graphs[0], tree.root, "", []);
  condense(tree, tree.root);
  for (const item of [...tree.items]) if (item.children && item.children.length > FEW_CHILDREN) gather(tree, item);
  for (const item of tree.items) if (item.children && item.children.length > MOST_CHILDREN) divide(tree, item);
  summarize(tree.root);
  tree.byKey = new Map(tree.items.map((item) => [item.key, item]));
  return tree;
}

function newItem(tree, item) {
  item.index = tree.items.length;
  tree.items.push(item);
  return item;
}

// Adds the nodes of a graph below `parent`, and the bodies that they call.
function instantiate(tree, graphs, graph, parent, prefix, stack) {
  const scopes = new Map([["", parent]]);
  const scopeOf = (name) => {
    const slash = name.lastIndexOf("/");
    const path = slash < 0 ? "" : name.slice(0, slash);
    if (!scopes.has(path)) {
      const above = scopeOf(path);
      const scope = newItem(tree, { key: `${prefix}${path}/`, label: path.slice(path.lastIndexOf("/") + 1), kind: "scope", parent: above, children: [] });
      above.children.push(scope);
      scopes.set(path, scope);
    }
    return scopes.get(path);
  };
  const items = graph.nodes.map((node) => {
    const scope = scopeOf(node.name);
    const item = newItem(tree, { key: prefix + node.name, label: node.name.slice(node.name.lastIndexOf("/") + 1), kind: "node", parent: scope, children: null, node, graph: graph.name });
    scope.children.push(item);
    return item;
  });
  graph.nodes.forEach((node, i) => {
    (node.in || []).forEach(([source, port, own], place) => tree.edges.push({ from: items[source], to: items[i], port, slot: own === undefined ? place : own, control: false }));
    (node.controls || []).forEach((source) => tree.edges.push({ from: items[source], to: items[i], port: -1, slot: -1, control: true }));
  });
  const instance = { items, arguments: (graph.arguments || []).map((i) => items[i]), results: (graph.results || []).map(([i, port]) => [items[i], port]) };
  if (!tree.byGraph.has(graph.name)) tree.byGraph.set(graph.name, instance);
  for (const item of items) {
    const bodies = (item.node.calls || []).filter(([, name]) => graphs.has(name) && !stack.includes(name));
    const size = bodies.reduce((sum, [, name]) => sum + graphs.get(name).nodes.length, 0);
    if (!bodies.length || tree.items.length + size > MOST_ITEMS) continue;
    Object.assign(item, { kind: "call", children: [], bodies: [] });
    for (const [attr, name] of bodies) {
      const key = `${item.key}!${attr}/`;
      const body = newItem(tree, { key, label: attr, kind: "body", parent: item, children: [] });
      item.children.push(body);
      item.bodies.push({ attr, ...instantiate(tree, graphs, graphs.get(name), body, key, [...stack, name]) });
    }
  }
  return instance;
}

// Replaces scopes and bodies that hold one item by that item.
function condense(tree, item) {
  item.children = item.children.map((child) => {
    if (child.children) condense(tree, child);
    const only = child.kind === "scope" && child.children.length === 1 ? child.children[0] : null;
    if (!only) return child;
    only.label = `${child.label}/${only.label}`;
    only.parent = item;
    child.gone = true;
    return only;
  });
  if (item.kind === "call" && item.children.length === 1) {
    const body = item.children[0];
    item.children = body.children;
    for (const child of item.children) child.parent = item;
    body.gone = true;
  }
}

// Gathers ops and small scopes that differ in a number only (AddN, AddN_1, AddN_2, ...) in a scope with many children.
function gather(tree, item) {
  const series = new Map();
  for (const child of item.children) {
    const handle = child.node && child.node.handle;
    const label = handle ? "variables" : child.label.replace(/_?\d+$/, "");
    const kind = child.kind === "node" && !handle ? child.node.op.split(">").pop() : "scope";
    if (kind === "scope" && size(child) > SMALL_SCOPE) continue;
    const key = `${kind} ${label}`;
    series.set(key, [...(series.get(key) || []), child]);
  }
  for (const [name, members] of series) {
    if (members.length < SERIES) continue;
    const [kind, label] = name.split(" ");
    const part = newItem(tree, { key: `${item.key}#${name}/`, label: `${kind === "scope" ? label : kind} × ${members.length}`, kind: "part", parent: item, children: members });
    for (const member of members) member.parent = part;
    item.children = [...item.children.filter((child) => child.parent === item), part];
  }
}

function size(item) {
  let count = 0;
  descend(item, () => { count += 1; });
  return count;
}

// Parts the children of an item into runs in the order of the data flow.
function divide(tree, item) {
  const order = flowOrder(tree, item);
  const length = Math.max(Math.ceil(Math.sqrt(order.length)), Math.ceil(order.length / MOST_CHILDREN));
  const parts = [];
  const name = item.kind === "part" || !item.label ? "" : `${item.label} `;
  for (let start = 0; start < order.length; start += length) {
    const members = order.slice(start, start + length);
    const end = start + members.length;
    const part = newItem(tree, { key: `${item.key}#${start + 1}-${end}/`, label: `${name}${start + 1}–${end}`, kind: "part", parent: item, children: members });
    for (const member of members) member.parent = part;
    parts.push(part);
  }
  item.children = parts;
}

// Orders the children of an item so that each comes after what it reads and near to it.
function flowOrder(tree, item) {
  const child = new Map();
  for (const member of item.children) descend(member, (below) => child.set(below, member));
  const read = new Map(item.children.map((member) => [member, new Set()]));
  const sinks = new Set(item.children);
  for (const edge of tree.edges) {
    const [from, to] = [child.get(edge.from), child.get(edge.to)];
    if (from && to && from !== to) {
      read.get(to).add(from);
      sinks.delete(from);
    }
  }
  const order = [];
  const seen = new Set();
  for (const start of [...sinks, ...item.children]) {
    const stack = [[start, false]];
    while (stack.length) {
      const [member, done] = stack.pop();
      if (done) order.push(member);
      if (done || seen.has(member)) continue;
      seen.add(member);
      stack.push([member, true], ...[...read.get(member)].reverse().map((from) => [from, false]));
    }
  }
  return order;
}

function descend(item, visit) {
  visit(item);
  for (const child of item.children || []) descend(child, visit);
}

// What only clutters a picture: unchanged constants, handles of variables, and ops that merely wait for everything.
function isAside(node) {
  return !node.change && (node.op === "Const" || node.handle || (node.op === "NoOp" && (node.controls || []).length > MOST_WAITED));
}

// Counts what is in each item: ops, and how many of them changed in which way.
function summarize(item) {
  const total = { ops: item.node ? 1 : 0, changes: {}, constants: item.node && isAside(item.node) ? 1 : 0 };
  if (item.node && item.node.change) total.changes[item.node.change] = 1;
  for (const child of item.children || []) {
    const inner = summarize(child);
    total.ops += inner.ops;
    total.constants += inner.constants;
    for (const kind in inner.changes) total.changes[kind] = (total.changes[kind] || 0) + inner.changes[kind];
  }
  item.total = total;
  return total;
}

function changed(item) {
  return Object.keys(item.total.changes).length > 0;
}

// Returns the keys of the items to open first: those with changes, then the largest view within a budget.
function initiallyOpen(trees, budget) {
  const open = new Set([""]);
  for (const tree of trees) {
    const queue = [...tree.root.children];
    let count = queue.length;
    const closed = (item) => item.children && item.children.length;
    for (;;) {
      const fits = (item) => count + item.children.length - 1 <= budget && (item.kind !== "part" || count < FEW_CHILDREN / 2);
      const candidates = queue.filter((item) => closed(item) && (open.has(item.key) || fits(item)));
      if (!candidates.length) break;
      candidates.sort((a, b) => open.has(b.key) - open.has(a.key) || changed(b) - changed(a) || a.children.length - b.children.length);
      const item = candidates[0];
      open.add(item.key);
      queue.splice(queue.indexOf(item), 1, ...item.children);
      count += item.children.length - 1;
    }
  }
  return open;
}

// Returns {leaves, clusters, edges}: what is to be drawn while the items with the keys in `open` are open.
function visible(tree, open, options) {
  const leaves = [];
  const clusters = [];
  const shown = new Array(tree.items.length).fill(null);
  const hidden = (item) => !options.constants && item.total.constants === item.total.ops;
  const close = (item, leaf) => descend(item, (below) => { shown[below.index] = leaf; });
  const walk = (item, cluster) => {
    for (const child of item.children) {
      if (hidden(child)) continue;
      if (child.children && child.children.length && open.has(child.key)) {
        const inner = { item: child, parent: cluster };
        clusters.push(inner);
        walk(child, inner);
      } else {
        const leaf = { id: child.key, item: child, parent: cluster };
        leaves.push(leaf);
        close(child, leaf);
      }
    }
  };
  walk(tree.root, null);
  const stand = (item) => {  // An op in whose place its functions' bodies are shown, for edges that end at itself.
    if (!shown[item.index]) {
      const cluster = clusters.find((c) => c.item === item);
      if (!cluster) return null;
      const leaf = { id: `${item.key}!`, item, parent: cluster, stand: true };
      leaves.push(leaf);
      shown[item.index] = leaf;
    }
    return shown[item.index];
  };
  const isOpen = (item) => item.bodies && open.has(item.key) && clusters.some((c) => c.item === item);
  const targets = (item, slot) => {
    if (!isOpen(item)) return [shown[item.index]];
    const found = slot < 0 ? [] : item.bodies.map((body) => body.arguments[slot - (["If", "StatelessIf", "Case", "StatelessCase"].includes(item.node.op) ? 1 : 0)]).filter(Boolean);
    return found.length ? found.map((argument) => shown[argument.index]) : [stand(item)];
  };
  const sources = (item, port) => {
    if (!isOpen(item)) return [[shown[item.index], item, port]];
    const bodies = item.node.op.endsWith("While") ? item.bodies.filter((body) => body.attr === "body") : item.bodies;
    const found = port < 0 ? [] : bodies.map((body) => body.results[port]).filter(Boolean);
    return found.length ? found.flatMap(([result, from]) => sources(result, from)) : [[stand(item), item, port]];
  };
  const edges = new Map();
  for (const edge of tree.edges) {
    for (const [from, item, port] of sources(edge.from, edge.port)) {
      for (const to of targets(edge.to, edge.slot)) {
        if (!from || !to || from === to) continue;
        const key = `${from.id}\n${to.id}`;
        const found = edges.get(key) || { from, to, count: 0, control: true, ports: new Set(), tensors: new Set(), change: null };
        found.count += 1;
        found.control = found.control && edge.control;
        if (edge.control) { edges.set(key, found); continue; }
        found.ports.add(port);
        if (item.node.out && item.node.out[port] !== undefined) found.tensors.add(item.node.out[port]);
        for (const end of [edge.from.node, edge.to.node]) if (["removed", "added"].includes(end.change)) found.change = end.change;
        edges.set(key, found);
      }
    }
  }
  return { leaves, clusters, edges: [...edges.values()] };
}

// Merges both sides into one: nodes that went, nodes that came, and what stayed.
function overlay(before, after) {
  const graphs = after.graphs.map((graph) => {
    const old = before.graphs.find((g) => g.name === graph.name) || before.graphs.find((g) => `${g.name}_fused` === graph.name);
    if (!old) return graph;
    const nodes = graph.nodes.map((node) => ({ ...node, in: [...(node.in || [])], controls: [...(node.controls || [])] }));
    const taken = new Map(nodes.map((node, i) => [node.name, i]));
    const number = old.nodes.map((node) => {
      if (node.change !== "removed") return taken.get(node.name);
      nodes.push({ ...node, name: taken.has(node.name) ? `${node.name} (before)` : node.name });
      return nodes.length - 1;
    });
    old.nodes.forEach((node, i) => {
      const merged = nodes[number[i]];
      if (!merged) return;
      const own = node.change === "removed";
      if (own) Object.assign(merged, { in: [], controls: [] });
      (node.in || []).forEach(([source, port], slot) => {
        if (own || old.nodes[source].change === "removed") merged.in.push([number[source], port, slot]);
      });
      for (const source of node.controls || []) if (own || old.nodes[source].change === "removed") merged.controls.push(number[source]);
      merged.in = merged.in.filter(([source]) => source !== undefined);
      merged.controls = merged.controls.filter((source) => source !== undefined);
    });
    return { ...graph, nodes };
  });
  return { label: "before and after", costs: null, graphs };
}
