"use strict";

const COLOURS = ["#4269d0", "#e8883a", "#3ca951", "#d6457f", "#8a5cd0", "#2aa7b8", "#b08a2e", "#7b8794", "#a8324a", "#5f8f2f"];
const DASHES = ["solid", "dash", "dashdot", "longdash"];
const KINDS = { compute: "computing", step: "stepping", wait: "waiting", dead: "dead", exchange: "exchanging" };
const CONFIG = { displayModeBar: false, responsive: true };
const ROWS = { gap: 2, training: 12, exchange: 3 };
const BAND = ROWS.gap + ROWS.training + ROWS.exchange;
const MOST_SEEN_STEPS = 64;
const SMOOTH_COLUMNS = 160;
const WIDTHS = 8;
const REFRESH_MS = 2000;

let data = JSON.parse(document.getElementById("data").textContent);
const state = { axis: "time", run: 0, hidden: new Set(), updated: Date.now() };

const find = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const colour = (k) => COLOURS[k % COLOURS.length];
const dash = (k) => DASHES[Math.floor(k / COLOURS.length) % DASHES.length];
const narrow = () => window.innerWidth < 600;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") made.style.cssText = value;
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Figures as a person reads them.

const NOTHING = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const figure = (value) => (isNumber(value) ? Number(value.toPrecision(3)).toString() : NOTHING);
const percent = (value) => (isNumber(value) ? (100 * value).toFixed(1) + "%" : NOTHING);
const spread = (of) => (of && isNumber(of.mean) ? [of.min, of.mean, of.max].map((value) => (100 * value).toFixed(1)).join(" · ") : NOTHING);
const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : NOTHING);

function size(bytes) {
  if (!isNumber(bytes)) return NOTHING;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 999.5) return Number(bytes.toPrecision(3)) + " " + unit;
    bytes /= 1000;
  }
  return Number(bytes.toPrecision(3)) + " TB";
}

function duration(time, unit) {
  if (!isNumber(time)) return NOTHING;
  if (unit !== "s") return Number(time.toPrecision(4)) + " " + unit;
  if (time < 120) return (time < 10 ? Number(time.toPrecision(3)) : time.toFixed(1)) + " s";
  return time < 7200 ? (time / 60).toFixed(1) + " min" : (time / 3600).toFixed(1) + " h";
}

function timeWords(run) {
  if (run.time_unit !== "s") return "expected gradients per worker";
  return run.world === "virtual" ? "simulated seconds" : "seconds";
}

// What all pictures have in common.

function layout(changes = {}) {
  const axis = { gridcolor: css("grid"), linecolor: css("line"), zeroline: false, automargin: true, ticks: "", nticks: narrow() ? 5 : 8 };
  const { xaxis, yaxis, ...others } = changes;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12, color: css("quiet") },
    margin: { l: 44, r: 12, t: 8, b: 38 }, bargap: 0.15,
    hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink") } },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...others,
  };
}

function draw(id, traces, changes) {
  return Plotly.react(find(id), traces, layout(changes), CONFIG);
}

const faded = (hex, opacity) => hex + Math.round(255 * opacity).toString(16).padStart(2, "0");
const shownRuns = () => data.runs.map((run, k) => [run, k]).filter(([, k]) => !state.hidden.has(k));

function axisTitle() {
  const words = [...new Set(data.runs.map(timeWords))];
  return {
    steps: "steps per worker", samples: "samples seen by all workers", bytes: "sent by all workers",
    time: words.length === 1 ? words[0] : "time, each run in its own unit",
  }[state.axis];
}

function horizontal() {
  const axis = { title: { text: axisTitle(), standoff: 8 }, rangemode: "tozero" };
  return state.axis === "bytes" ? { ...axis, tickformat: "~s", ticksuffix: "B" } : state.axis === "samples" ? { ...axis, tickformat: "~s" } : axis;
}

function line(run, k, curve, x, changes = {}) {
  return {
    type: "scatter", mode: x.length > 1 ? "lines" : "markers", x, y: curve.value, name: run.name,
    line: { color: colour(k), width: 2, dash: dash(k) }, marker: { color: colour(k), size: 7 },
    hovertemplate: `<b>${escaped(run.name)}</b>  %{y:.4~g}<extra></extra>`, ...changes,
  };
}

