"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = [...document.querySelectorAll(".chart")];

for (const chart of charts) {
  const figure = data.charts[chart.dataset.plan][chart.dataset.chart];
  if (chart.clientWidth < 500 && chart.dataset.chart !== "kinds") figure.layout.height += 160; // legends take more lines
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
