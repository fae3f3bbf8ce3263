// Numbers as people read them (as gossamer.report.formats does in Python), and helpers for elements.
"use strict";

const NOTHING = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const formatFigure = (value) => (isNumber(value) ? Number(value.toPrecision(3)).toString() : NOTHING);
const formatPercent = (share) => (isNumber(share) ? (100 * share).toFixed(1) + "%" : NOTHING);
const formatShare = (share) => Math.round(100 * share) + "%";
const formatCount = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : NOTHING);

function formatSize(bytes) {
  if (!isNumber(bytes)) return NOTHING;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 999.5) return `${Number(bytes.toPrecision(3))} ${unit}`;
    bytes /= 1000;
  }
  return `${Number(bytes.toPrecision(3))} TB`;
}

function formatTime(time, unit) {
  if (!isNumber(time)) return NOTHING;
  if (unit !== "s") return `${Number(time.toPrecision(4))} gradients`;
  if (time < 120) return `${time < 10 ? Number(time.toPrecision(3)) : time.toFixed(1)} s`;
  return time < 7200 ? `${(time / 60).toFixed(1)} min` : `${(time / 3600).toFixed(1)} h`;
}

const unique = (values) => [...new Set(values)];
const find = (id) => document.getElementById(id);

// Text becomes text nodes, never HTML: names and events come from files of others.
function element(name, attributes = {}, ...children) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === true) created.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) created.setAttribute(key, value);
  }
  created.append(...children.filter((child) => child !== null && child !== undefined));
  return created;
}

// A card without content is not shown; neither is a section without cards.
function showCard(id, visible) {
  const card = find(`${id}-card`), section = card.closest("section");
  card.hidden = !visible;
  section.hidden = [...section.querySelectorAll("figure")].every((figure) => figure.hidden);
}

// One tooltip for all pictures, next to the pointer and within the window.
function showTooltip(event, ...content) {
  const tooltip = find("tooltip");
  tooltip.replaceChildren(...content);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const fitsRight = event.clientX + 16 + width < window.innerWidth;
  const left = fitsRight ? event.clientX + 16 : event.clientX - 16 - width;
  const top = Math.min(event.clientY + 12, window.innerHeight - height - 4);
  tooltip.style.left = `${Math.max(4, left)}px`;
  tooltip.style.top = `${Math.max(4, top)}px`;
}

function hideTooltip() {
  find("tooltip").hidden = true;
}
