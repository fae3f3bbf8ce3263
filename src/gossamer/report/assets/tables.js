// The sentence that opens the page, the summary and the configuration.
"use strict";

const MAX_NAMES = 4;

function writeHead() {
  const { runs } = report;
  const names = runs.map((run) => run.name);
  const title = names.length > MAX_NAMES ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
  document.title = `${title} · gossamer`;
  find("headline").textContent = report.headline;
  const all = (get) => unique(runs.map(get)).join(", ");
  find("subtitle").textContent = [
    all((run) => run.task),
    all(workersText),
    all((run) => run.topology),
    all((run) => (run.world === "virtual" ? "virtual cluster" : "real processes")),
  ].join(" · ");
  const notes = runs.flatMap((run) => run.notes.map((note) => `${run.name}: ${note}.`));
  find("notes").replaceChildren(...notes.map((note) => element("li", {}, note)));
  const started = runs.map((run) => run.started).filter(Boolean).sort()[0];
  const when = started ? `, started ${started.slice(0, 16).replace("T", " ")} UTC` : "";
  find("footer").replaceChildren(`gossamer ${all((run) => run.version)}${when}.`, ...fileLinks());
}

function workersText({ num_workers: number, replica_size: size }) {
  if (size > 1) return `${number} ${number === 1 ? "replica" : "replicas"} of ${size} ranks`;
  return number === 1 ? "1 worker" : `${number} workers`;
}

// `gossamer watch` serves the files of the run too.
function fileLinks() {
  if (!report.live) return [];
  const links = report.live.files.flatMap((name, index) => {
    const href = `files/${name.split("/").map(encodeURIComponent).join("/")}`;
    return [index ? ", " : "", element("a", { href }, name)];
  });
  return [" Files of the run: ", ...links, "."];
}

function writeSummary() {
  const { runs, targets } = report;
  const columns = Object.keys(report.columns).filter((name) => runs.some((run) => run.cells[name] !== NOTHING));
  const choice = targets && targets.choices[Math.min(state.target ?? targets.default, targets.choices.length - 1)];
  const head = element("tr", {},
    element("th", { scope: "col" }, runs.some((run) => run.name !== run.method) ? "run" : "method"),
    targets && element("th", { scope: "col" }, targetSelect(targets.choices, choice)),
    ...columns.map((name) => element("th", { scope: "col" }, name)));
  const rows = runs.map((run, k) => {
    const unfinished = run.finished ? null : element("small", { class: "quiet" }, " unfinished");
    const row = element("tr", {},
      element("th", { scope: "row" }, runMark(k), element("span", { class: "name" }, run.name), unfinished),
      targets && element("td", { class: "target" }, choice.cells[k]),
      ...columns.map((name) => element("td", {}, run.cells[name])));
    emphasiseOnHover(row, k);
    return row;
  });
  find("summary").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  const meanings = columns.map((name) => `${name}: ${report.columns[name]}`);
  if (targets) meanings.unshift(`time to ${choice.text}: ${targets.meaning} ${choice.text}`);
  find("summary-meanings").textContent = `${meanings.join("; ")}.`;
}

// The head of the column with the time to a target, which the reader can change.
function targetSelect(choices, chosen) {
  const options = choices.map((choice, index) =>
    element("option", { value: index, selected: choice === chosen }, choice.text));
  const select = element("select", { id: "target", "aria-label": "target" }, ...options);
  select.addEventListener("change", () => {
    state.target = Number(select.value);
    writeSummary();
  });
  return element("label", {}, "time to ", select);
}

function writeConfiguration() {
  const { runs } = report;
  const commands = unique(runs.map((run) => run.command)).filter(Boolean);
  find("commands").replaceChildren(...commands.map((command) => element("pre", {}, command)));
  const names = unique(runs.flatMap((run) => Object.keys(run.config)));
  const differing = names.filter((name) => unique(runs.map((run) => JSON.stringify(run.config[name]))).length > 1);
  find("differences").replaceChildren(...(differing.length ? settingsTable(differing) : []));
  find("settings").replaceChildren(...settingsTable(names));
}

function settingsTable(names) {
  const { runs } = report;
  const value = (run, name) => (name in run.config ? String(run.config[name]) || "(none)" : NOTHING);
  const head = element("tr", {}, element("th", {}, "setting"), ...runs.map((run) => element("th", {}, run.name)));
  const rows = names.map((name) => element("tr", {},
    element("th", { scope: "row" }, name.replaceAll("_", "-")), ...runs.map((run) => element("td", {}, value(run, name)))));
  return [element("thead", {}, head), element("tbody", {}, ...rows)];
}
