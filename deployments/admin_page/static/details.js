// One adapter: what it is, where it is, how it does, and what can be done with it.

import { byId, make, rate, seconds, size, when, write } from "./dom.js";
import * as dialogs from "./dialogs.js";
import { fleet, history, recent } from "./fleet.js";
import { draw, makePlot } from "./plots.js";

const panel = byId("details");
let shown = "";
let drawn = "";
let plots = {};
let opener = null;
let onClose = () => {};
let onTry = () => {};

const PLOTS = {
  requests: ["Requests/s", rate], tokens: ["Tokens/s", rate],
  seconds: ["Mean time", seconds], first: ["First token", seconds],
};

export function start(close, tryIt) {
  onClose = close;
  onTry = tryIt;
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !panel.hidden && !byId("dialog").open) close_();
  });
}

export function open(name) {
  opener = document.activeElement;
  shown = name;
  drawn = "";
  panel.hidden = false;
  update();
  panel.querySelector("button")?.focus();
}

function close_() {
  panel.hidden = true;
  shown = "";
  onClose();
  opener?.focus();
}

export function update() {
  if (!shown) return;
  const adapter = fleet.adapters.get(shown);
  if (!adapter) return close_();
  // Built anew only when it changed, so that focus and selection stay.
  const facts = JSON.stringify([adapter, fleet.replicas.map((replica) => replica.replica_id), fleet.mayUpdate]);
  if (facts !== drawn) {
    drawn = facts;
    const focused = panel.contains(document.activeElement) ? document.activeElement.textContent : null;
    build(adapter);
    if (focused !== null) [...panel.querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
  }
  for (const [field, [, format]] of Object.entries(PLOTS)) {
    write(plots[field].value, format(recent(adapter.name, field)));
    draw(plots[field].svg, history(adapter.name).map((sample) => sample[field]));
  }
}

function build(adapter) {
  const off = !fleet.mayUpdate;
  const button = (text, action, kind = "") => make("button", { type: "button", class: kind, disabled: off, title: off ? "allow_runtime_updating is off" : null, onclick: action }, text);
  plots = {};
  panel.replaceChildren(
    make("header", {}, make("h2", {}, adapter.name), make("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: close_ }, "×")),
    make("div", { class: "actions" },
      button("Replace", () => dialogs.load(adapter.name, true)),
      button(adapter.pinned ? "Unpin" : "Pin", () => dialogs.setPinned(adapter)),
      button("Set alias", () => dialogs.setAlias("", adapter.name)),
      make("button", { type: "button", onclick: () => { close_(); onTry(adapter.name); } }, "Try it"),
      button("Unload", () => dialogs.unload(adapter), "danger")),
    make("div", { class: "plots" }, ...Object.entries(PLOTS).map(([field, [title]]) => plot(field, title))),
    facts(adapter),
    places(adapter),
    ...(adapter.kept.length ? [kept(adapter, button)] : []),
  );
}

function plot(field, title) {
  const value = make("b");
  const svg = makePlot(160, 36);
  svg.setAttribute("width", "100%");
  plots[field] = { value, svg };
  return make("figure", {}, make("figcaption", {}, title, value), svg);
}

function facts(adapter) {
  const rows = {
    generation: adapter.generation, state: adapter.state, pinned: adapter.pinned ? "yes" : "no",
    rank: adapter.rank || "–", size: size(adapter.size), source: adapter.source, digest: adapter.digest,
    loaded: `${when(adapter.created_at)} by ${adapter.created_by || "a request"}`,
  };
  const mono = new Set(["source", "digest"]);
  return make("dl", {}, ...Object.entries(rows).flatMap(([name, value]) => [make("dt", {}, name), make("dd", { class: mono.has(name) ? "mono" : null }, String(value))]));
}

function places(adapter) {
  const rows = fleet.replicas.map((replica) => {
    const [host, slot, running] = adapter.held[replica.replica_id] || [false, null, 0];
    const words = slot !== null ? `slot ${slot}` : host ? "host memory" : "not in memory";
    return make("div", {}, make("span", { class: "mono" }, replica.replica_id), make("span", { class: "dim" }, running ? `${words}, ${running} running` : words));
  });
  return make("section", {}, make("h3", {}, "Replicas"), make("div", { class: "places" }, ...rows));
}

function kept(adapter, button) {
  const rows = adapter.kept.map(([generation, digest, created]) => make("div", {},
    make("span", { class: "mono" }, `${generation}  ${digest.slice(0, 12)}`), make("span", { class: "dim" }, when(created)),
    button("Roll back", () => dialogs.rollBack(adapter, generation))));
  return make("section", {}, make("h3", {}, "Earlier versions"), make("div", { class: "places" }, ...rows));
}
