"use strict";
// Tensors between modules: a node for every module that the table shows folded, and for what an unfolded one does itself.
// Nodes are in layers; an edge to the next layer is a curve, one that passes layers has a lane at the right, and one
// against the order of execution a lane at the left.
const WIDTH = 240, HEIGHT = 54, SPACE = 26, BETWEEN = 52, LANE = 96, BESIDE = 3;
const GIVEN = -1, RESHARDED = 1, BY_THE_HOST = 2, KEPT = 1, BACKWARD = 2; // as in flows.py
const part = document.getElementById("part");

function element(parent, name, attributes, text) {
  const made = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Which nodes there are: of every run the one that stands for it, in the order in which they run. What an unfolded module
// does itself, before and after those inside it, are nodes of their own, but for tensors that forward keeps for backward.
function foldedGraph(graph, items) {
  const number = new Map(items.map((item, at) => [item, at])), nodes = new Map(), edges = new Map(), stands = [];
  const wanted = +part.value, phase = wanted === BACKWARD ? 1 : 0;
  items.forEach((item, at) => {
    const outer = number.get(item.parentElement.closest(".module"));
    stands.push(outer === undefined || (stands[outer] === outer && items[outer].open) ? at : stands[outer]);
  });
  const node = run => {
    const at = run === GIVEN ? GIVEN : stands[graph.runs[run][0]];
    const inner = at !== GIVEN && items[at].querySelector(":scope > .module") !== null;
    const folded = inner && !items[at].open, key = inner && !folded && wanted !== KEPT ? at + ":" + run : at;
    if (!nodes.has(key)) nodes.set(key, { key, at, inner, folded, first: run === GIVEN ? -1 : Infinity, incoming: [] });
    return nodes.get(key);
  };
  graph.runs.forEach(([, of, first], run) => {
    if (of !== phase || first < 0) return;
    const mine = node(run);
    mine.first = Math.min(mine.first, first);
  });
  for (const [source, readers, which, way, size, count] of graph.flows) {
    if (which !== wanted) continue;
    const from = node(source);
    for (const to of new Set(readers.map(node))) {
      if (to === from) continue;
      const key = from.key + " " + to.key;
      if (!edges.has(key)) edges.set(key, { from, to, size: 0, count: 0, resharded: 0, host: 0 });
      const edge = edges.get(key);
      edge.size += size;
      edge.count += count;
      if (way & RESHARDED) edge.resharded += count;
      if (way & BY_THE_HOST) edge.host += count;
    }
  }
  const sorted = [...nodes.values()].sort((one, other) => one.first - other.first || one.at - other.at);
  const runs = new Map();
  sorted.forEach((each, position) => {
    each.position = position;
    runs.set(each.at, (runs.get(each.at) || 0) + 1);
    each.number = runs.get(each.at);
  });
  for (const each of sorted) each.runs = runs.get(each.at);
  return { nodes: sorted, edges: [...edges.values()] };
}

// Places of nodes and edges: layers by the longest path, lanes by spans that do not meet.
function place({ nodes, edges }) {
  for (const edge of edges) if (edge.from.position < edge.to.position) edge.to.incoming.push(edge.from);
  const layers = [];
  let last = 0; // what nothing flows into stands beside what runs before it
  for (const node of nodes) {
    node.layer = node.incoming.length ? Math.max(...node.incoming.map(from => from.layer)) + 1 : last;
    while (layers[node.layer]?.length >= BESIDE) node.layer++;
    last = node.layer;
    (layers[node.layer] ||= []).push(node);
  }
  layers.forEach((layer, row) => layer.forEach((node, column) => {
    node.x = (column - layer.length / 2) * (WIDTH + SPACE) + SPACE / 2;
    node.y = SPACE / 2 + row * (HEIGHT + BETWEEN);
  }));
  for (const edge of edges) {
    edge.passed = Math.abs(edge.to.layer - edge.from.layer);
    edge.side = edge.to.layer - edge.from.layer === 1 ? 0 : edge.from.position < edge.to.position ? 1 : -1;
  }
  const inLanes = [];
  for (const edge of edges.filter(each => each.side).sort((one, other) => one.passed - other.passed)) {
    edge.span = [edge.from.layer, edge.to.layer].sort((one, other) => one - other);
    const [first, last] = edge.span, most = Math.max(...layers.slice(first, last + 1).map(layer => layer.length));
    const near = inLanes.filter(other => other.side === edge.side && first < other.span[1] && other.span[0] < last);
    let away = most * (WIDTH + SPACE) / 2 + LANE / 2, taken; // from the middle, to the first free lane
    while ((taken = near.find(other => Math.abs(other.away - away) < LANE))) away = taken.away + LANE;
    edge.away = away;
    inLanes.push(edge);
  }
  const reach = side => Math.max(...layers.map(layer => layer.length * (WIDTH + SPACE) / 2 + SPACE),
    ...inLanes.filter(edge => edge.side === side).map(edge => edge.away + LANE / 2));
  const middle = reach(-1);
  for (const node of nodes) node.x += middle;
  return { middle, width: middle + reach(1), height: layers.length * (HEIGHT + BETWEEN) - BETWEEN + SPACE };
}

function drawEdge(svg, plan, edge, room, name, one) {
  const { from, to } = edge;
  let path, x, y;
  if (!edge.side) {
    const [x1, y1, x2, y2] = [from.x + WIDTH / 2, from.y + HEIGHT, to.x + WIDTH / 2, to.y], half = (y1 + y2) / 2;
    const share = one(to, "to") ? (one(from, "from") ? .5 : .78) : one(from, "from") ? .22 : .5, rest = 1 - share;
    path = `M${x1} ${y1}C${x1} ${half} ${x2} ${half} ${x2} ${y2 - 2}`;
    x = (rest ** 3 + 3 * rest * rest * share) * x1 + (3 * rest * share * share + share ** 3) * x2;
    y = y1 + (y2 - y1) * (share === .5 ? .5 : share < .5 ? .3 : .7);
  } else {
    const turn = 8 * edge.side, share = .5 + .3 * edge.side;
    const [x1, y1, x2, y2] = [from.x + WIDTH * share, from.y + HEIGHT, to.x + WIDTH * share, to.y];
    x = room.middle + edge.side * edge.away;
    const [out, into, down] = [y1 + 12, y2 - 12, y1 < y2 ? 8 : -8];
    path = `M${x1} ${y1}V${out - 8}Q${x1} ${out} ${x1 + turn} ${out}H${x - turn}Q${x} ${out} ${x} ${out + down}`
      + `V${into - down}Q${x} ${into} ${x - turn} ${into}H${x2 + turn}Q${x2} ${into} ${x2} ${into + 8}V${y2 - 2}`;
    y = (out + into) / 2;
  }
  const drawn = element(svg, "g", { class: "edge" + (edge.resharded ? " resharded" : "") + (edge.host ? " host" : "") });
  const wide = Math.min(5, 1 + Math.max(0, Math.log10(edge.size + 1) - 4) * .8);
  element(drawn, "path", { d: path, "stroke-width": wide.toFixed(1), "marker-end": `url(#arrow${plan})` });
  const words = [bytes(edge.size)];
  if (edge.resharded) words.push(`${edge.resharded}/${edge.count} resharded`);
  if (edge.host) words.push(`${edge.host}/${edge.count} from host`);
  const text = element(svg, "text", { class: "words", x, y: y + 4 - 6 * (words.length - 1) });
  words.forEach((word, row) => element(text, "tspan", { x, dy: row ? 12 : 0 }, word));
  element(drawn, "title", {}, `${name(from)} → ${name(to)}: ${bytes(edge.size)} in ${edge.count} tensors`
    + (edge.resharded ? `, ${edge.resharded} resharded` : "") + (edge.host ? `, ${edge.host} from the host` : ""));
  edge.text = drawn.lastChild.textContent;
  edge.words = text;
}

function drawNode(svg, node, graph, items, edges, whole, name) {
  const label = name(node), [time, peak, sharded, replicated, partial, reshards, again, offloaded] =
    node.at < 0 ? [] : graph.figures[node.at][node.folded ? 1 : 0];
  const item = items[node.at], hit = item && item.querySelector(":scope > summary .name.hit");
  const drawn = element(svg, "g", { class: "node" + (node.folded ? " folded" : "") + (hit ? " hit" : ""), role: "button",
    tabindex: -1, transform: `translate(${node.x} ${node.y})` });
  if (node.folded) drawn.setAttribute("aria-expanded", "false");
  if (item) drawn.dataset.path = item.dataset.path;
  if (node.folded) element(drawn, "rect", { class: "behind", x: 4, y: 4, width: WIDTH, height: HEIGHT, rx: 3 });
  element(drawn, "rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 3 });
  const short = label.length > 30 ? "…" + label.slice(-29) : label;
  element(drawn, "text", { class: "title", x: 8, y: 16 }, short);
  if (item) {
    const marks = [sharded + replicated + partial ? `S${sharded} R${replicated} P${partial}` : "",
      reshards ? `resh. ${reshards}` : "", again ? `again ${again}` : "", offloaded ? `offl. ${offloaded}` : ""];
    element(drawn, "text", { x: 8, y: 31 },
      (node.runs > 1 ? "in all " : "") + [time ? seconds(time) : "", peak ? bytes(peak) + " at peak" : ""].filter(Boolean).join(", "));
    element(drawn, "text", { x: 8, y: 44 }, marks.filter(Boolean).join(", "));
    if (node.runs === 1) element(drawn, "rect", { class: "time", y: HEIGHT - 4, height: 4, width: (WIDTH * time / whole).toFixed(1) });
  }
  const near = edges.filter(edge => edge.from === node || edge.to === node).map(edge => edge.text);
  drawn.setAttribute("aria-label", [label, node.folded ? "folded" : "", ...near].filter(Boolean).join("; "));
  element(drawn, "title", {}, [label, ...near].join("\n"));
  node.drawn = drawn;
  return drawn;
}

function drawGraph(holder) {
  const graph = data.graphs[holder.dataset.plan];
  const tree = document.querySelector(`.tree[data-plan="${holder.dataset.plan}"]`);
  const items = [...tree.querySelectorAll(".module")], { nodes, edges } = foldedGraph(graph, items);
  const room = place({ nodes, edges }), old = holder.querySelector("svg"), focused = holder.contains(document.activeElement);
  const name = node => node.at < 0 ? "inputs" : (graph.paths[node.at] || "whole step") + (node.inner && !node.folded ? " itself" : "") + (node.runs > 1 ? ` (${node.number})` : "");
  const counts = new Map();
  for (const edge of edges.filter(each => !each.side))
    for (const key of [edge.from.key + "from", edge.to.key + "to"]) counts.set(key, (counts.get(key) || 0) + 1);
  const svg = element(holder, "svg", { width: room.width, height: room.height, viewBox: `0 0 ${room.width} ${room.height}` });
  const arrow = element(element(svg, "defs", {}), "marker", { id: "arrow" + holder.dataset.plan, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9,
    markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" });
  element(arrow, "path", { d: "M0 0L8 4L0 8z", fill: "#111" });
  for (const edge of edges) drawEdge(svg, holder.dataset.plan, edge, room, name, (node, end) => counts.get(node.key + end) === 1);
  svg.append(...edges.map(edge => edge.words)); // above all lines
  for (const node of nodes) drawNode(svg, node, graph, items, edges, graph.figures[0][1][0] || 1, name);
  const wanted = holder.wanted, inside = path => wanted === "" || path === wanted || (path || "").startsWith(wanted + ".");
  const current = nodes.find(node => node.drawn.dataset.path === wanted) || nodes.find(node => wanted !== undefined && inside(node.drawn.dataset.path)) || nodes[0];
  if (current) current.drawn.setAttribute("tabindex", 0);
  if (old) old.remove();
  else holder.scrollLeft = room.middle - holder.clientWidth / 2;
  const hit = words().length ? nodes.find(node => node.drawn.classList.contains("hit")) : undefined;
  if (hit) holder.scrollTo(hit.x + WIDTH / 2 - holder.clientWidth / 2, hit.y - BETWEEN);
  holder.nodes = nodes;
  holder.edges = edges;
  if (focused && current) current.drawn.focus();
}

// Keys of a graph: up and down go along the order of execution, right unfolds, left folds, Enter does what a click does.
for (const holder of document.querySelectorAll(".graph")) {
  const tree = document.querySelector(`.tree[data-plan="${holder.dataset.plan}"]`);
  const itemOf = drawn => [...tree.querySelectorAll(".module")].find(item => item.dataset.path === drawn.dataset.path);
  const unfold = item => { holder.wanted = item.dataset.path; item.open = true; };
  const act = drawn => {
    const item = itemOf(drawn);
    if (!item) return;
    if (drawn.classList.contains("folded")) unfold(item);
    else item.querySelector(":scope > summary").focus();
  };
  let waiting = false;
  holder.redraw = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; drawGraph(holder); }); // once for all modules that unfold together
  };
  tree.addEventListener("toggle", event => event.target.matches(".module") && holder.redraw(), true);
  search.addEventListener("input", holder.redraw);
  part.addEventListener("change", holder.redraw);
  holder.addEventListener("click", event => {
    const drawn = event.target.closest(".node");
    if (drawn) { drawn.focus(); act(drawn); }
  });
  holder.addEventListener("focusin", event => {
    const drawn = event.target.closest(".node");
    if (!drawn) return;
    holder.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
    drawn.setAttribute("tabindex", 0);
    holder.wanted = drawn.dataset.path;
  });
  holder.addEventListener("keydown", event => {
    const drawn = event.target.closest(".node"), at = holder.nodes.findIndex(node => node.drawn === drawn);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const item = itemOf(drawn), step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) holder.nodes[at + step]?.drawn.focus();
    else if (event.key === "Enter" || event.key === " ") act(drawn);
    else if (event.key === "ArrowRight" && item) unfold(item);
    else if (event.key === "ArrowLeft" && item) {
      const outer = holder.nodes[at].inner && item.open ? item : item.parentElement.closest(".module");
      if (outer && outer.dataset.path) { holder.wanted = outer.dataset.path; outer.open = false; }
    } else return;
    event.preventDefault();
  });
  drawGraph(holder);
}
