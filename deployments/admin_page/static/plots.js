// A minute of something as a small line.

const SVG = "http://www.w3.org/2000/svg";
const POINTS = 60;

function part(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function makePlot(width, height) {
  const svg = part("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", preserveAspectRatio: "none" });
  svg.append(part("path", { class: "area" }), part("path", { class: "line" }));
  return svg;
}

export function draw(svg, values) {
  const [width, height] = svg.getAttribute("viewBox").split(" ").slice(2).map(Number);
  const top = Math.max(...values.filter(Number.isFinite), 0);
  const points = [];
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) return;
    const x = width * (1 - (values.length - 1 - index) / (POINTS - 1));
    const y = height - 1 - (top ? (value / top) * (height - 2) : 0);
    points.push([x.toFixed(1), y.toFixed(1)]);
  });
  const path = points.length > 1 ? "M" + points.map((point) => point.join(",")).join("L") : "";
  svg.lastChild.setAttribute("d", path);
  const first = points[0], last = points.at(-1);
  svg.firstChild.setAttribute("d", path && `${path}L${last[0]},${height}L${first[0]},${height}Z`);
}
