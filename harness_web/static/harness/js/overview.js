// The live overview: puts frames into the page that the server rendered.

import { Chart, dashArray, seriesColour, sparkline } from "./charts.js";
import { count, duration, percent, wholeSeconds, zoneLabel } from "./format.js";
import { LiveTopic } from "./live.js";

const POINTS = 300;
const SPARK_POINTS = 60;
const FRESH_FOR = 5; // seconds
const SHARES = new Set(["attainment", "kv", "busy", "gpu"]);
const BADGES = { live: "badge-success", paused: "badge-info", stale: "badge-warning", reconnecting: "badge-warning" };
const STATE_BADGES = { ready: "badge-success", starting: "badge-info", draining: "badge-warning", failed: "badge-error" };

const root = document.getElementById("overview");
const connection = document.getElementById("connection");
const texts = JSON.parse(document.getElementById("texts").textContent);
const first = JSON.parse(document.getElementById("frame").textContent);

let frame = first;
let points = first.points;
let received = Date.now();
let announced = first.sentence.level;

// --- charts ---------------------------------------------------------------------------------------------------------

const byTier = (field) => (view) =>
  view.tiers.map((tier) => ({ name: tier.name, index: tier.index, value: (point) => point.tiers[tier.name]?.[field] }));
const SHARE = { hover: "%{y:.1%}", text: percent, yaxis: { tickformat: ".0%", range: [0, 1.02] } };

function engineSeries(view) {
  const series = [
    { name: texts.kv, index: 2, value: (point) => point.totals.kv },
    { name: texts.busy, index: 1, value: (point) => point.totals.busy },
  ];
  if (view.totals.gpu !== null) series.push({ name: texts.gpu, index: 0, value: (point) => point.totals.gpu });
  return series;
}

const charts = [
  new Chart(root, "waiting", { series: byTier("waiting"), text: count }),
  new Chart(root, "running", { series: byTier("running"), text: count }),
  new Chart(root, "throughput", {
    series: () => [{ name: texts.tokensPerSecond, index: 0, value: (point) => point.totals.tokens_per_s }],
    text: count,
  }),
  new Chart(root, "attainment", { series: byTier("attainment"), ...SHARE }),
  new Chart(root, "engine", { series: engineSeries, ...SHARE }),
];

function drawCharts() {
  for (const chart of charts) chart.update(points, frame.view, frame.at, texts.time);
}

// --- the page -------------------------------------------------------------------------------------------------------

function put(selector, text, within = root) {
  const element = within.querySelector(selector);
  if (element && element.textContent !== text) element.textContent = text;
}

function drawSentence({ level, text, hint }) {
  root.querySelector("[data-sentence]").dataset.level = level;
  for (const icon of root.querySelectorAll("[data-icon]")) icon.hidden = icon.dataset.icon !== level;
  put("[data-text]", text);
  put("[data-hint]", hint);
  if (level !== announced) announce(text);
  announced = level;
}

function drawTiles(totals) {
  const figures = {
    waiting: [count(totals.waiting), ""],
    running: [count(totals.running), ""],
    tokens_per_s: [count(totals.tokens_per_s), `${count(totals.requests_per_s)} req/s`],
    oldest_wait: [duration(totals.oldest_wait), totals.oldest_wait_tier],
    attainment: [percent(totals.attainment), totals.judged ? `${totals.attained} / ${totals.judged}, 60 s` : texts.noEvents],
    kv: [percent(totals.kv), totals.kv_model],
    busy: [percent(totals.busy), "10 s"],
    gpu: [percent(totals.gpu), "NVML"],
  };
  for (const [key, [value, note]] of Object.entries(figures)) {
    put(`[data-figure="${key}"]`, value);
    put(`[data-note="${key}"]`, note);
  }
  root.querySelector("[data-gpu]").hidden = totals.gpu === null;
}

function drawSparks() {
  const recent = points.slice(-SPARK_POINTS);
  for (const svg of root.querySelectorAll("[data-spark]")) {
    const key = svg.dataset.spark;
    sparkline(svg, recent.map((point) => point.totals[key]), SHARES.has(key) ? 1 : undefined);
  }
}

function tierMark(index) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "mark");
  svg.setAttribute("viewBox", "0 0 24 8");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "path");
  line.setAttribute("d", "M0 4h24");
  line.setAttribute("stroke", seriesColour(index));
  line.setAttribute("stroke-dasharray", dashArray(index));
  svg.append(line);
  return svg;
}

function tierRow(tier) {
  const row = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  const label = document.createElement("span");
  label.className = "flex items-center gap-2 whitespace-nowrap";
  label.append(tierMark(tier.index), tier.name);
  name.append(label);
  row.append(name);
  const missed = tier.attainment !== null && tier.objective !== null && tier.attainment < tier.objective;
  const late = tier.ttft_p95 !== null && tier.ttft_target !== null && tier.ttft_p95 > tier.ttft_target;
  const goal = tier.objective === null ? "" : ` / ${percent(tier.objective)}`;
  const cells = [
    [count(tier.waiting)],
    [duration(tier.oldest_wait)],
    [count(tier.running)],
    [count(tier.requests_per_s)],
    [count(tier.tokens_per_s)],
    [`${duration(tier.ttft_p95)} / ${duration(tier.ttft_target)}`, late],
    [tier.judged ? `${missed ? "▼ " : ""}${percent(tier.attainment)}${goal} (${tier.attained} / ${tier.judged})` : texts.noEvents, missed],
  ];
  for (const [text, bad] of cells) {
    const cell = row.insertCell();
    cell.className = `figure whitespace-nowrap text-right${bad ? " font-semibold text-error" : ""}`;
    cell.textContent = text;
  }
  if (tier.judged) row.lastElementChild.append(attainmentBar(tier, missed));
  return row;
}

