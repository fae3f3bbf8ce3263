// Learning curves: accuracy, loss and consensus distance of all runs.
"use strict";

// Runs differ in colour and in the symbol that marks their curves, for readers who cannot tell the colours apart.
// The numbers of both have no common divisor, so that 56 runs differ.
const NUM_COLOURS = 8;
const SYMBOLS = [
  d3.symbolCircle, d3.symbolSquare, d3.symbolTriangle, d3.symbolDiamond, d3.symbolCross, d3.symbolStar, d3.symbolWye,
];
const SYMBOLS_PER_CURVE = 5;

// Curves that lie on each other for most of their length are drawn as dashes of alternating colours.
const COINCIDING_SHARE = 0.6;
const COINCIDING_DISTANCE = 0.012; // of the height of the picture
const DASH_LENGTH = 9;

// Consensus distances over more than this range are drawn on a logarithmic axis.
const WIDE_RANGE = 300;

const MARGIN = { marginTop: 12, marginRight: 14, marginBottom: 40, marginLeft: 46 };

const runColour = (k) => `var(--run-${k % NUM_COLOURS})`;
const runSymbol = (k) => SYMBOLS[k % SYMBOLS.length];
const visibleRuns = () => report.runs.map((run, k) => ({ run, k })).filter(({ k }) => !state.hidden.has(k));

// The line and the symbol of a run, as in the curves.
function runMark(k) {
  const mark = d3.create("svg").attr("class", "mark").attr("aria-hidden", "true")
    .attr("width", 24).attr("height", 12).attr("viewBox", [-12, -6, 24, 12]);
  mark.append("line").attr("x1", -12).attr("x2", 12).attr("stroke", runColour(k)).attr("stroke-width", 2.5);
  mark.append("path").attr("d", d3.symbol(runSymbol(k), 50)).attr("fill", runColour(k));
  return mark.node();
}

// A curve of one run as {x, y}, without the points at which there was no evaluation.
function curvePoints(run, name, axis = state.axis) {
  const values = run.curves[name] || [];
  return values.flatMap((y, index) => (y === null ? [] : [{ x: run.points[axis][index], y }]));
}

function timeTitle(runs) {
  const titles = unique(runs.map((run) => {
    if (run.time_unit !== "s") return "expected gradients per worker";
    return run.world === "virtual" ? "simulated seconds" : "seconds";
  }));
  if (titles.length === 1) return titles[0];
  return titles.includes("expected gradients per worker") ? "time, each run on its own clock" : "simulated or real seconds";
}

// Title, tick format and tooltip format of a horizontal axis.
function axisOptions(axis) {
  const time = (x) => formatTime(x, report.runs[0].time_unit);
  return {
    steps: { label: "steps per worker", format: (x) => `${formatFigure(x)} steps` },
    samples: { label: "samples seen by all workers", tickFormat: "~s", format: (x) => `${formatCount(x)} samples` },
    time: { label: timeTitle(report.runs), format: time },
    bytes: { label: "sent by all workers", tickFormat: formatSize, format: formatSize },
  }[axis];
}

function drawAccuracy() {
  const curves = visibleRuns().map(({ run, k }) => {
    const [averaged, mean] = ["accuracy", "worker_accuracy_mean"].map((name) => curvePoints(run, name));
    const [lowest, highest] = ["min", "max"].map((end) => curvePoints(run, `worker_accuracy_${end}`));
    const band = lowest.map(({ x, y }, index) => ({ x, low: y, high: highest[index].y }));
    // Real workers know the averaged model only at the end: before that, the mean of their own models stands for it.
    if (averaged.length > 1 || mean.length < 2) return { k, name: run.name, points: averaged, band };
    return { k, name: `${run.name}, workers`, points: mean, band, end: averaged };
  });
  find("accuracy-meaning").textContent = curves.some((curve) => curve.end)
    ? "mean of the workers’ own models, and their range; large symbol: averaged model at the end"
    : "averaged model on the test set; shaded: range of the workers’ own models";
  drawCurves("accuracy", curves, { x: axisOptions(state.axis), format: formatPercent, tickFormat: "~%" });
}

function drawLoss() {
  const curves = [], faint = [];
  for (const { run, k } of visibleRuns()) {
    const [test, training] = ["loss", "train_loss"].map((name) => curvePoints(run, name));
    if (test.length > 1 || training.length < 2) {
      curves.push({ k, name: run.name, points: test });
      if (training.length > 1) faint.push({ k, points: training });
    } else curves.push({ k, name: `${run.name}, training`, points: training, end: test });
  }
  find("loss-meaning").textContent = curves.some((curve) => curve.end)
    ? "mean over the workers’ mini-batches; large symbol: averaged model on the test set at the end"
    : `averaged model on the test set${faint.length ? "; thin: mini-batches" : ""}`;
  drawCurves("loss", curves, { x: axisOptions(state.axis), faint, format: formatFigure, zero: true });
}

