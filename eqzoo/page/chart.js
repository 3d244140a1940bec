"use strict";
// The probability of a class over the angle of rotation, for each network.

const CHART = { left: 44, right: 12, top: 26, plot: 190, row: 24, wide: 720, narrow: 380 };

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/**
 * Draws the chart anew.
 *
 * @param holder The element that it fills.
 * @param curves For each network name, color, dash, probabilities at angles (null where they are not known yet), marks
 *   {angle, reflected, probabilities}, at which angles the class is wrong, and at how many it is the same.
 * @param label The index of the class.
 * @param title Its name.
 * @param now The index of the angle of the slider.
 */
function drawChart(holder, curves, label, title, now) {
  const small = holder.clientWidth < 460, width = small ? CHART.narrow : CHART.wide;
  const { left, right, top, plot, row } = CHART;
  const count = curves[0].angles.length, height = top + plot + 30 + row * curves.length + 6;
  const x = (i) => left + (width - left - right) * i / count, y = (p) => top + plot * (1 - p);
  const summary = curves.map(({ name, same }) => `${name}: ${title} at ${same} of ${count} angles`).join("; ");
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Probability of ${title} over the angle. ${summary}.` });
  const write = (attributes, text) => chart.append(svg("text", attributes, text));
  write({ x: left, y: 14 }, `probability of ${title}`);
  for (const p of [0, 0.5, 1]) {
    chart.append(svg("line", { x1: left, x2: width - right, y1: y(p), y2: y(p), stroke: "var(--line)" }));
    write({ x: left - 6, y: y(p) + 4, "text-anchor": "end", class: "faint" }, p.toFixed(1));
  }
  for (let i = 0; i < count; i += count / (small ? 4 : 12)) write({ x: x(i), y: top + plot + 18, "text-anchor": "middle", class: "faint" }, `${360 * i / count}°`);
  chart.append(svg("line", { x1: x(now), x2: x(now), y1: top, y2: top + plot, stroke: "var(--faint)", "stroke-dasharray": "2 3" }));
  curves.forEach(({ name, color, dash, angles, marks, wrong }, k) => {
    const closed = [...angles, angles[0]].map((p, i) => p && `${x(i).toFixed(1)},${y(p[label]).toFixed(1)}`).filter(Boolean);
    chart.append(svg("polyline", { points: closed.join(" "), fill: "none", stroke: color, "stroke-width": 2.5, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
    const fill = k ? "var(--panel)" : color, mark = { fill, stroke: color, "stroke-width": 2 };
    for (const { angle, reflected, probabilities } of marks) { // diamonds beside the dots
      if (!probabilities) continue;
      const column = x(angle * count / 360), level = y(probabilities[label]);
      if (reflected) chart.append(svg("path", { d: `M${column + 9},${level - 5}l5,5l-5,5l-5,-5z`, ...mark }));
      else chart.append(svg("circle", { cx: column, cy: level, r: 4.5, ...mark }));
    }
    const level = top + plot + 30 + row * (k + 0.7);
    write({ x: 0, y: level, style: `fill: ${color}; font-weight: 700` }, name.length > 6 ? `${name.slice(0, 5)}…` : name);
    wrong.forEach((differs, i) => { if (differs !== null) write({ x: x(i), y: level, "text-anchor": "middle", style: `fill: ${color}; font-weight: ${differs ? 700 : 400}` }, differs ? "✕" : "·"); });
  });
  holder.replaceChildren(chart);
}