function attainmentBar(tier, missed) {
  const bar = document.createElement("progress");
  bar.className = `progress ml-3 w-24 align-middle max-md:hidden ${missed ? "progress-error" : "progress-success"}`;
  bar.value = tier.attainment;
  bar.setAttribute("aria-hidden", "true"); // the numbers beside it say the same
  return bar;
}

function drawTiers(tiers) {
  root.querySelector("[data-tiers] tbody").replaceChildren(...tiers.map(tierRow));
  root.querySelector('[data-empty="tiers"]').hidden = tiers.length > 0;
}

function engineRow(engine) {
  const row = document.getElementById("engine-row").content.firstElementChild.cloneNode(true);
  const state = row.querySelector('[data-engine="state"]');
  state.textContent = texts.states[engine.state] ?? engine.state;
  state.classList.add(STATE_BADGES[engine.state] ?? "badge-ghost");
  put('[data-engine="model"]', [engine.model, engine.replica].filter((part) => part !== "").join(" · "), row);
  put('[data-engine="message"]', [engine.message, engine.hint].filter(Boolean).join(" "), row);
  const numbers = [
    `${count(engine.running)} ${texts.running}`,
    `${count(engine.tokens_per_s)} ${texts.tokensPerSecond}`,
    `${percent(engine.kv_usage)} ${texts.kv}`,
    `${percent(engine.busy)} ${texts.busy}`,
  ];
  put('[data-engine="numbers"]', engine.state === "ready" ? numbers.join("  ·  ") : "", row);
  return row;
}

function drawEngines(engines, gpus) {
  const rows = engines.map(engineRow);
  for (const gpu of gpus) {
    rows.push(engineRow({ model: gpu.name, replica: "", state: "gpu", message: "", hint: "" }));
    put('[data-engine="state"]', "GPU", rows.at(-1));
    const used = gpu.memory_total ? gpu.memory_used / gpu.memory_total : null;
    put('[data-engine="numbers"]', `${percent(gpu.utilisation)} ${texts.gpu}  ·  ${percent(used)} ${texts.memory}`, rows.at(-1));
  }
  root.querySelector("[data-engines]").replaceChildren(...rows);
  root.querySelector('[data-empty="engines"]').hidden = rows.length > 0;
}

function draw() {
  const { view } = frame;
  drawSentence(frame.sentence);
  put('[data-value="policy"]', view.policy || "–");
  put('[data-value="policy_version"]', String(view.policy_version));
  put('[data-value="degradation_level"]', String(view.degradation_level));
  put('[data-value="engines"]', `${view.totals.engines_ready}/${view.totals.engines}`);
  drawTiles(view.totals);
  drawSparks();
  drawTiers(view.tiers);
  drawEngines(view.engines, view.gpus);
  drawCharts();
  drawState();
  drawAge();
}

// --- the connection -------------------------------------------------------------------------------------------------

function announce(text) {
  document.querySelector("[data-announce]").textContent = text;
}

function drawAge() {
  const { connected, age: reported } = frame.view;
  const age = (Date.now() - received) / 1000 + (connected ? 0 : (reported ?? 0));
  root.dataset.fresh = String(connected && (age < FRESH_FOR || topic.state === "paused"));
  const old = reported !== null && !(topic.state === "live" && connected);
  put("[data-age]", old ? texts.dataAge.replace("{age}", wholeSeconds(age)) : "", connection);
}

// A live socket to a server without a scheduler is not live news.
function drawState() {
  const state = topic.state === "live" && !frame.view.connected ? "no-scheduler" : topic.state;
  if (connection.dataset.connection === state) return;
  connection.dataset.connection = state;
  connection.querySelector("[data-badge]").className = `badge gap-1.5 ${BADGES[state] ?? "badge-error"}`;
  put("[data-word]", texts[state], connection);
  announce(texts[state]);
}

const topic = new LiveTopic({
  topic: "overview",
  socketPath: root.dataset.socket,
  framePath: root.dataset.frame,
  frame: first,
  onState() {
    drawState();
    drawAge();
  },
  onFrame(next) {
    const added = next.type === "delta" ? [next.point] : next.points;
    points = (next.type === "delta" || next.resumed ? points.concat(added) : added).slice(-POINTS);
    frame = next;
    received = Date.now();
    draw();
  },
});

connection.querySelector("[data-pause]").addEventListener("click", ({ currentTarget: button }) => {
  const paused = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(paused));
  button.querySelector("span").textContent = paused ? texts.resume : texts.pause;
  topic.pause(paused);
});

document.addEventListener("harness:theme", drawCharts);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
put("[data-zone]", zoneLabel());
draw();
setInterval(drawAge, 500);
topic.start();