function drawConsensus() {
  const curves = [], faint = [];
  for (const { run, k } of visibleRuns()) {
    curves.push({ k, name: run.name, points: curvePoints(run, "consensus", "time") });
    if (!run.predicted) continue;
    const points = run.predicted.time.map((x, index) => ({ x, y: run.predicted.value[index] }));
    faint.push({ k, points, dasharray: "6 5" });
  }
  const values = curves.flatMap((curve) => curve.points.map((point) => point.y)).filter((y) => y > 0);
  const logarithmic = values.length > 0 && d3.max(values) > WIDE_RANGE * d3.min(values);
  const exact = curves.filter((curve) => logarithmic && curve.points.every((point) => point.y === 0));
  find("consensus-meaning").textContent = "root mean square distance of the workers’ models from their mean"
    + (faint.length ? "; dashed: predicted from the topology’s spectrum" : "")
    + (exact.length ? `; always 0: ${exact.map((curve) => curve.name).join(", ")}` : "");
  const isFitted = report.runs.some((run) => run.predicted && run.summary.samples);
  const fit = "one number, the variance that gradients add, is fitted to the second half of the run";
  find("prediction-meaning").textContent = faint.length
    ? `The prediction follows from the eigenvalues of the exchange rates; ${isFitted ? fit : "nothing is fitted"}.` : "";
  drawCurves("consensus", curves, { x: axisOptions("time"), faint, logarithmic, format: formatFigure, zero: true });
}

function drawLearning() {
  drawAccuracy();
  drawLoss();
  drawConsensus();
  // The consensus distance is always drawn over time.
  find("axis").hidden = find("accuracy-card").hidden && find("loss-card").hidden;
}

// Draw one picture. Each curve has the index k of its run, a name for the tooltip and points {x, y}. It may have a band
// {x, low, high}, and an end: points with a large symbol. Faint curves have neither symbols nor tooltips.
function drawCurves(id, curves, { x, format, tickFormat = format, faint = [], logarithmic = false, zero = false }) {
  const hasContent = curves.some((curve) => curve.points.length || (curve.end || []).length);
  // Where the reader has hidden all runs, the empty picture stays: it is not empty for want of data.
  showCard(id, hasContent || (visibleRuns().length === 0 && state.drawn.has(id)));
  const container = find(id);
  container.replaceChildren();
  if (!hasContent) return;
  state.drawn.add(id);
  const zoom = state.zoom[id];
  const drawable = (points = []) => withinZoom(points, zoom).filter((point) => !logarithmic || (point.y ?? point.low) > 0);
  const drawn = curves
    .map((curve) => ({ ...curve, points: drawable(curve.points), end: drawable(curve.end), band: drawable(curve.band) }))
    .filter((curve) => curve.points.length || curve.end.length);
  const all = drawn.flatMap((curve) => [...curve.points, ...curve.end]);
  const decades = d3.extent(all, (point) => Math.floor(Math.log10(point.y)));
  const chart = Plot.plot({
    ...MARGIN, width: container.clientWidth, height: container.clientHeight, clip: true,
    x: {
      label: x.label, tickFormat: x.tickFormat, domain: zoom || [0, d3.max(all, (point) => point.x) || 1],
      ticks: container.clientWidth < 420 ? 4 : 7,
      labelAnchor: "center", labelArrow: "none", grid: true, insetRight: 6,
    },
    y: {
      type: logarithmic ? "log" : "linear", nice: true, zero: zero && !logarithmic, label: null, tickFormat, grid: true,
      inset: 3, ticks: logarithmic ? d3.range(decades[0], decades[1] + 2).map((power) => 10 ** power) : 5,
    },
    marks: curveMarks(drawn, faint.map((curve) => ({ ...curve, points: drawable(curve.points) })), logarithmic),
  });
  container.append(chart);
  container.curves = drawn;
  const showValues = (event, atX) => {
    const rows = drawn.map((curve) => ({ curve, point: nearest(curve.points.length ? curve.points : curve.end, atX) }));
    rows.sort((a, b) => b.point.y - a.point.y);
    showTooltip(event, element("strong", {}, x.format(atX)), ...rows.map(({ curve, point }) => {
      const ended = curve.points.at(-1) === point && atX > point.x ? `, ended at ${x.format(point.x)}` : "";
      return element("div", {}, runMark(curve.k), `${curve.name}: ${format(point.y)}${ended}`);
    }));
  };
  addPointer(id, chart, chart.scale("x").range, chart.scale("x").invert, showValues, drawLearning);
}