function escaped(text) {
  return String(text).replace(/[&<>]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[letter]);
}

// Learning.

function drawLoss() {
  const traces = [];
  for (const [run, k] of shownRuns()) {
    const { loss, train_loss: training } = run.curves;
    if (training) traces.push(line(run, k, training, training[state.axis], { line: { color: faded(colour(k), 0.6), width: 1.2, dash: "dot" }, mode: "lines", hoverinfo: "skip", hovertemplate: null }));
    if (loss) traces.push(line(run, k, loss, loss[state.axis]));
  }
  draw("loss", traces, { xaxis: horizontal(), yaxis: { rangemode: "tozero" } });
}

function drawAccuracy() {
  const traces = [];
  find("accuracy-figure").hidden = !data.runs.some((run) => run.curves.accuracy || run.curves.worker_accuracy_mean);
  for (const [run, k] of shownRuns()) {
    const { accuracy, worker_accuracy_min: least, worker_accuracy_mean: mean, worker_accuracy_max: most } = run.curves;
    if (least && most) {
      const edge = { line: { width: 0 }, mode: "lines", hoverinfo: "skip", hovertemplate: null };
      traces.push(line(run, k, least, least[state.axis], edge));
      traces.push(line(run, k, most, most[state.axis], { ...edge, fill: "tonexty", fillcolor: faded(colour(k), 0.13) }));
    }
    // Of real workers the averaged model is known in the end only.
    if (mean && mean.value.length > 1 && !(accuracy && accuracy.value.length > 1)) {
      traces.push(line(run, k, mean, mean[state.axis], { line: { color: colour(k), width: 1.5, dash: "dot" }, hovertemplate: `<b>${escaped(run.name)}</b>, workers  %{y:.1%}<extra></extra>` }));
    }
    if (accuracy) traces.push(line(run, k, accuracy, accuracy[state.axis], { hovertemplate: `<b>${escaped(run.name)}</b>  %{y:.1%}<extra></extra>` }));
  }
  draw("accuracy", traces, { xaxis: horizontal(), yaxis: { tickformat: "~%" } });
}

function drawConsensus() {
  const traces = [];
  let least = Infinity, most = 0;
  for (const [run, k] of shownRuns()) {
    if (!run.consensus) continue;
    for (const value of run.consensus.value) {
      if (value > 0) { least = Math.min(least, value); most = Math.max(most, value); }
    }
    traces.push(line(run, k, run.consensus, run.consensus.time));
    if (run.predicted) {
      traces.unshift(line(run, k, run.predicted, run.predicted.time, { mode: "lines", line: { color: faded(colour(k), 0.75), width: 1.5, dash: "6px,5px" }, hovertemplate: `<b>${escaped(run.name)}</b>, predicted  %{y:.4~g}<extra></extra>` }));
    }
  }
  const words = [...new Set(data.runs.map(timeWords))];
  const wide = most > 300 * least;
  const range = wide ? { type: "log", exponentformat: "power", range: [Math.log10(least) - 0.3, Math.log10(most) + 0.3] } : { rangemode: "tozero" };
  draw("consensus", traces, { xaxis: { title: { text: words.length === 1 ? words[0] : "time, each run in its own unit", standoff: 8 }, rangemode: "tozero" }, yaxis: range });
  const predicted = data.runs.filter((run) => run.predicted).map((run) => run.name);
  const fitted = data.runs.some((run) => run.predicted && run.summary.samples);
  find("prediction-words").textContent = !predicted.length ? "The topology’s spectrum says nothing about these methods: they average exactly, or not over the topology."
    : "Predicted from the eigenvalues of the exchange rates" + (fitted ? "; one number, the size of what gradients add, is fitted to the second half of the run, so the line says how quickly the distance rises and where it would level off if gradients stayed as they are." : "; nothing is fitted.");
}

// Workers.

function unpack(run) {
  const { timeline, ranks } = run.workers;
  const shares = {};
  for (const kind of Object.keys(KINDS)) {
    const text = atob(timeline.shares[kind]);
    shares[kind] = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  }
  return { shares, bins: timeline.bins, width: timeline.width, count: ranks.length };
}

