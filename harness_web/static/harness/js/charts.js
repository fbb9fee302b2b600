// Live charts by Plotly, and the same numbers as tables. Series are told apart by colour and dash, by position.

import { clockTime, localTime } from "./format.js";

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const WINDOW = 300; // seconds shown
const TABLE_ROWS = 30;
const CONFIG = { displayModeBar: false, displaylogo: false, responsive: true, doubleClick: false };

function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function seriesColour(index) {
  return `var(--series-${index % 8})`;
}

export function dashArray(index) {
  return ["", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3"][index % DASHES.length];
}

function layout(chart, now, top) {
  const ink = token("--muted");
  const grid = token("--color-base-300");
  const axis = { color: ink, gridcolor: grid, zeroline: false, fixedrange: true, automargin: true };
  return {
    uirevision: "live",
    margin: { l: 44, r: 16, t: 8, b: 28 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: "inherit", size: 11, color: ink },
    hovermode: "x unified",
    hoverlabel: { bgcolor: token("--color-base-100"), bordercolor: grid, font: { color: token("--color-base-content") } },
    dragmode: false,
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    xaxis: { ...axis, type: "date", tickformat: "%H:%M", range: [localTime(now - WINDOW), localTime(now)], nticks: 6, ticklabelstandoff: 6, showgrid: false },
    yaxis: { ...axis, range: [0, top * 1.12], nticks: 5, ticklabelstandoff: 6, ...chart.yaxis },
  };
}

function trace(series, points, chart) {
  return {
    type: "scatter",
    mode: "lines",
    name: series.name,
    x: points.map((point) => localTime(point.at)),
    y: points.map((point) => series.value(point) ?? null),
    connectgaps: false,
    line: { color: token(`--series-${series.index % 8}`), dash: DASHES[series.index % DASHES.length], width: 2 },
    hovertemplate: chart.hover,
  };
}

// A chart that draws only while somebody can see it.
export class Chart {
  constructor(root, key, { series, yaxis = {}, hover = "%{y:.3~s}", text = String }) {
    Object.assign(this, { series, yaxis, hover, text });
    this.canvas = root.querySelector(`[data-chart="${key}"]`);
    this.table = root.querySelector(`[data-table="${key}"]`);
    this.summary = root.querySelector(`[data-summary="${key}"]`);
    this.visible = false;
    new IntersectionObserver((entries) => {
      this.visible = entries.some((entry) => entry.isIntersecting);
      this.draw();
    }, { rootMargin: "200px" }).observe(this.canvas.parentElement);
    this.canvas.parentElement.addEventListener("harness:panel", () => this.draw());
  }

  update(points, view, now, timeLabel) {
    this.data = { points, series: this.series(view), now, timeLabel };
    this.draw();
  }

  draw() {
    if (!this.data || !this.visible) return;
    if (this.canvas.offsetParent !== null) this.#drawChart();
    else this.#drawTable();
    this.#describe();
  }

  #drawChart() {
    const { points, series, now } = this.data;
    const traces = series.map((one) => trace(one, points, this));
    const top = Math.max(1, ...traces.flatMap((one) => one.y));
    window.Plotly.react(this.canvas, traces, layout(this, now, top), CONFIG);
  }

  #drawTable() {
    const { points, series, timeLabel } = this.data;
    const table = document.createElement("table");
    table.className = "table table-xs figure";
    const head = table.createTHead().insertRow();
    for (const name of [timeLabel, ...series.map((one) => one.name)]) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const point of points.slice(-TABLE_ROWS).reverse()) {
      const row = body.insertRow();
      row.insertCell().textContent = clockTime(point.at);
      for (const one of series) row.insertCell().textContent = this.#shown(one.value(point));
    }
    this.table.replaceChildren(table);
  }

  #describe() {
    const { points, series } = this.data;
    const last = points.at(-1);
    this.summary.textContent = last ? series.map((one) => `${one.name}: ${this.#shown(one.value(last))}`).join("; ") : "";
  }

  #shown(value) {
    return value === null || value === undefined ? "–" : this.text(value);
  }
}

// A line without axes; `top` is the value at the upper edge. Unknown values break it.
export function sparkline(svg, values, top = Math.max(...values.map((value) => value ?? 0), 1)) {
  const step = 100 / Math.max(values.length - 1, 1);
  const place = (value, index) => `${(index * step).toFixed(1)} ${(23 - (value / top) * 22).toFixed(1)}`;
  let pen = "M";
  let path = "";
  values.forEach((value, index) => {
    const known = value !== null && value !== undefined;
    if (known) path += `${pen}${place(value, index)}`;
    pen = known ? "L" : "M";
  });
  svg.querySelector("path").setAttribute("d", path);
}