function curveMarks(curves, faint, logarithmic) {
  const at = { x: "x", y: "y" };
  const dashes = dashesOfCoinciding(curves, logarithmic);
  const symbols = (curve, r, kind) => ({
    ...at, fill: runColour(curve.k), stroke: "var(--card)", strokeWidth: 1, symbol: runSymbol(curve.k), r,
    className: `${kind} run-${curve.k}`,
  });
  return [
    ...curves.map((curve) => Plot.areaY(curve.band, {
      x: "x", y1: "low", y2: "high", fill: runColour(curve.k), fillOpacity: 0.13, className: `band run-${curve.k}`,
    })),
    ...faint.map((curve) => Plot.line(curve.points, {
      ...at, stroke: runColour(curve.k), strokeWidth: 1.2, strokeOpacity: 0.65, strokeDasharray: curve.dasharray,
      className: `faint run-${curve.k}`,
    })),
    ...curves.map((curve, index) => Plot.line(curve.points, {
      ...at, stroke: runColour(curve.k), strokeWidth: 2, ...dashes[index], className: `curve run-${curve.k}`,
    })),
    ...curves.map((curve) => Plot.dot(symbolPoints(curve.points, curve.k), symbols(curve, 4.5, "symbol"))),
    ...curves.map((curve) => Plot.dot(curve.end, symbols(curve, 7, "end"))),
  ];
}

const bisectX = d3.bisector((point) => point.x);
const nearest = (points, x) => points[bisectX.center(points, x)];

// The points in the chosen range, and one more on each side so that lines lead out of the picture.
function withinZoom(points, zoom) {
  if (!zoom) return points;
  return points.slice(Math.max(0, bisectX.left(points, zoom[0]) - 1), bisectX.right(points, zoom[1]) + 1);
}

// A few points for the symbols of a curve, at other positions than those of the other runs.
function symbolPoints(points, k) {
  if (points.length < 2) return points;
  const first = points[0].x, range = points.at(-1).x - first;
  const offset = (k + 0.5) / report.runs.length;
  const positions = d3.range(SYMBOLS_PER_CURVE).map((index) => first + ((index + offset) / SYMBOLS_PER_CURVE) * range);
  return unique(positions.map((x) => nearest(points, x)));
}

// Dash patterns for curves that could not be told apart: within a group, each draws where the others leave gaps.
function dashesOfCoinciding(curves, logarithmic) {
  const scale = logarithmic ? Math.log : (y) => y;
  const [low, high] = d3.extent(curves.flatMap((curve) => curve.points), (point) => scale(point.y));
  const distance = COINCIDING_DISTANCE * (high - low);
  const groups = [];
  for (const curve of curves) {
    const group = groups.find(([first]) => coincide(first.points, curve.points, scale, distance));
    if (group) group.push(curve);
    else groups.push([curve]);
  }
  return curves.map((curve) => {
    const group = groups.find((members) => members.includes(curve));
    if (group.length === 1) return {};
    const gap = DASH_LENGTH * (group.length - 1);
    return { strokeDasharray: `${DASH_LENGTH} ${gap}`, strokeDashoffset: -DASH_LENGTH * group.indexOf(curve) };
  });
}

function coincide(one, other, scale, distance) {
  if (one.length < 2 || other.length < 2) return false;
  const start = Math.max(one[0].x, other[0].x), end = Math.min(one.at(-1).x, other.at(-1).x);
  if (!(end > start)) return false;
  const samples = d3.range(51).map((index) => start + (index / 50) * (end - start));
  const close = samples.filter((x) => Math.abs(scale(nearest(one, x).y) - scale(nearest(other, x).y)) <= distance);
  return close.length >= COINCIDING_SHARE * samples.length;
}

// Call onMove(event, x) while the pointer is over a picture, draw a line there, and zoom to a range that is dragged.
function addPointer(id, svg, [left, right], invert, onMove, redraw) {
  const line = d3.select(svg).append("rect").attr("class", "pointer").attr("visibility", "hidden")
    .attr("height", svg.viewBox.baseVal.height - MARGIN.marginBottom);
  let dragStart = null;
  const position = (event) => Math.max(left, Math.min(right, d3.pointer(event, svg)[0]));
  svg.addEventListener("pointermove", (event) => {
    const x = position(event), from = dragStart ?? x;
    line.attr("visibility", "visible").classed("range", dragStart !== null)
      .attr("x", Math.min(from, x)).attr("width", Math.max(1, Math.abs(x - from)));
    onMove(event, invert(x));
  });
  svg.addEventListener("pointerleave", () => {
    dragStart = null;
    line.attr("visibility", "hidden");
    hideTooltip();
  });
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") dragStart = position(event);
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = [dragStart, position(event)].sort((a, b) => a - b);
    const isRange = dragStart !== null && ends[1] - ends[0] > 8;
    dragStart = null;
    if (!isRange) return;
    state.zoom[id] = ends.map(invert);
    redraw();
  });
  svg.addEventListener("dblclick", () => {
    delete state.zoom[id];
    redraw();
  });
}