// Where single steps cannot be told apart anyway, wider bins show calmly what their mixture is.
function smoothed(run) {
  const { shares, bins, width, count: workers } = unpack(run);
  const most = Math.max(...run.workers.steps);
  const factor = most > MOST_SEEN_STEPS ? Math.ceil(bins / SMOOTH_COLUMNS) : 1;
  const columns = Math.ceil(bins / factor);
  const pooled = {};
  for (const kind of Object.keys(KINDS)) {
    pooled[kind] = new Float64Array(workers * columns);
    for (let worker = 0; worker < workers; worker += 1) {
      for (let bin = 0; bin < bins; bin += 1) pooled[kind][worker * columns + Math.floor(bin / factor)] += shares[kind][worker * bins + bin];
      for (let column = 0; column < columns; column += 1) pooled[kind][worker * columns + column] /= Math.min(factor, bins - column * factor);
    }
  }
  return { shares: pooled, bins: columns, width: width * factor, count: workers };
}

// Each worker is a band of thin rows: above, how its time is split in each bin; below, how much it exchanges.
function timelinePicture(run) {
  const { shares, bins, width, count: workers } = smoothed(run);
  const z = [], y = [];
  for (let worker = 0; worker < workers; worker += 1) {
    const rows = Array.from({ length: BAND }, () => new Array(bins).fill(null));
    for (let bin = 0; bin < bins; bin += 1) {
      const at = worker * bins + bin;
      const busy = shares.exchange[at] / 255;
      if (busy > 0) for (let row = 0; row < ROWS.exchange; row += 1) rows[ROWS.gap + ROWS.training + row][bin] = 4 + Math.max(1, Math.ceil(busy * 4));
      let filled = 0, sum = 0;
      ["compute", "step", "wait", "dead"].forEach((kind, code) => {
        sum += shares[kind][at];
        const until = Math.round((Math.min(255, sum) / 255) * ROWS.training);
        for (; filled < until; filled += 1) rows[ROWS.gap + filled][bin] = code + 1;
      });
    }
    rows.forEach((row, k) => { z.push(row); y.push(worker * BAND + k); });
  }
  const exchange = css("exchange");
  const colours = [css("compute"), css("step"), css("wait"), css("dead"), faded(exchange, 0.3), faded(exchange, 0.5), faded(exchange, 0.75), exchange];
  const scale = colours.flatMap((shade, k) => [[k / colours.length, shade], [(k + 1) / colours.length, shade]]);
  const x = Array.from({ length: bins }, (_, bin) => (bin + 0.5) * width);
  return { type: "heatmap", z, x, y, colorscale: scale, zmin: 0.5, zmax: 8.5, showscale: false, hoverinfo: "none", hoverongaps: true };
}

function drawTimeline(run) {
  const { ranks, until } = run.workers;
  const place = find("timeline");
  const height = Math.max(150, Math.min(900, 60 + ranks.length * (ranks.length <= 24 ? 26 : ranks.length <= 64 ? 13 : 7)));
  place.style.height = height + "px";
  const every = Math.ceil(ranks.length / ((height - 60) / 15));
  const ticks = ranks.map((rank, k) => [rank, k]).filter(([, k]) => k % every === 0);
  draw("timeline", [timelinePicture(run)], {
    hovermode: "closest", margin: { l: 34, r: 12, t: 6, b: 38 },
    xaxis: { title: { text: timeWords(run), standoff: 8 }, range: [0, until], showgrid: false },
    yaxis: { tickvals: ticks.map(([, k]) => k * BAND + (ROWS.gap + BAND) / 2), ticktext: ticks.map(([rank]) => rank), autorange: "reversed", showgrid: false, fixedrange: true },
  });
  const { shares, bins, width } = unpack(run);
  place.removeAllListeners("plotly_hover");
  place.on("plotly_hover", ({ points: [point] }) => {
    const worker = Math.floor(point.y / BAND), bin = Math.min(bins - 1, Math.floor(point.x / width));
    const parts = Object.entries(KINDS).map(([kind, word]) => [shares[kind][worker * bins + bin] / 255, word]).filter(([share]) => share > 0.002);
    find("readout").textContent = `worker ${ranks[worker]} at ${duration(point.x, run.time_unit)}: ` + parts.map(([share, word]) => `${word} ${Math.round(100 * share)}%`).join(", ");
  });
}

