// Time lines of all runs under each other, on one time axis.
"use strict";

// What a worker does, in the order in which the shares of a column are stacked; exchanges have a strip of their own.
const TRAINING_KINDS = { compute: "computing a gradient", step: "stepping", wait: "waiting for others", dead: "dead" };
const KINDS = { ...TRAINING_KINDS, exchange: "exchanging" };

const LABEL_HEIGHT = 22;
const RANKS_WIDTH = 34;
const RUN_GAP = 8;
const MIN_RANK_DISTANCE = 12;

function drawTimelines() {
  const runs = report.runs.map((run, k) => ({ run, k })).filter(({ run }) => run.workers !== null);
  showCard("timelines", runs.length > 0);
  find("kinds").replaceChildren(...Object.entries(KINDS).map(([kind, meaning]) =>
    element("span", {}, element("i", { class: kind }), meaning)));
  // Times of different clocks cannot share an axis.
  const groups = d3.groups(runs, ({ run }) => run.time_unit);
  find("timelines").replaceChildren(...groups.map(([unit, group]) => drawSharedAxis(`timelines in ${unit}`, group)));
}

function drawSharedAxis(id, runs) {
  const width = find("timelines").clientWidth;
  const domain = state.zoom[id] || [0, d3.max(runs, ({ run }) => run.workers.until) || 1];
  const scale = d3.scaleLinear(domain, [RANKS_WIDTH, width - MARGIN.marginRight]);
  let top = 0;
  const bands = runs.map(({ run, k }) => {
    const rows = run.workers.timeline.rows.length;
    const rowHeight = runs.length === 1 ? clamp(640 / rows, 6, 24) : clamp(140 / rows, 3, 16);
    const band = { run, k, rowHeight, top: top + LABEL_HEIGHT, height: rows * rowHeight };
    top = band.top + band.height + RUN_GAP;
    return band;
  });
  const height = top + MARGIN.marginBottom;
  const svg = d3.create("svg").attr("class", "timelines").attr("width", width).attr("height", height)
    .attr("viewBox", [0, 0, width, height]);
  for (const band of bands) drawBand(svg, band, scale);
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${top})`)
    .call(d3.axisBottom(scale).ticks(width < 420 ? 4 : 8).tickSizeOuter(0));
  svg.append("text").attr("class", "axis-title").attr("x", d3.mean(scale.range())).attr("y", height - 4)
    .text(timeTitle(runs.map(({ run }) => run)));
  const onMove = (event, time) => describeTime(event, svg.node(), bands, time);
  addPointer(id, svg.node(), scale.range(), scale.invert, onMove, drawTimelines);
  return svg.node();
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, Math.floor(value)));

// One run: its name, the ranks of its workers, and a picture that is as long as the run lasted.
function drawBand(svg, { run, k, rowHeight, top, height }, scale) {
  const { rows, columns, width } = run.workers.timeline;
  const [left, right] = scale.range(), [start, end] = scale.domain();
  const lasted = element("span", { class: "quiet" }, formatTime(run.workers.until, run.time_unit));
  svg.append("foreignObject").attr("y", top - LABEL_HEIGHT).attr("width", right).attr("height", LABEL_HEIGHT)
    .node().append(element("div", { class: "timeline-name" }, runMark(k), run.name, lasted));
  for (let row = 0; row < rows.length; row += Math.ceil(MIN_RANK_DISTANCE / rowHeight)) {
    const rank = svg.append("text").attr("class", "rank").text(rows[row][0]);
    rank.attr("x", left - 6).attr("y", top + (row + 0.5) * rowHeight);
  }
  // The inner coordinates are time and worker.
  svg.append("svg").attr("x", left).attr("y", top).attr("width", right - left).attr("height", height)
    .attr("viewBox", [start, 0, end - start, rows.length]).attr("preserveAspectRatio", "none")
    .append("image").attr("width", columns * width).attr("height", rows.length).attr("preserveAspectRatio", "none")
    .attr("href", timelineImage(run.workers.timeline, Math.ceil(rowHeight * window.devicePixelRatio)));
}

function unpackShares(timeline) {
  return Object.fromEntries(Object.keys(KINDS).map((kind) =>
    [kind, Uint8Array.from(atob(timeline.shares[kind]), (byte) => byte.charCodeAt(0))]));
}

// A picture with one pixel per column and `pixels` per worker: above, the shares of the time in each column, stacked;
// below, a strip that is the stronger the more the worker exchanges.
function timelineImage(timeline, pixels) {
  const { rows, columns } = timeline;
  const shares = unpackShares(timeline);
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, d3.rgb(style.getPropertyValue(`--${kind}`))]));
  const gap = pixels > 4 ? Math.ceil(pixels / 12) : 0, strip = Math.max(1, Math.round(pixels / 5));
  const stack = pixels - gap - strip;
  const canvas = element("canvas", { width: columns, height: rows.length * pixels });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const paint = (column, from, to, { r, g, b }, opacity = 1) => {
    for (let y = from; y < to; y += 1) image.data.set([r, g, b, 255 * opacity], 4 * (y * columns + column));
  };
  for (let cell = 0; cell < rows.length * columns; cell += 1) {
    const column = cell % columns, top = Math.floor(cell / columns) * pixels;
    let total = 0, filled = 0;
    for (const kind of Object.keys(TRAINING_KINDS)) {
      total += shares[kind][cell];
      const until = Math.round((Math.min(255, total) / 255) * stack);
      paint(column, top + filled, top + until, colours[kind]);
      filled = until;
    }
    const exchanging = shares.exchange[cell] / 255;
    if (exchanging > 0) paint(column, top + stack, top + stack + strip, colours.exchange, 0.25 + 0.75 * exchanging);
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

// Tell what the worker under the pointer did at that time.
function describeTime(event, svg, bands, time) {
  const y = d3.pointer(event, svg)[1];
  const band = bands.find(({ top, height }) => y >= top && y < top + height);
  if (!band || time > band.run.workers.until) {
    hideTooltip();
    return;
  }
  const { timeline } = band.run.workers;
  const row = Math.floor((y - band.top) / band.rowHeight), [first, last] = timeline.rows[row];
  const worker = first === last ? `worker ${first}` : `workers ${first} to ${last}`;
  const cell = row * timeline.columns + Math.min(timeline.columns - 1, Math.floor(time / timeline.width));
  const shares = unpackShares(timeline);
  const lines = Object.entries(KINDS).filter(([kind]) => shares[kind][cell] > 0).map(([kind, meaning]) =>
    element("div", {}, element("i", { class: kind }), `${meaning}: ${formatShare(shares[kind][cell] / 255)}`));
  const title = `${band.run.name}, ${worker} at ${formatTime(time, band.run.time_unit)}`;
  showTooltip(event, element("strong", {}, title), ...lines);
}
