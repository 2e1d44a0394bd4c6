"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = [...document.querySelectorAll(".chart")];

for (const chart of charts) {
  const figure = data.charts[chart.dataset.plan][chart.dataset.chart];
  if (chart.clientWidth < 500 && chart.dataset.chart === "step") figure.layout.height += 160; // legends take more lines
  Plotly.newPlot(chart, figure.data, figure.layout, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
}

// Charts of one kind move together; the whole range is that of the first drawing.
const groupOf = chart => charts.filter(other => other.dataset.chart === chart.dataset.chart);
const axesOf = chart => Object.keys(chart.layout).filter(name => /^xaxis\d*$/.test(name));
const whole = new Map(charts.map(chart => [chart, [...chart._fullLayout.xaxis.range]]));
let moving = false;
async function show(chart, range) {
  moving = true;
  await Promise.all(groupOf(chart).map(other =>
    Plotly.relayout(other, Object.fromEntries(axesOf(other).map(axis => [axis + ".range", [...range]])))));
  moving = false;
}
for (const chart of charts) {
  chart.on("plotly_relayout", change => {
    if (moving) return;
    const keys = Object.keys(change);
    if (keys.some(key => /^xaxis\d*\.autorange$/.test(key))) show(chart, whole.get(chart));
    else if (keys.some(key => /^xaxis\d*\.range/.test(key))) show(chart, chart._fullLayout.xaxis.range);
  });
  chart.addEventListener("keydown", event => {
    const [from, to] = chart._fullLayout.xaxis.range, width = to - from;
    const ranges = {
      ArrowLeft: [from - width / 5, to - width / 5], ArrowRight: [from + width / 5, to + width / 5],
      "+": [from + width / 4, to - width / 4], "-": [from - width / 2, to + width / 2], 0: whole.get(chart),
    };
    ranges["="] = ranges["+"];
    const range = ranges[event.key];
    if (!range || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [first, last] = whole.get(chart);
    show(chart, [Math.max(first, range[0]), Math.min(last, range[1])]);
  });
}

// Instructions are rows of [position, kind, name, placements, nanoseconds, bytes]; texts are numbered.
const seconds = ns => ns >= 1e9 ? (ns / 1e9).toPrecision(4) + " s" : ns >= 1e6 ? (ns / 1e6).toPrecision(4) + " ms"
  : ns ? (ns / 1e3).toPrecision(4) + " µs" : "-";
function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= size) return (count / size).toFixed(2) + " " + unit;
  return count ? count + " B" : "-";
}
const HEADINGS = ["at", "what", "operator or tensor", "placements", "time", "bytes made"];
const planOf = node => data.instructions[node.closest(".tree").dataset.plan];
const rowsOf = node => planOf(node).rows[node.closest(".module").dataset.path] || [];
const wordsOf = (node, row) => [1, 2, 3].map(at => planOf(node).texts[row[at]]);

function fill(node) {
  if (node.querySelector("table")) return;
  const scroll = document.createElement("div"), table = document.createElement("table");
  const add = (row, cells, tag) => cells.forEach((text, at) => {
    const cell = row.appendChild(document.createElement(tag));
    cell.textContent = text;
    cell.className = at === 2 ? "long" : at === 0 || at > 3 ? "number" : "";
  });
  add(table.createTHead().insertRow(), HEADINGS, "th");
  const body = table.createTBody();
  for (const row of rowsOf(node))
    add(body.insertRow(), [row[0], ...wordsOf(node, row), seconds(row[4]), bytes(row[5])], "td");
  scroll.append(table);
  node.append(scroll);
  mark(node);
}
for (const node of document.querySelectorAll(".instructions"))
  node.addEventListener("toggle", () => node.open && fill(node));

// Search: modules whose path holds the words, and instructions whose texts do; all else is hidden.
const search = document.getElementById("search"), found = document.getElementById("found");
const modules = [...document.querySelectorAll(".module")];
const matches = (texts, words) => words.every(word => texts.some(text => text.toLowerCase().includes(word)));
const words = () => search.value.toLowerCase().split(/\s+/).filter(Boolean);
function mark(node) {
  const wanted = words(), path = node.closest(".module").dataset.path;
  for (const row of node.querySelectorAll("tbody tr"))
    row.className = wanted.length && matches([path, ...[1, 2, 3].map(at => row.cells[at].textContent)], wanted) ? "hit" : "";
}
search.addEventListener("input", () => {
  const wanted = words();
  let paths = 0, instructions = 0;
  for (const module of modules) {
    const own = module.querySelector(":scope > .instructions"), path = module.dataset.path;
    const byName = wanted.length > 0 && matches([path], wanted);
    const rows = wanted.length && own ? rowsOf(own).filter(row => matches([path, ...wordsOf(own, row)], wanted)).length : 0;
    paths += byName;
    instructions += rows;
    module.rows = rows;
    module.hit = byName || rows > 0;
    module.querySelector(":scope > summary .name").classList.toggle("hit", byName);
    if (own) {
      own.hidden = wanted.length > 0 && !rows;
      mark(own);
    }
  }
  for (const module of [...modules].reverse()) { // inner ones first
    const inside = [...module.querySelectorAll(":scope > .module")].some(child => !child.hidden && child.hit);
    module.hit ||= inside;
    module.hidden = wanted.length > 0 && !module.hit;
    if (wanted.length) module.open = inside || module.rows > 0;
    else module.open = !module.dataset.path;
  }
  found.textContent = wanted.length ? `${paths} modules, ${instructions} instructions` : "";
});
document.querySelector(".search").addEventListener("submit", event => {
  event.preventDefault();
  const hit = document.querySelector(".name.hit, .instructions:not([hidden]) > summary");
  if (hit) hit.closest("summary").focus();
});
document.getElementById("unfold").addEventListener("click", () => modules.forEach(module => module.open = true));
document.getElementById("fold").addEventListener("click", () => modules.forEach(module => module.open = !module.dataset.path));