function drawSteps(run, k) {
  const { ranks, steps, time } = run.workers;
  const words = ranks.map((rank, row) => {
    const spent = time.compute[row] + time.step[row] + time.wait[row];
    return `worker ${rank}: ${count(steps[row])} steps, waiting ${spent ? Math.round((100 * time.wait[row]) / spent) : 0}% of its time`;
  });
  draw("steps", [{ type: "bar", x: ranks, y: steps, marker: { color: colour(k) }, hovertext: words, hovertemplate: "%{hovertext}<extra></extra>" }], {
    xaxis: { title: { text: "worker", standoff: 8 }, showgrid: false, tickformat: "d", ...(ranks.length <= 16 ? { dtick: 1 } : {}) }, yaxis: { rangemode: "tozero" },
  });
}

function drawStaleness(run, k) {
  const { counts } = run.workers.staleness;
  const all = counts.reduce((sum, [, merges]) => sum + merges, 0);
  const x = counts.map(([age]) => age), y = counts.map(([, merges]) => merges / all);
  const most = Math.max(4, ...x);
  draw("staleness", [{ type: "bar", x, y, width: 0.85, marker: { color: colour(k) }, customdata: counts.map(([, merges]) => count(merges)), hovertemplate: "%{x} steps old: %{y:.1%} of the merges (%{customdata})<extra></extra>" }], {
    xaxis: { title: { text: "steps", standoff: 8 }, range: [-0.6, most + 0.6], showgrid: false, tickformat: "d" }, yaxis: { tickformat: ".0%", rangemode: "tozero" },
  });
}

function segments(pairs, places) {
  const x = [], y = [];
  for (const [a, b] of pairs) { x.push(places[a][0], places[b][0], null); y.push(places[a][1], places[b][1], null); }
  return { type: "scatter", mode: "lines", x, y, hoverinfo: "skip" };
}

function drawGraph(run, k) {
  const { places, edges, ranks, unused_edges: unused } = run.workers;
  const hidden = { visible: false, fixedrange: true };
  if (!places) {
    draw("graph", [], { xaxis: hidden, yaxis: hidden, annotations: [{ text: "too many workers to draw", showarrow: false, font: { color: css("quiet") } }] });
    return;
  }
  const most = Math.max(1, ...edges.map((edge) => edge[2]));
  const thickest = Math.max(2.5, Math.min(9, 60 / Math.sqrt(ranks.length + 1)));
  const traces = [{ ...segments(unused, places), line: { color: css("unused"), width: 1 } }];
  for (let width = 1; width <= WIDTHS; width += 1) {
    const own = edges.filter((edge) => Math.max(1, Math.ceil((edge[2] / most) * WIDTHS)) === width);
    if (own.length) traces.push({ ...segments(own, places), line: { color: faded(colour(k), 0.35 + (0.5 * width) / WIDTHS), width: 0.6 + (thickest * width) / WIDTHS } });
  }
  const told = edges.slice(0, 2000);
  traces.push({
    type: "scatter", mode: "markers", x: told.map(([a, b]) => (places[a][0] + places[b][0]) / 2), y: told.map(([a, b]) => (places[a][1] + places[b][1]) / 2),
    marker: { size: 14, opacity: 0 }, hovertext: told.map(([a, b, bytes, exchanges]) => `${a} – ${b}: ${size(bytes)} in ${count(exchanges)} exchanges`), hovertemplate: "%{hovertext}<extra></extra>",
  });
  const labelled = ranks.length <= 64;
  traces.push({
    type: "scatter", mode: labelled ? "markers+text" : "markers", x: ranks.map((rank) => places[rank][0]), y: ranks.map((rank) => places[rank][1]),
    marker: { size: labelled ? 20 : 7, color: css("card"), line: { color: colour(k), width: labelled ? 2 : 1.2 } },
    text: ranks.map(String), textfont: { color: css("ink"), size: 10.5 }, hovertemplate: "worker %{hovertext}<extra></extra>", hovertext: ranks.map((rank, row) => `${rank}: ${count(run.workers.steps[row])} steps`),
  });
  draw("graph", traces, { margin: { l: 6, r: 6, t: 6, b: 6 }, xaxis: { ...hidden, scaleanchor: "y" }, yaxis: hidden });
}

