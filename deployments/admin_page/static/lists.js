// Aliases and operations as cards, made anew only when they changed.

import { byId, make, when } from "./dom.js";
import { deleteAlias, fillChips, setAlias } from "./dialogs.js";
import { fleet } from "./fleet.js";

const drawn = { aliases: "", operations: "" };

function redraw(id, documents, makeCard, empty) {
  const facts = JSON.stringify([documents, fleet.mayUpdate]);
  if (facts === drawn[id]) return;
  drawn[id] = facts;
  byId(id).replaceChildren(...(documents.length ? documents.map(makeCard) : [make("p", { class: "empty" }, empty)]));
}

export function update() {
  redraw("aliases", fleet.aliases, aliasCard, "No alias is set.");
  redraw("operations", fleet.operations, operationCard, "Nothing was changed so far.");
}

function aliasCard(alias) {
  const total = alias.targets.reduce((sum, target) => sum + target.weight, 0);
  const bar = make("div", { class: "share", "aria-hidden": "true" });
  for (const target of alias.targets) {
    const part = make("i");
    part.style.flexGrow = target.weight;
    bar.append(part);
  }
  const words = alias.targets.map((target) => (alias.targets.length === 1 ? target.adapter : `${target.adapter} ${((100 * target.weight) / total).toFixed(1)}%`)).join("  ·  ");
  const written = alias.targets.length === 1 ? alias.targets[0].adapter : alias.targets.map((target) => `${target.adapter}=${target.weight}`).join(", ");
  return make("article", { class: "card" },
    make("div", { class: "line" }, make("b", {}, alias.alias), make("span", { class: "grow" }, words),
      make("button", { type: "button", disabled: !fleet.mayUpdate, onclick: () => setAlias(alias.alias, written) }, "Move"),
      make("button", { type: "button", class: "danger", disabled: !fleet.mayUpdate, onclick: () => deleteAlias(alias) }, "Forget")),
    bar);
}

function operationCard(operation) {
  const chips = make("div", { class: "chips" });
  fillChips(chips, operation.replicas);
  return make("article", { class: "card" },
    make("div", { class: "line" },
      make("span", { class: `phase ${operation.phase}` }, operation.phase),
      make("b", {}, `${operation.kind.replace("_", " ")} ${operation.name}`),
      make("span", { class: "dim grow" }, operation.generation ? `generation ${operation.generation}` : ""),
      make("span", { class: "dim" }, `${when(operation.started_at)}${operation.requested_by ? `, ${operation.requested_by}` : ""}`)),
    ...(operation.reason ? [make("p", { class: "bad" }, operation.reason)] : []),
    ...(operation.replicas.length ? [chips] : []),
    make("span", { class: "mono dim" }, operation.id));
}
