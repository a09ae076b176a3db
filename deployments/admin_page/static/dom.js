// Small makers of elements. Text is always text: nothing from the server is ever read as markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function write(element, text) {
  // Only where it changed, so that selections and screen readers are left in peace.
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024 || unit === "GiB") return `${bytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    bytes /= 1024;
  }
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export const when = (timestamp) => (timestamp ? new Date(timestamp * 1000).toLocaleString() : "–");

export const shortId = (id) => (id.length > 6 ? id.slice(-6) : id);
