// What the fleet looks like: kept current by the stream, with a minute of each adapter's traffic.

import { call, events, Refused } from "./api.js";

const HISTORY = 60;
const RETRY_MS = 2000;
const [REQUESTS, FAILURES, TOKENS, SECONDS, SECONDS_COUNT, FIRST, FIRST_COUNT] = [0, 1, 2, 3, 4, 5, 6];

export const fleet = {
  baseModel: "", mayUpdate: true, adapters: new Map(), replicas: [], aliases: [], operations: [],
  traffic: new Map(), at: 0, error: "",
};

const listeners = new Set();
export const onChange = (listener) => listeners.add(listener);
const tell = (what) => listeners.forEach((listener) => listener(what));

let aborter = null;

export function reconnect() {
  if (aborter) aborter.abort();
}

export async function follow(onStatus, askForKey) {
  for (;;) {
    aborter = new AbortController();
    try {
      onStatus("", "connecting");
      for await (const event of events(await call("GET", "admin/events", { signal: aborter.signal }))) {
        take(event);
        onStatus(fleet.error ? "off" : "on", fleet.error ? "no controller" : "live");
      }
      onStatus("off", "reconnecting");
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        onStatus("off", "key needed");
        await askForKey(error.message);
        continue;
      }
      onStatus("off", "reconnecting");
    }
    if (!aborter.signal.aborted) await new Promise((wake) => setTimeout(wake, RETRY_MS));
  }
}

function take(event) {
  if ("base_model" in event) fleet.baseModel = event.base_model;
  if ("may_update" in event) fleet.mayUpdate = event.may_update;
  fleet.error = event.error || "";
  if ("adapters" in event) {
    if (event.full) fleet.adapters.clear();
    for (const row of event.adapters) fleet.adapters.set(row.name, row);
    for (const name of event.removed || []) fleet.adapters.delete(name);
    fleet.replicas = event.replicas;
    fleet.aliases = event.aliases;
    fleet.operations = event.operations;
    count(event.traffic, event.at);
  }
  tell(event);
}

function count(totals, at) {
  const passed = at - fleet.at;
  if (passed <= 0) return; // a document that was seen before
  for (const [name, now] of Object.entries(totals)) {
    const past = fleet.traffic.get(name);
    if (!past) {
      fleet.traffic.set(name, { totals: now, history: [] });
      continue;
    }
    // Totals shrink when a replica ends: what it had counted is not traffic.
    const more = now.map((total, index) => Math.max(0, total - past.totals[index]));
    past.totals = now;
    if (fleet.at) push(past.history, sample(more, passed));
  }
  for (const [name, past] of fleet.traffic) {
    if (!(name in totals)) push(past.history, sample([0, 0, 0, 0, 0, 0, 0], passed));
  }
  fleet.at = at;
}

function sample(more, passed) {
  return {
    requests: more[REQUESTS] / passed,
    failures: more[FAILURES] / passed,
    tokens: more[TOKENS] / passed,
    seconds: more[SECONDS_COUNT] ? more[SECONDS] / more[SECONDS_COUNT] : NaN,
    first: more[FIRST_COUNT] ? more[FIRST] / more[FIRST_COUNT] : NaN,
  };
}

function push(history, value) {
  history.push(value);
  if (history.length > HISTORY) history.shift();
}

export const history = (name) => fleet.traffic.get(name)?.history || [];

export function recent(name, field, span = 10) {
  // The mean of the last samples that say something.
  const values = history(name).slice(-span).map((each) => each[field]).filter(Number.isFinite);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN;
}

export function total(field) {
  let sum = 0;
  for (const name of fleet.traffic.keys()) sum += recent(name, field, 5) || 0;
  return sum;
}

export const slotsOf = (adapter) => Object.values(adapter.held).filter((held) => held[1] !== null).length;
export const isResident = (adapter) => Object.keys(adapter.held).length > 0;
export const runningOn = (adapter) => Object.values(adapter.held).reduce((sum, held) => sum + held[2], 0);
