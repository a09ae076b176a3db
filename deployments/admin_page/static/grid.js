// The matrix of adapters and replicas. Only the rows in sight exist, however many there are.

import { byId, make, rate, shortId, write } from "./dom.js";
import { fleet, history, isResident, recent, runningOn } from "./fleet.js";
import { draw, makePlot } from "./plots.js";

const SPARE = 6;
const grid = byId("grid");
const head = byId("grid-head");
const rows = byId("grid-rows");

const pool = new Map(); // position in the list -> the row's parts
let listed = [];
let selected = "";
let onOpen = () => {};
let columns = "";
let sorted = { at: 0, key: "" };

// Rows that change places under the pointer are hard to hit: what moves all the time is sorted now and then.
const SORT_MS = 5000;

export function start(open) {
  onOpen = open;
  grid.addEventListener("scroll", () => requestAnimationFrame(render), { passive: true });
  new ResizeObserver(render).observe(grid);
  grid.addEventListener("keydown", onKey);
  for (const id of ["search", "show", "order"]) byId(id).addEventListener("input", () => { grid.scrollTop = 0; update(); });
}

export function select(name) {
  selected = name;
  render();
}

const FILTERS = {
  all: () => true,
  resident: isResident,
  pinned: (adapter) => adapter.pinned,
  busy: (adapter) => runningOn(adapter) > 0,
  changing: (adapter) => adapter.state !== "ready",
};
const byName = (a, b) => (a.name < b.name ? -1 : 1);
const descending = (key) => (a, b) => (key(b) || 0) - (key(a) || 0) || byName(a, b);
const ORDERS = {
  name: byName,
  traffic: descending((adapter) => recent(adapter.name, "requests", 60)),
  slowest: descending((adapter) => recent(adapter.name, "seconds", 60)),
  newest: descending((adapter) => adapter.generation),
};

export function update() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const keeps = FILTERS[byId("show").value];
  const found = [...fleet.adapters.values()].filter((adapter) => {
    const name = adapter.name.toLowerCase();
    return keeps(adapter) && words.every((word) => name.includes(word));
  });
  listed = inOrder(found);
  const all = fleet.adapters.size;
  write(byId("count"), listed.length === all ? `${all.toLocaleString("en")} adapters` : `${listed.length.toLocaleString("en")} of ${all.toLocaleString("en")}`);
  layout();
  render();
}

function inOrder(found) {
  const key = JSON.stringify([byId("order").value, byId("show").value, byId("search").value]);
  const isFresh = key === sorted.key && performance.now() - sorted.at < SORT_MS;
  if (isFresh && byId("order").value !== "name") {
    const places = new Map(listed.map((adapter, position) => [adapter.name, position]));
    return found.sort((a, b) => (places.get(a.name) ?? places.size) - (places.get(b.name) ?? places.size) || byName(a, b));
  }
  sorted = { at: performance.now(), key };
  return found.sort(ORDERS[byId("order").value]);
}

function layout() {
  const replicas = fleet.replicas.map((replica) => replica.replica_id);
  const isPhone = grid.clientWidth < 640;
  const wanted = JSON.stringify([replicas, isPhone]);
  if (wanted === columns) return;
  columns = wanted;
  const [fixed, least, each] = isPhone ? ["minmax(0, 1fr) 52px", 190, 36] : ["minmax(0, 2fr) 72px 92px 64px minmax(0, 1fr)", 600, 64];
  grid.style.setProperty("--columns", `${fixed} repeat(${replicas.length}, ${each}px)`);
  grid.style.setProperty("--min-width", `${least + replicas.length * each}px`);
  const titles = isPhone ? ["Adapter", "Req/s"] : ["Adapter", "Generation", "State", "Rank", "Requests/s"];
  const numeric = new Set(["Generation", "Rank", "Requests/s", "Req/s"]);
  head.replaceChildren(
    ...titles.map((title) => make("div", { role: "columnheader", class: numeric.has(title) ? "num" : "" }, title === "Generation" ? "Gen." : title)),
    ...replicas.map((id) => make("div", { role: "columnheader", class: "at", title: `replica ${id}` }, isPhone ? shortId(id).slice(-3) : shortId(id))),
  );
  pool.forEach((row) => row.element.remove());
  pool.clear();
}

