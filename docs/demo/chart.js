"use strict";
// The probability of one digit over the angle, for both networks, and the answers below it.

const CHART = { width: 720, left: 44, right: 12, top: 26, plot: 190, row: 24 };
const WIDE = 460; // pixels in the page; a chart that has less is drawn narrower, with fewer marks

function tag(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/**
 * Draws the chart anew.
 *
 * @param holder Where it goes.
 * @param networks Objects with name, color, dash and probabilities: for each angle, for each digit.
 * @param digit Whose probability is drawn.
 * @param now The index of the angle of the slider.
 */
function drawChart(holder, networks, digit, now) {
  const narrow = holder.clientWidth < WIDE;
  const width = narrow ? 380 : CHART.width;
  const { left, right, top, plot, row } = CHART;
  const count = networks[0].probabilities.length, step = 360 / count;
  const x = (i) => left + (width - left - right) * i / count;
  const y = (p) => top + plot * (1 - p);
  const height = top + plot + 30 + row * networks.length + 6;
  const best = networks.map((network) => network.probabilities.map((p) => p.indexOf(Math.max(...p))));
  const said = networks.map((n, k) => `${n.name}: ${best[k].filter((d) => d === digit).length} of ${count} angles read ${digit}`);
  const svg = tag("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Probability of ${digit} over the angle. ${said.join("; ")}.` });
  svg.append(tag("text", { x: left, y: 14 }, `probability of ${digit}`));
  for (const p of [0, 0.5, 1]) {
    svg.append(tag("line", { x1: left, x2: width - right, y1: y(p), y2: y(p), stroke: "var(--line)" }));
    svg.append(tag("text", { x: left - 6, y: y(p) + 4, "text-anchor": "end", class: "faint" }, p.toFixed(1)));
  }
  for (let angle = 0; angle < 360; angle += narrow ? 90 : 30) {
    svg.append(tag("text", { x: x(angle / step), y: top + plot + 18, "text-anchor": "middle", class: "faint" }, `${angle}°`));
  }
  svg.append(tag("line", { x1: x(now), x2: x(now), y1: top, y2: top + plot, stroke: "var(--faint)", "stroke-dasharray": "2 3" }));
  networks.forEach((network, k) => {
    const points = network.probabilities.map((p, i) => `${x(i).toFixed(1)},${y(p[digit]).toFixed(1)}`);
    points.push(`${x(count).toFixed(1)},${y(network.probabilities[0][digit]).toFixed(1)}`);
    svg.append(tag("polyline", { points: points.join(" "), fill: "none", stroke: network.color, "stroke-width": 2.5, "stroke-dasharray": network.dash, "stroke-linejoin": "round" }));
    for (let i = now % (count / 4); i < count; i += count / 4) {
      svg.append(tag("circle", { cx: x(i), cy: y(network.probabilities[i][digit]), r: 4.5, fill: k ? "var(--panel)" : network.color, stroke: network.color, "stroke-width": 2 }));
    }
    const level = top + plot + 30 + row * (k + 0.7);
    svg.append(tag("text", { x: 0, y: level, style: `fill: ${network.color}; font-weight: 700` }, network.name.slice(0, 2)));
    const each = narrow ? count / 12 : count / 36;
    for (let i = 0; i < count; i += each) {
      const wrong = best[k][i] !== digit;
      const style = wrong ? `fill: ${network.color}; font-weight: 700; text-decoration: underline` : "";
      svg.append(tag("text", { x: x(i), y: level, "text-anchor": "middle", style, class: wrong ? "" : "faint" }, String(best[k][i])));
    }
  });
  holder.replaceChildren(svg);
}
