// Calls to the server, with the key that the user gave. The key stays in this tab.

let key = sessionStorage.getItem("lorafleet-key") || "";

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

export function setKey(given) {
  key = given;
  if (given) sessionStorage.setItem("lorafleet-key", given);
  else sessionStorage.removeItem("lorafleet-key");
}

export async function call(method, path, { body, operation, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  if (operation) headers["idempotency-key"] = operation;
  const response = await fetch(path, {
    method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) throw new Refused(await reason(response), response.status);
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

export function newOperation() {
  // randomUUID is missing where the page comes over plain HTTP from another machine.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return "page-" + Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const encodeName = (name) => name.split("/").map(encodeURIComponent).join("/");

export const adapterPath = (name, action) =>
  `v1/adapters/${encodeName(name)}${action ? `/${action}` : ""}`;

export const aliasPath = (name) => `v1/adapters/aliases/${encodeName(name)}`;

export async function* events(response) {
  // EventSource cannot send a key, so the stream is read by hand.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const data = frame.startsWith("data: ") ? frame.slice(6) : "";
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