function rowHeight() {
  return parseFloat(getComputedStyle(grid).getPropertyValue("--row"));
}

export function render() {
  const height = rowHeight();
  rows.style.height = `${listed.length * height}px`;
  grid.setAttribute("aria-rowcount", listed.length + 1);
  const first = Math.max(0, Math.floor(grid.scrollTop / height) - SPARE);
  const last = Math.min(listed.length, Math.ceil((grid.scrollTop + grid.clientHeight) / height) + SPARE);
  for (const [position, row] of pool) {
    if (position < first || position >= last) {
      row.element.remove();
      pool.delete(position);
    }
  }
  for (let position = first; position < last; position++) fill(position, height);
  rows.dataset.empty = listed.length ? "" : "yes";
  showEmpty();
}

function showEmpty() {
  let note = rows.querySelector(".empty");
  if (listed.length) note?.remove();
  else if (!note) rows.append(make("p", { class: "empty" }, "No adapter is like this."));
}

function fill(position, height) {
  const adapter = listed[position];
  let row = pool.get(position);
  if (!row) {
    row = makeRow();
    pool.set(position, row);
    row.element.style.top = `${position * height}px`;
    row.element.setAttribute("aria-rowindex", position + 2);
    rows.append(row.element);
  }
  row.name = adapter.name;
  write(row.text, adapter.name);
  row.element.title = adapter.name;
  row.pin.hidden = !adapter.pinned;
  row.element.setAttribute("aria-selected", adapter.name === selected);
  if (row.generation) {
    write(row.generation, adapter.generation || "–");
    write(row.state, adapter.state);
    row.state.className = `state ${adapter.state}`;
    write(row.rank, adapter.rank || "–");
  }
  const samples = history(adapter.name);
  write(row.rate, samples.length ? rate(recent(adapter.name, "requests") || 0) : "");
  if (row.plot) draw(row.plot, samples.map((sample) => sample.requests));
  fleet.replicas.forEach((replica, index) => fillCell(row.cells[index], adapter.held[replica.replica_id]));
}

function fillCell(cell, held) {
  const [host, slot, running] = held || [false, null, 0];
  const place = slot !== null ? "slot" : host ? "host" : "";
  cell.className = `cell ${place}${running ? " busy" : ""}`;
  write(cell, slot !== null ? slot : "");
  const words = slot !== null ? `in slot ${slot}` : host ? "in host memory" : "not in memory";
  cell.setAttribute("aria-label", running ? `${words}, ${running} requests` : words);
}

function makeRow() {
  const isPhone = JSON.parse(columns)[1];
  const row = { cells: fleet.replicas.map(() => make("span", { class: "cell", role: "img" })) };
  row.text = make("span", { class: "text" });
  row.pin = make("span", { class: "pin" }, "pinned");
  row.rate = make("span", { class: "num" });
  const parts = [make("div", { class: "name", role: "gridcell" }, row.text, row.pin)];
  if (!isPhone) {
    row.generation = make("div", { class: "num", role: "gridcell" });
    row.state = make("div", { role: "gridcell" });
    row.rank = make("div", { class: "num", role: "gridcell" });
    row.plot = makePlot(90, 22);
    parts.push(row.generation, row.state, row.rank);
  }
  parts.push(make("div", { class: "traffic", role: "gridcell" }, row.plot || null, row.rate));
  parts.push(...row.cells.map((cell) => make("div", { class: "at", role: "gridcell" }, cell)));
  row.element = make("div", { class: "row", role: "row", onclick: () => onOpen(row.name) }, ...parts);
  return row;
}

function onKey(event) {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
  if (event.key === "Enter" && selected) return onOpen(selected);
  if (!(event.key in steps) || !listed.length) return;
  event.preventDefault();
  const now = listed.findIndex((adapter) => adapter.name === selected);
  const next = Math.min(listed.length - 1, Math.max(0, now + steps[event.key]));
  selected = listed[next].name;
  const height = rowHeight(), top = next * height, room = grid.clientHeight - 38;
  if (top < grid.scrollTop) grid.scrollTop = top;
  else if (top + height > grid.scrollTop + room) grid.scrollTop = top + height - room;
  render();
}