function drawEvents(run) {
  const items = run.events.slice(0, 200).map(([time, text]) => element("li", {}, element("time", {}, time === null ? "" : duration(time, run.time_unit)), element("span", {}, text)));
  find("events").replaceChildren(...(items.length ? items : [element("li", { class: "quiet" }, "No worker came, went or was refused.")]));
}

function drawWorkers() {
  const run = data.runs[state.run];
  const known = run.workers !== null;
  find("workers-body").hidden = !known;
  find("no-workers").hidden = known;
  if (!known) return;
  find("kinds").replaceChildren(...Object.entries(KINDS).map(([kind, word]) => element("span", {}, element("i", { style: `background: var(--${kind})` }), word + (kind === "exchange" ? " (beside the training)" : ""))));
  drawTimeline(run);
  drawSteps(run, state.run);
  drawStaleness(run, state.run);
  drawGraph(run, state.run);
  drawEvents(run);
}

// Words and tables.

const COLUMNS = [
  ["method", (run) => run.method],
  ["topology", (run) => `${run.topology}, ${run.num_workers}`],
  ["accuracy", (run) => percent(run.summary.accuracy), "of the averaged model on the test set"],
  ["workers", (run) => spread(run.summary.worker_accuracy), "accuracy of their own models: min, mean, max"],
  ["loss", (run) => figure(run.summary.loss), "of the averaged model on the test set"],
  ["time", (run) => duration(run.summary.time, run.time_unit)],
  ["speed-up", (run) => (isNumber(run.summary.speedup) ? run.summary.speedup.toFixed(2) + "×" : NOTHING), "steps per time, against the first run"],
  ["busy", (run) => (isNumber(run.summary.utilization) ? Math.round(100 * run.summary.utilization) + "%" : NOTHING), "share of the workers’ time not spent waiting"],
  ["sent", (run) => size(run.summary.bytes_sent), "by all workers together"],
  ["exchanges", (run) => count(run.summary.exchanges), "averagings, of two workers or of many"],
  ["consensus", (run) => figure(run.summary.consensus), "how far the models are apart in the end"],
  ["steps", (run) => count(run.summary.total_steps), "of all workers together"],
];

function writeSummary() {
  const shown = COLUMNS.filter(([, value]) => data.runs.some((run) => value(run) !== NOTHING));
  const named = data.runs.some((run) => run.name !== run.method);
  const columns = named ? shown : shown.slice(1);
  const head = element("tr", {}, element("th", { scope: "col" }, named ? "run" : "method"), ...columns.map(([name]) => element("th", { scope: "col" }, name)));
  const rows = data.runs.map((run, k) => element("tr", {},
    element("th", { scope: "row" }, element("i", { style: `background: ${colour(k)}` }), run.name, run.finished ? null : element("small", { class: "quiet" }, " unfinished")),
    ...columns.map(([, value]) => element("td", {}, value(run)))));
  find("summary").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  find("summary-words").textContent = columns.filter(([, , words]) => words).map(([name, , words]) => `${name}: ${words}`).join("; ") + ".";
}

function writeHead() {
  const { runs } = data;
  const names = runs.map((run) => run.name);
  const title = names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
  find("title").textContent = title;
  document.title = `${title} · gossamer`;
  const same = (get) => [...new Set(runs.map(get))].join(", ");
  find("subtitle").textContent = `${same((run) => run.task)} · ${same((run) => `${run.num_workers} worker${run.num_workers === 1 ? "" : "s"}`)} · ${same((run) => run.topology)} · ${same((run) => (run.world === "virtual" ? "virtual cluster" : "real processes"))}`;
  const notes = runs.flatMap((run) => run.notes.map((note) => element("li", {}, `${run.name}: ${note}.`)));
  find("notes").replaceChildren(...notes);
  const versions = same((run) => run.version), started = runs.map((run) => run.started).filter(Boolean).sort()[0] || "";
  find("footer").replaceChildren(`gossamer ${versions}${started ? `, started ${started.slice(0, 16).replace("T", " ")} UTC` : ""}.`, ...(data.live ? fileLinks() : []));
}

