"use strict";
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
  }
  if (!wanted.length) foldTo(depth.value);
  found.textContent = wanted.length ? `${paths} modules, ${instructions} instructions` : "";
});
document.querySelector(".search").addEventListener("submit", event => {
  event.preventDefault();
  const hit = document.querySelector(".name.hit, .instructions:not([hidden]) > summary");
  if (hit) hit.closest("summary").focus();
});

// Folding: the table unfolds to a depth, at first to the deepest that a graph of few nodes has room for.
const FEW_NODES = 24;
const depth = document.getElementById("depth");
const depthOf = module => module.dataset.path ? module.dataset.path.split(".").length : 0;
const foldTo = most => modules.forEach(module => module.open = depthOf(module) < most && !!module.querySelector(".module"));
const deepest = Math.max(1, ...modules.map(depthOf));
for (let at = 1; at <= deepest; at++) {
  const nodes = modules.filter(module => depthOf(module) <= at).length / document.querySelectorAll(".tree").length;
  depth.add(new Option(at, at, false, at === 1 || nodes <= FEW_NODES));
}
foldTo(depth.value);
depth.addEventListener("change", () => foldTo(depth.value));
document.getElementById("unfold").addEventListener("click", () => modules.forEach(module => module.open = true));
document.getElementById("fold").addEventListener("click", () => foldTo(depth.value = 1));
