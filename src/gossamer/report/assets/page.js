// The page: its state, its switches, and its refreshing while a run goes on.
"use strict";

const REFRESH_MS = 2000;

let report = JSON.parse(find("data").textContent);

const state = {
  axis: "time", // horizontal axis of the curves
  run: 0, // whose workers are shown
  target: null, // index of the target in the summary; null: the default
  hidden: new Set(), // runs that are not drawn
  zoom: {}, // chosen ranges of horizontal axes, by picture
  drawn: new Set(), // pictures that have had content
};

function drawAll() {
  // A window that is not shown may have no width.
  if (find("summary").clientWidth === 0) return;
  drawLearning();
  drawTimelines();
  drawWorkers();
}

function showReport() {
  state.run = Math.min(state.run, report.runs.length - 1);
  writeHead();
  writeSummary();
  writeLegend();
  writeSwitch("axis", report.axes.map((axis) => [axis, axis]), state.axis, (axis) => {
    state.axis = axis;
    delete state.zoom.accuracy;
    delete state.zoom.loss;
    drawLearning();
  });
  writeSwitch("run", report.runs.map((run, k) => [String(k), run.name]), String(state.run), (k) => {
    state.run = Number(k);
    drawWorkers();
  });
  writeConfiguration();
  drawAll();
}

function writeSwitch(id, choices, chosen, choose) {
  const fieldset = find(id);
  const labels = choices.map(([value, text]) => {
    const input = element("input", { type: "radio", name: id, value, checked: value === chosen });
    input.addEventListener("change", () => choose(value));
    return element("label", {}, input, text);
  });
  fieldset.replaceChildren(fieldset.querySelector("legend"), ...labels);
  fieldset.hidden = choices.length < 2;
}

// Buttons that hide and show runs.
function writeLegend() {
  const buttons = report.runs.map((run, k) => {
    const isShown = () => String(!state.hidden.has(k));
    const button = element("button", { type: "button", "aria-pressed": isShown() }, runMark(k), run.name);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(k)) state.hidden.add(k);
      button.setAttribute("aria-pressed", isShown());
      drawLearning();
    });
    emphasiseOnHover(button, k);
    return button;
  });
  find("legend").replaceChildren(...(buttons.length > 1 ? buttons : []));
}

// The curves of the other runs fade while the pointer is over an element that stands for run k.
function emphasiseOnHover(target, k) {
  const setFaded = (faded) => {
    for (const curve of find("learning").querySelectorAll("[class*='run-']")) {
      curve.classList.toggle("faded", faded && !curve.classList.contains(`run-${k}`));
    }
  };
  target.addEventListener("pointerenter", () => setFaded(true));
  target.addEventListener("pointerleave", () => setFaded(false));
}

// While a run goes on, `gossamer watch` serves this page and the newest report.

let entityTag = "";

async function refresh() {
  try {
    const headers = entityTag ? { "If-None-Match": entityTag } : {};
    const response = await fetch("report.json", { cache: "no-store", headers });
    if (response.status === 200) {
      entityTag = response.headers.get("ETag") || "";
      report = await response.json();
      showReport();
    } else if (response.status !== 304) {
      throw new Error(String(response.status));
    }
    writeProgress();
  } catch {
    writeLive("gossamer watch does not answer any more; this is its last state", true);
  }
  setTimeout(refresh, REFRESH_MS);
}

function writeProgress() {
  const progress = report.runs.map((run) => {
    const done = run.summary.total_steps, goal = run.goal * run.num_workers;
    const share = !isNumber(done) ? "starting"
      : goal ? formatShare(Math.min(1, done / goal)) : `step ${formatCount(Math.round(done / run.num_workers))}`;
    const text = run.finished ? "finished" : share;
    return report.runs.length > 1 ? `${run.name} ${text}` : text;
  });
  writeLive(progress.join(" · "), report.runs.every((run) => run.finished));
}

function writeLive(text, hasEnded) {
  find("live").hidden = false;
  find("live").classList.toggle("ended", hasEnded);
  find("live-text").textContent = text;
}

// Curves take their colours from the style sheet; time lines are images and have to be drawn again. Paper is light.

function setPrinting(isPrinting) {
  document.documentElement.classList.toggle("print", isPrinting);
  drawTimelines();
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTimelines);
window.addEventListener("beforeprint", () => setPrinting(true));
window.addEventListener("afterprint", () => setPrinting(false));

let drawnWidth = window.innerWidth;
window.addEventListener("resize", () => {
  // Scrolling on a phone changes the height only.
  if (window.innerWidth !== drawnWidth) drawAll();
  drawnWidth = window.innerWidth;
});

showReport();
if (report.live) {
  writeProgress();
  setTimeout(refresh, REFRESH_MS);
}
document.documentElement.dataset.drawn = "yes";