function fileLinks() {
  return [" Files of the run: ", ...data.live.files.flatMap((name, k) => [k ? ", " : "", element("a", { href: "files/" + name.split("/").map(encodeURIComponent).join("/") }, name)]), "."];
}

function writeConfiguration() {
  const { runs } = data;
  const commands = [...new Set(runs.map((run) => run.command))].filter(Boolean);
  find("commands").replaceChildren(...commands.map((command) => element("pre", {}, command)));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const differing = names.filter((name) => new Set(runs.map((run) => JSON.stringify(run.config[name]))).size > 1);
  const table = (shown) => [
    element("thead", {}, element("tr", {}, element("th", {}, "setting"), ...runs.map((run) => element("th", {}, run.name)))),
    element("tbody", {}, ...shown.map((name) => element("tr", {}, element("th", { scope: "row" }, name.replaceAll("_", "-")), ...runs.map((run) => element("td", {}, name in run.config ? String(run.config[name]) || "(none)" : NOTHING))))),
  ];
  find("differences").replaceChildren(...(differing.length ? table(differing) : []));
  find("settings").replaceChildren(...table(names));
}

function writeSwitch(id, choices, chosen, choose) {
  const old = find(id);
  const legend = old.querySelector("legend");
  const labels = choices.map(([value, words]) => {
    const input = element("input", { type: "radio", name: id, value, checked: value === chosen });
    input.addEventListener("change", () => choose(value));
    return element("label", {}, input, words);
  });
  old.replaceChildren(legend, ...labels);
  old.hidden = choices.length < 2;
}

function writeControls() {
  writeSwitch("axis", data.axes.map((axis) => [axis, axis]), state.axis, (axis) => { state.axis = axis; drawLoss(); drawAccuracy(); });
  writeSwitch("run", data.runs.map((run, k) => [String(k), run.name]), String(state.run), (k) => { state.run = Number(k); find("readout").textContent = ""; drawWorkers(); });
  const buttons = data.runs.map((run, k) => {
    const button = element("button", { type: "button", "aria-pressed": String(!state.hidden.has(k)) }, element("i", { style: `background: ${colour(k)}` }), run.name);
    button.addEventListener("click", () => {
      if (state.hidden.has(k)) state.hidden.delete(k); else state.hidden.add(k);
      button.setAttribute("aria-pressed", String(!state.hidden.has(k)));
      drawLearning();
    });
    return button;
  });
  find("legend").replaceChildren(...(buttons.length > 1 ? buttons : []));
}

function drawLearning() { drawLoss(); drawAccuracy(); drawConsensus(); }
function drawAll() { drawLearning(); drawWorkers(); }

function show() {
  state.run = Math.min(state.run, data.runs.length - 1);
  writeHead();
  writeSummary();
  writeControls();
  writeConfiguration();
  drawAll();
}

// While the run goes on.

function writeLive(words, over = false) {
  find("live").hidden = false;
  find("live").classList.toggle("over", over);
  find("live-text").textContent = words;
}

function progressWords() {
  return data.runs.map((run) => {
    const done = run.summary.total_steps, goal = run.goal * run.num_workers;
    const share = run.finished ? "finished" : goal && isNumber(done) ? `${Math.min(100, Math.round((100 * done) / goal))}%` : "starting";
    return data.runs.length > 1 ? `${run.name} ${share}` : share;
  }).join(" · ");
}

let tag = "";
async function refresh() {
  try {
    const answer = await fetch("report.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") || "";
      data = await answer.json();
      show();
    } else if (answer.status !== 304) {
      throw new Error(String(answer.status));
    }
    writeLive(progressWords(), data.runs.every((run) => run.finished));
  } catch {
    writeLive("gossamer watch does not answer any more; this is the last it said", true);
  }
  setTimeout(refresh, REFRESH_MS);
}

// Light, dark and paper.

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
window.addEventListener("beforeprint", () => { document.documentElement.classList.add("print"); drawAll(); });
window.addEventListener("afterprint", () => { document.documentElement.classList.remove("print"); drawAll(); });

show();
if (data.live) { writeLive(progressWords(), data.runs.every((run) => run.finished)); setTimeout(refresh, REFRESH_MS); }
document.documentElement.dataset.drawn = "yes";
