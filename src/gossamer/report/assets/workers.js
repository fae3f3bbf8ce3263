// The workers of one run: their steps, the staleness of what they merged, their traffic, and events.
"use strict";

const MAX_EVENTS = 200;
const MAX_LABELLED_WORKERS = 32;
const MIN_EDGE_WIDTH = 0.6;

const TIP = { fill: "var(--card)", stroke: "var(--line)" };

function drawWorkers() {
  const run = report.runs[state.run];
  drawSteps(run);
  drawStaleness(run);
  drawGraph(run);
  writeEvents(run);
  writeRanks(run);
}

// Folded: workers that are replicas, rank by rank.
function writeRanks(run) {
  const rows = (run.workers && run.workers.of_replicas) || [];
  find("ranks-of-replicas").hidden = rows.length === 0;
  const names = ["replica", "rank", "steps", "computing", "waiting"];
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map(({ worker, rank, steps, time }) => {
    const total = time.compute + time.step + time.wait;
    const cells = [worker, rank, formatCount(steps), ...[time.compute, time.wait].map((t) => formatShare(total ? t / total : 0))];
    return element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))));
  });
  find("ranks").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function drawSteps(run) {
  const { ranks = [], steps, time } = run.workers || {};
  const bars = ranks.map((rank, row) => {
    const total = time.compute[row] + time.step[row] + time.wait[row];
    const waiting = formatShare(total ? time.wait[row] / total : 0);
    const title = `worker ${rank}: ${formatCount(steps[row])} steps, ${waiting} of the time waiting`;
    return { x: rank, y: steps[row], title };
  });
  drawBars("steps", bars, { label: "worker", domain: [-0.6, d3.max(ranks) + 0.6], tickFormat: "," });
}

function drawStaleness(run) {
  const counts = run.workers ? run.workers.staleness.counts : [];
  const total = d3.sum(counts, ([, merges]) => merges);
  const bars = counts.map(([staleness, merges]) => {
    const share = merges / total;
    const title = `${staleness} steps: ${formatPercent(share)} of the merges (${formatCount(merges)})`;
    return { x: staleness, y: share, title };
  });
  const last = Math.max(4, d3.max(bars, (bar) => bar.x) || 0);
  drawBars("staleness", bars, { label: "steps", domain: [-0.6, last + 0.6], tickFormat: "~%" });
}

// Bars over whole numbers, with a tooltip each.
function drawBars(id, bars, { label, domain, tickFormat }) {
  showCard(id, bars.length > 0);
  if (!bars.length) return;
  const container = find(id);
  const numbers = d3.ticks(0, Math.floor(domain[1]), container.clientWidth / 40).filter(Number.isInteger);
  container.replaceChildren(Plot.plot({
    ...MARGIN, width: container.clientWidth, height: container.clientHeight,
    x: { label, domain, ticks: numbers, tickFormat: "d", labelAnchor: "center", labelArrow: "none" },
    y: { label: null, tickFormat, ticks: 5, nice: true, grid: true },
    marks: [
      Plot.rectY(bars, {
        x1: (bar) => bar.x - 0.42, x2: (bar) => bar.x + 0.42, y: "y", fill: runColour(state.run), title: "title", tip: TIP,
      }),
      Plot.ruleY([0], { stroke: "var(--line)" }),
    ],
  }));
  container.bars = bars;
}

function drawGraph(run) {
  const { positions, edges = [], unused_edges: unused = [], ranks = [], steps } = run.workers || {};
  const hasContent = Boolean(positions) && edges.length + unused.length > 0;
  showCard("graph", hasContent);
  if (!hasContent) return;
  const ends = ([a, b]) => ({ x1: positions[a][0], y1: positions[a][1], x2: positions[b][0], y2: positions[b][1] });
  const maxBytes = d3.max(edges, ([, , bytes]) => bytes) || 1;
  const links = edges.map((edge) => {
    const [a, b, bytes, exchanges] = edge;
    const title = `${a} – ${b}: ${formatSize(bytes)} in ${formatCount(exchanges)} exchanges`;
    return { ...ends(edge), share: bytes / maxBytes, title };
  });
  const workers = ranks.map((rank, row) => {
    const [x, y] = positions[rank];
    return { x, y, rank: String(rank), title: `worker ${rank}: ${formatCount(steps[row])} steps` };
  });
  const middles = links.map(({ x1, y1, x2, y2, title }) => ({ x: (x1 + x2) / 2, y: (y1 + y2) / 2, title }));
  const isLabelled = ranks.length <= MAX_LABELLED_WORKERS;
  const extent = d3.max(positions.flat(), Math.abs) || 1, domain = { domain: [-extent, extent] };
  const maxWidth = Math.max(2.5, Math.min(9, 60 / Math.sqrt(ranks.length + 1)));
  const link = { x1: "x1", y1: "y1", x2: "x2", y2: "y2" }, at = { x: "x", y: "y" };
  const container = find("graph"), colour = runColour(state.run);
  const side = Math.min(container.clientWidth, container.clientHeight);
  container.replaceChildren(Plot.plot({
    width: side, height: side, margin: 16, axis: null, x: domain, y: domain,
    marks: [
      Plot.link(unused.map(ends), { ...link, stroke: "var(--unused)", className: "unused" }),
      Plot.link(links, {
        ...link, stroke: colour, strokeWidth: ({ share }) => MIN_EDGE_WIDTH + maxWidth * share,
        strokeOpacity: ({ share }) => 0.35 + 0.5 * share, className: "edges",
      }),
      Plot.dot(workers, { ...at, r: isLabelled ? 10 : 3.5, fill: "var(--card)", stroke: colour, strokeWidth: 1.5 }),
      Plot.text(isLabelled ? workers : [], { ...at, text: "rank", fill: "var(--ink)" }),
      Plot.tip([...workers, ...middles], Plot.pointer({ ...at, title: "title", ...TIP })),
    ],
  }));
}

function writeEvents(run) {
  showCard("events", run.events.length > 0);
  find("events").replaceChildren(...run.events.slice(0, MAX_EVENTS).map(([time, text]) => {
    const when = time === null ? null : element("time", {}, formatTime(time, run.time_unit));
    return element("li", {}, when, element("span", {}, text));
  }));
}
