// Every change is asked about first, then made, then followed replica by replica.

import { adapterPath, aliasPath, call, newOperation, setKey } from "./api.js";
import { byId, make, shortId, write } from "./dom.js";
import { fleet, onChange, reconnect } from "./fleet.js";

const dialog = byId("dialog");
const form = byId("form");
let answerWith = null;

dialog.addEventListener("close", () => {
  const answer = answerWith;
  answerWith = null;
  answer?.(dialog.returnValue === "ok" ? Object.fromEntries(read()) : null);
});

function read() {
  return [...form.elements].filter((field) => field.name).map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value.trim()]);
}

export function ask({ title, text, fields = [], confirm, danger = false }) {
  if (dialog.open) dialog.close("cancel");
  const inputs = fields.map((field) => {
    const { label, check, ...attributes } = field;
    if (check) return make("label", { class: "check" }, make("input", { type: "checkbox", ...attributes }), label);
    return make("label", {}, label, make("input", { autocomplete: "off", spellcheck: "false", ...attributes }));
  });
  form.replaceChildren(
    make("h2", { id: "dialog-title" }, title),
    ...(text ? [make("p", { class: "dim" }, text)] : []),
    ...inputs,
    make("div", { class: "buttons" },
      make("button", { value: "cancel", formnovalidate: true, class: "quiet" }, "Cancel"),
      make("button", { value: "ok", class: danger ? "danger" : "main-action" }, confirm)),
  );
  // Enter in a field means the last button, not the first of the form.
  form.onkeydown = (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault();
    if (form.reportValidity()) dialog.close("ok");
  };
  dialog.setAttribute("aria-labelledby", "dialog-title");
  dialog.returnValue = "";
  dialog.showModal();
  const target = form.querySelector("input:not([type=checkbox]):not([readonly])") || form.querySelector("button[value=ok]");
  target.focus();
  return new Promise((resolve) => { answerWith = resolve; });
}

export async function askForKey(message) {
  const given = await ask({
    title: "Key", text: message || "The admin key; it stays in this tab.", confirm: "Use",
    fields: [{ label: "Admin key", name: "key", type: "password" }],
  });
  if (given) setKey(given.key);
  return given;
}

async function change(title, method, path, body) {
  const operation = newOperation();
  const toast = makeToast(title, operation);
  try {
    const answer = await (await call(method, path, { body, operation })).json();
    const generation = answer.generation ? `, generation ${answer.generation}` : "";
    toast.end(`${title}: done${generation}`, "good");
  } catch (error) {
    toast.end(`${title}: ${error.message}`, "failed");
    if (error.status === 401 || error.status === 403) {
      await askForKey(error.message);
      reconnect();
    }
  }
}

function makeToast(title, operation) {
  const text = make("span", {}, `${title} …`);
  const chips = make("div", { class: "chips" });
  const close = make("button", { type: "button", "aria-label": "Dismiss" }, "×");
  const element = make("div", { class: "toast" }, make("div", { class: "line" }, text, close), chips);
  close.addEventListener("click", () => element.remove());
  byId("toasts").append(element);
  const show = () => {
    const found = fleet.operations.find((each) => each.id === operation);
    if (found && element.isConnected) fillChips(chips, found.replicas);
  };
  onChange(show);
  return {
    end(words, kind) {
      write(text, words);
      element.classList.add(kind);
      if (kind === "good") setTimeout(() => element.remove(), 6000);
    },
  };
}

export function fillChips(chips, replicas) {
  chips.replaceChildren(...replicas.map((replica) => make("span", { class: `phase ${replica.phase}`, title: replica.reason || replica.replica_id }, `${shortId(replica.replica_id)} ${replica.phase}`)));
}

export async function load(name = "", isReplacing = false) {
  // A replacement is as pinned as it is asked to be: what is pinned now stays so unless that is unchecked.
  const checked = isReplacing && Boolean(fleet.adapters.get(name)?.pinned);
  const given = await ask({
    title: isReplacing ? `Replace ${name}` : "Load adapter",
    text: isReplacing ? "Requests that start after it is done get the new version; those that run finish on the old one." : "It is in service once every replica agrees.",
    confirm: isReplacing ? "Replace" : "Load",
    fields: [
      { label: "Name", name: "name", value: name, required: true, readonly: isReplacing },
      { label: "Source (path or URI as the replicas see it; empty: ask the resolvers)", name: "source" },
      { label: "Pin: keep the weights in memory on every replica", name: "pin", check: true, checked },
    ],
  });
  if (!given) return;
  const body = { name: given.name, source: given.source || null, pin: given.pin, replace: isReplacing };
  await change(`${isReplacing ? "Replace" : "Load"} ${given.name}`, "POST", "v1/adapters", body);
}

export async function unload(adapter) {
  const given = await ask({
    title: `Unload ${adapter.name}?`, danger: true, confirm: "Unload",
    text: "New requests for it get 404. Those that run finish.",
    fields: [{ label: "Abort requests that run on it", name: "force", check: true }],
  });
  if (given) await change(`Unload ${adapter.name}`, "DELETE", `${adapterPath(adapter.name)}?force=${given.force}`);
}

export async function setPinned(adapter) {
  const verb = adapter.pinned ? "Unpin" : "Pin";
  const given = await ask({
    title: `${verb} ${adapter.name}?`, confirm: verb,
    text: adapter.pinned ? "Its weights may leave the memory when others need the room." : "Its weights stay in memory on every replica.",
  });
  if (given) await change(`${verb} ${adapter.name}`, "POST", adapterPath(adapter.name, verb.toLowerCase()));
}

export async function rollBack(adapter, generation) {
  const given = await ask({
    title: `Roll ${adapter.name} back?`, confirm: "Roll back",
    text: `The bytes of generation ${generation} are served again, as a new generation.`,
  });
  if (given) await change(`Roll back ${adapter.name}`, "POST", adapterPath(adapter.name, "rollback"), { generation });
}

export async function setAlias(name = "", targets = "") {
  const given = await ask({
    title: name ? `Move ${name}` : "Set alias", confirm: "Set",
    text: "One adapter, or several with weights: sql@7=95, sql=5",
    fields: [
      { label: "Alias", name: "name", value: name, required: true, readonly: Boolean(name) },
      { label: "Stands for", name: "targets", value: targets, required: true },
    ],
  });
  if (given) await change(`Set ${given.name}`, "PUT", aliasPath(given.name), aliasBody(given.targets));
}

export function aliasBody(text) {
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  if (parts.length === 1 && !parts[0].includes("=")) return { target: parts[0] };
  return { weights: Object.fromEntries(parts.map((part) => [part.split("=")[0].trim(), Number(part.split("=")[1])])) };
}

export async function deleteAlias(alias) {
  const given = await ask({ title: `Forget ${alias.alias}?`, danger: true, confirm: "Forget", text: "Requests for it get 404. The adapters stay." });
  if (given) await change(`Forget ${alias.alias}`, "DELETE", aliasPath(alias.alias));
}
