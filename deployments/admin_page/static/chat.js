// The same prompt to two models, side by side.

import { call, events } from "./api.js";
import { byId, make, seconds, write } from "./dom.js";
import { fleet } from "./fleet.js";

const MAX_SUGGESTED = 200;
const sides = [...document.querySelectorAll(".answer")].map((article) => ({
  model: article.querySelector(".model"), said: article.querySelector(".said"), facts: article.querySelector(".facts"),
}));
let running = null;

export function start() {
  byId("try").addEventListener("submit", (event) => {
    event.preventDefault();
    askBoth();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  for (const side of sides) side.model.addEventListener("focus", suggest);
}

function suggest() {
  const aliases = fleet.aliases.map((alias) => alias.alias);
  const names = [fleet.baseModel, ...aliases, ...fleet.adapters.keys()].slice(0, MAX_SUGGESTED);
  byId("models").replaceChildren(...names.map((name) => make("option", { value: name })));
}

export function update() {
  // The base model on the left, so that what an adapter adds is seen.
  if (!sides[0].model.value) sides[0].model.value = fleet.baseModel;
  if (!sides[1].model.value && fleet.adapters.size) sides[1].model.value = fleet.adapters.keys().next().value;
}

export function compare(name) {
  sides[0].model.value = fleet.baseModel;
  sides[1].model.value = name;
}

async function askBoth() {
  running?.abort();
  const mine = (running = new AbortController());
  byId("stop").disabled = false;
  await Promise.all(sides.map((side) => askOne(side, mine.signal)));
  if (running === mine) byId("stop").disabled = true;
}

async function askOne(side, signal) {
  write(side.said, "");
  side.said.classList.remove("bad");
  write(side.facts, "waiting …");
  const began = performance.now();
  let first = NaN, tokens = 0;
  const body = {
    model: side.model.value, stream: true, stream_options: { include_usage: true },
    messages: [{ role: "user", content: byId("prompt").value }],
    temperature: Number(byId("temperature").value), max_tokens: Number(byId("max-tokens").value),
  };
  const tell = (version) => {
    const spent = (performance.now() - began) / 1000;
    const speed = tokens > 1 ? `, ${(tokens / spent).toFixed(1)} tokens/s` : "";
    write(side.facts, `${version}first token ${seconds(first)}, ${seconds(spent)} in all${speed}`);
  };
  try {
    const response = await call("POST", "v1/chat/completions", { body, signal });
    const generation = response.headers.get("x-lorafleet-adapter-generation");
    const version = generation && generation !== "0" ? `generation ${generation}, ` : "";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const text = event.choices[0]?.delta?.content;
      if (text) {
        if (Number.isNaN(first)) first = (performance.now() - began) / 1000;
        side.said.append(text);
      }
      if (event.usage) tokens = event.usage.completion_tokens;
    }
    tell(version);
  } catch (error) {
    if (signal.aborted) return write(side.facts, "stopped");
    side.said.classList.add("bad");
    write(side.said, error.message);
    write(side.facts, "");
  }
}
