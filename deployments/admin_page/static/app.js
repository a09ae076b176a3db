// Ties the parts together: tabs, keys, and redrawing at most once a frame.

import { byId, rate, write } from "./dom.js";
import { hasKey } from "./api.js";
import * as chat from "./chat.js";
import * as details from "./details.js";
import * as dialogs from "./dialogs.js";
import { fleet, follow, isResident, onChange, reconnect, total } from "./fleet.js";
import * as grid from "./grid.js";
import * as lists from "./lists.js";

const TABS = ["adapters", "aliases", "operations", "try"];

function show(tab, focus = false) {
  for (const each of TABS) {
    const button = byId(`tab-${each}`);
    const isChosen = each === tab;
    button.setAttribute("aria-selected", isChosen);
    button.tabIndex = isChosen ? 0 : -1;
    byId(`view-${each}`).hidden = !isChosen;
    if (isChosen && focus) button.focus();
  }
  if (location.hash !== `#${tab}`) history.replaceState(null, "", `#${tab}`);
  update();
}

for (const tab of TABS) byId(`tab-${tab}`).addEventListener("click", () => show(tab));
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const now = TABS.findIndex((tab) => byId(`tab-${tab}`).getAttribute("aria-selected") === "true");
  show(TABS[(now + step + TABS.length) % TABS.length], true);
});
document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName);
  if (event.key !== "/" || isTyping || byId("dialog").open) return;
  event.preventDefault();
  show("adapters");
  byId("search").focus();
});

function figures() {
  const sum = (field) => fleet.replicas.reduce((all, replica) => all + replica[field], 0);
  let resident = 0;
  for (const adapter of fleet.adapters.values()) resident += isResident(adapter);
  const shown = {
    replicas: fleet.replicas.length, adapters: fleet.adapters.size.toLocaleString("en"), resident,
    running: sum("num_running"), waiting: sum("num_waiting"),
    rate: rate(total("requests")), tokens: rate(total("tokens")),
  };
  for (const [name, value] of Object.entries(shown)) write(byId(`fig-${name}`), value);
}

let isDue = false;
function update() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    performance.mark("update");
    write(byId("base"), fleet.baseModel);
    byId("load").disabled = byId("alias-new").disabled = !fleet.mayUpdate;
    if (fleet.at) figures();
    if (!byId("view-adapters").hidden) grid.update();
    lists.update();
    details.update();
    chat.update();
    performance.measure("update", "update");
  });
}

function onStatus(kind, words) {
  const live = byId("live");
  live.className = `live ${kind}`;
  write(live, words);
  live.title = fleet.error;
}

grid.start((name) => {
  grid.select(name);
  details.open(name);
});
details.start(() => grid.select(""), (name) => {
  chat.compare(name);
  show("try", true);
});
chat.start();
byId("load").addEventListener("click", () => dialogs.load());
byId("alias-new").addEventListener("click", () => dialogs.setAlias());
byId("key").addEventListener("click", async () => {
  if (await dialogs.askForKey(hasKey() ? "A key is set. Give another, or none to forget it." : "")) reconnect();
});
onChange(update);
const wanted = location.hash.slice(1);
show(TABS.includes(wanted) ? wanted : "adapters");
follow(onStatus, dialogs.askForKey);
