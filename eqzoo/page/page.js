"use strict";
// The page: files come in, workers classify them, a table lists them, and one of them is shown at all angles.

const element = (id) => document.getElementById(id);
const { networks: NETWORKS, thresholds: THRESHOLDS, ignored: IGNORED } = JSON.parse(element("config").textContent);
const CLASSES = NETWORKS[0].classes;
const COLORS = ["var(--first)", "var(--second)"], DASHES = ["", "7 4"];
const STEP = 15; // degrees between angles
const ANGLES = Array.from({ length: 360 / STEP }, (_, i) => STEP * i);
// The elements of the network's group that map the pixel grid onto itself come first: it is exact for them.
const { rotations, reflections } = NETWORKS[0];
const SYMMETRIES = [false, true].slice(0, reflections ? 2 : 1).flatMap((reflected) => (
  Array.from({ length: rotations }, (_, i) => [360 * i / rotations, reflected])));
const VIEWS = [...SYMMETRIES, ...ANGLES.filter((angle) => angle % (360 / rotations)).map((angle) => [angle, false])];
const OF_ANGLE = ANGLES.map((angle) => VIEWS.findIndex(([other, reflected]) => other === angle && !reflected));
const BATCH = 4; // views that a worker classifies at once
const WORKERS = Math.max(1, Math.min(4, navigator.hardwareConcurrency || 1));
const READABLE = /\.(png|jpe?g|webp|bmp|gif|avif|tiff?)$/i;
const UNREADABLE = "unreadable"; // the filter's choice beside the numbers of classes

const items = [];
let added = 0;
let shown = []; // those that pass the filter, in the order of the table
let current = null;
let order = { key: "added", descending: false };

// --- Workers ---

const queue = [], workers = [];
let payload = null, code = null;

async function load() {
  const unzipped = (id) => {
    const bytes = Uint8Array.from(atob(element(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  };
  const networks = NETWORKS.map(async (network, i) => ({ ...network, onnx: new Uint8Array(await unzipped(`network-${i}`)) }));
  payload = { wasm: await unzipped("wasm"), loader: element("loader").textContent, networks: await Promise.all(networks) };
  code = URL.createObjectURL(new Blob([element("worker").textContent], { type: "text/javascript" }));
  startWorker();
}

function startWorker() {
  const state = { worker: new Worker(code), resolve: null };
  workers.push(state);
  const started = new Promise((resolve) => { state.resolve = resolve; });
  state.worker.onmessage = ({ data }) => { const { resolve } = state; state.resolve = null; resolve(data); next(); };
  state.worker.onerror = (event) => state.worker.onmessage({ data: { error: event.message } });
  state.worker.postMessage(payload);
  started.then(({ error }) => {
    if (error) element("status").textContent = `The network did not start: ${error}. A current browser with WebAssembly is needed.`;
    else tell();
  });
}

/** What a worker answers to a job: {logits, seen} or {error}. */
function run(job, urgent = false) {
  return new Promise((resolve) => {
    if (urgent) queue.unshift({ job, resolve });
    else queue.push({ job, resolve });
    next();
  });
}

function next() {
  for (const state of workers) {
    if (state.resolve || !queue.length) continue;
    const { job, resolve } = queue.shift();
    state.resolve = resolve;
    state.worker.postMessage(job);
  }
  if (queue.length > 2 * workers.length && workers.length && workers.length < WORKERS) startWorker();
}

function softmax(logits) {
  const most = Math.max(...logits), powers = logits.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((value) => value / sum);
}

// --- Images ---

/** Whether a file is one of the images below a folder, the first part of its path, as `eqzoo predict` lists them. */
const isListed = (path) => READABLE.test(path) && !path.split("/").slice(1).some((name) => name.startsWith(".") || IGNORED.includes(name));

/** Classifies files, or {name, blob} of other sources. */
function add(files) {
  for (const file of files) {
    const blob = file.blob ?? file;
    const item = { key: added++, name: file.path || blob.webkitRelativePath || file.name || "pasted image", blob };
    items.push(item);
    item.row = makeRow(item);
    run({ key: item.key, blob, views: [[0, false]], thumbnail: true }).then(({ logits, seen, error }) => {
      if (error) item.error = error;
      else {
        item.probabilities = logits.map(([values]) => softmax(values));
        item.row.querySelector("img").src = URL.createObjectURL(seen);
      }
      const first = items.find((each) => !each.error);
      if (!current && first?.probabilities) inspect(first);
      update();
    });
  }
  update();
}

/** The class of an image, see `eqzoo predict --threshold`: one that reaches its threshold, else one that has none. */
function chosen(probabilities) {
  const limit = (i) => THRESHOLDS[CLASSES[i]];
  const reached = probabilities.map((p, i) => p >= (limit(i) ?? Infinity));
  const allowed = reached.includes(true) ? reached : probabilities.map((_, i) => limit(i) === undefined);
  return probabilities.reduce((best, p, i) => (allowed[i] && (best < 0 || p > probabilities[best]) ? i : best), -1);
}

const percent = (p) => `${(100 * p).toFixed(1)} %`;
const classOf = (item) => (item.error ? UNREADABLE : item.probabilities ? String(chosen(item.probabilities[0])) : null);
const surest = (item) => (item.probabilities ? item.probabilities[0][chosen(item.probabilities[0])] : -1);

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function makeRow(item) {
  const button = make("button", { type: "button", class: "name" }, item.name);
  button.addEventListener("click", () => inspect(item, true));
  const cells = NETWORKS.flatMap(() => [make("td"), make("td", { class: "number" })]);
  return make("tr", {}, make("td", {}, make("img", { alt: "", width: 48, height: 48 })), make("th", { scope: "row" }, button), ...cells);
}

function fillRow(item) {
  const cells = [...item.row.querySelectorAll("td")].slice(1);
  item.row.classList.toggle("broken", Boolean(item.error));
  if (item.error) cells[0].textContent = `cannot be read: ${item.error}`;
  else if (!item.probabilities) cells[0].textContent = "waiting";
  else {
    item.probabilities.forEach((p, k) => {
      cells[2 * k].textContent = CLASSES[chosen(p)];
      cells[2 * k + 1].textContent = percent(p[chosen(p)]);
    });
  }
}

let planned = false;
/** Fills the table a few times a second, however many images are answered meanwhile. */
function update() {
  if (planned) return;
  planned = true;
  setTimeout(() => { planned = false; fillTable(); tell(); }, 200);
}

function fillTable() {
  items.forEach(fillRow);
  const filter = element("filter").value, most = Number(element("most").value || 100) / 100;
  shown = items.filter((item) => (!filter || classOf(item) === filter) && surest(item) <= most);
  const values = {
    added: (item) => item.key, probability: surest, file: (item) => item.name,
    class: (item) => (item.error ? "" : CLASSES[classOf(item)] ?? ""),
  };
  const value = values[order.key], sign = order.descending ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  shown.sort((a, b) => sign * compare(value(a), value(b)) || a.key - b.key);
  element("rows").replaceChildren(...shown.map((item) => item.row));
  for (const heading of document.querySelectorAll("#table [data-sort]")) {
    const sorted = heading.dataset.sort === order.key;
    heading.setAttribute("aria-sort", sorted ? (order.descending ? "descending" : "ascending") : "none");
  }
  for (const option of element("filter").options) {
    const count = items.filter((item) => !option.value || classOf(item) === option.value).length;
    option.textContent = `${option.dataset.name} (${count})`;
  }
}

/** The state in one line, for screen readers too. */
function tell() {
  const done = items.filter((item) => item.probabilities).length, broken = items.filter((item) => item.error).length;
  const waiting = items.length - done - broken;
  element("progress").hidden = !waiting;
  element("progress").max = items.length;
  element("progress").value = items.length - waiting;
  for (const id of ["results", "detail"]) element(id).hidden = id === "results" ? !items.length : !current;
  element("csv").disabled = Boolean(waiting) || !done;
  const also = broken ? `; ${broken} cannot be read` : "";
  const text = items.length ? `${done} of ${items.length} images classified${also}.` : "Ready: drop, paste or choose images.";
  element("count").textContent = text;
  if (!waiting || !items.length) element("status").textContent = text; // a screen reader is told the end only
}

/** Comma-separated values as `eqzoo predict --csv` writes them; files that cannot be read have empty values. */
function csv() {
  const several = NETWORKS.length > 1 || CLASSES.includes("file") || CLASSES.includes("prediction");
  const heading = NETWORKS.flatMap(({ name }) => (several ? [name, ...CLASSES.map((label) => `${name} ${label}`)] : ["prediction", ...CLASSES]));
  const lines = items.map((item) => [item.name, ...(item.probabilities ? item.probabilities.flatMap((p) => [CLASSES[chosen(p)], ...p]) : heading.map(() => ""))]);
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  return [["file", ...heading], ...lines].map((line) => line.map(quoted).join(",") + "\n").join("");
}

// --- One image ---

/** Shows an image and classifies it at all angles. */
function inspect(item, focus = false) {
  if (current) current.row?.removeAttribute("aria-current");
  current = item;
  item.row?.setAttribute("aria-current", "true");
  queue.splice(0, queue.length, ...queue.filter(({ job }) => job.thumbnail)); // views of another image
  item.views = VIEWS.map(() => null); // for each view {probabilities: of each network, seen}
  const views = item.views, original = element("original");
  URL.revokeObjectURL(original.src);
  original.hidden = !item.row;
  original.src = URL.createObjectURL(item.blob);
  original.alt = item.name;
  const batches = Array.from({ length: Math.ceil(VIEWS.length / BATCH) }, (_, i) => VIEWS.slice(BATCH * i, BATCH * (i + 1)));
  for (const [i, batch] of [...batches.entries()].reverse()) { // the first one is put in front last
    run({ key: item.key, blob: item.blob, views: batch }, true).then(({ logits, seen, error }) => {
      if (current !== item || item.views !== views) return;
      if (error) { element("sentence").textContent = `This image cannot be read: ${error}`; return; }
      batch.forEach((_, j) => { views[BATCH * i + j] = { probabilities: logits.map((each) => softmax(each[j])), seen: seen[j] }; });
      showDetail();
    });
  }
  element("detail").hidden = false;
  showDetail();
  if (focus) { element("detail-title").focus(); element("detail").scrollIntoView({ block: "nearest" }); }
}

function showDetail() {
  const now = Number(element("angle").value) / STEP, angle = ANGLES[now];
  element("detail-title").textContent = current.name;
  element("angle-text").textContent = `${angle}°`;
  element("angle").setAttribute("aria-valuetext", `${angle} degrees`);
  element("sentence").textContent = "";
  element("chart").replaceChildren();
  const view = current.views[OF_ANGLE[now]];
  if (!view || !current.views[0]) return;
  const canvas = element("seen"), { seen, probabilities } = view;
  [canvas.width, canvas.height] = [seen.width, seen.height];
  canvas.getContext("2d").putImageData(seen, 0, 0);
  const label = chosen(current.views[0].probabilities[0]);
  const best = [...CLASSES.keys()].sort((a, b) => probabilities[0][b] - probabilities[0][a]).slice(0, 6);
  element("bars").replaceChildren(...best.map((i) => {
    const bars = probabilities.map((p) => make("td", {}, make("meter", { value: p[i], "aria-hidden": "true" }), ` ${percent(p[i])}`));
    return make("tr", {}, make("th", { scope: "row" }, CLASSES[i]), ...bars);
  }));
  const curves = NETWORKS.map(({ name }, k) => {
    const at = (i) => current.views[i]?.probabilities[k] ?? null;
    const marks = SYMMETRIES.map(([angle, reflected], i) => ({ angle, reflected, probabilities: at(i) }));
    const angles = OF_ANGLE.map(at), complete = angles.every(Boolean), same = angles.filter((p) => p && chosen(p) === label).length;
    element(`answer-${k}`).querySelector(".class").textContent = CLASSES[chosen(probabilities[k])];
    element(`answer-${k}`).querySelector(".share").textContent = percent(probabilities[k][chosen(probabilities[k])]);
    element(`answer-${k}`).querySelector(".same").textContent = complete ? `${CLASSES[label]} at ${same} of ${ANGLES.length} angles` : "";
    return { name, color: COLORS[k], dash: DASHES[k], angles, marks, wrong: angles.map((p) => p && chosen(p) !== label), same };
  });
  drawChart(element("chart"), curves, label, CLASSES[label], now);
  if (current.views.slice(0, SYMMETRIES.length).every(Boolean)) element("sentence").textContent = changes();
}

/** How much the predictions change under the symmetries of the grid. */
function changes() {
  const each = NETWORKS.map(({ name }, k) => {
    const all = current.views.slice(0, SYMMETRIES.length).map((view) => view.probabilities[k]);
    const most = Math.max(...CLASSES.map((_, i) => Math.max(...all.map((p) => p[i])) - Math.min(...all.map((p) => p[i]))));
    return `${most < 1e-4 ? most.toExponential(0) : most.toFixed(most < 0.01 ? 4 : 2)} in ${name}`;
  });
  const names = [...(rotations > 1 ? [`rotations by ${360 / rotations}°`] : []), ...(reflections ? ["reflections"] : [])];
  return `Under ${names.join(" and ")} of this image a probability changes by at most ${each.join(" and ")}.`;
}

// --- Controls ---

async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))].map((blob) => ({ blob, name: blob.name, path: entry.fullPath.slice(1) }));
  const reader = entry.createReader(), found = [];
  for (let part; (part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject))).length;) found.push(...part); // 100 at a time
  return (await Promise.all(found.map(filesOf))).flat().filter(({ path }) => isListed(path));
}

function listen() {
  const change = (id, act) => element(id).addEventListener("change", act);
  change("files", ({ target }) => { add(target.files); target.value = ""; });
  change("folder", ({ target }) => { add([...target.files].filter((file) => isListed(file.webkitRelativePath))); target.value = ""; });
  for (const id of ["filter", "most"]) element(id).addEventListener("input", update);
  document.addEventListener("paste", ({ clipboardData }) => add(clipboardData.files));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    const entries = [...event.dataTransfer.items].map((each) => each.webkitGetAsEntry?.()).filter(Boolean);
    add((await Promise.all(entries.map(filesOf))).flat());
  });
  for (const heading of document.querySelectorAll("#table [data-sort]")) {
    heading.querySelector("button").addEventListener("click", () => {
      order = { key: heading.dataset.sort, descending: heading.dataset.sort === order.key && !order.descending };
      update();
    });
  }
  element("csv").addEventListener("click", () => { // the first mark tells spreadsheets that it is UTF-8
    const address = URL.createObjectURL(new Blob(["\ufeff", csv()], { type: "text/csv" }));
    make("a", { href: address, download: "predictions.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  });
  element("clear").addEventListener("click", () => {
    queue.length = items.length = 0;
    current = null;
    update();
  });
  element("angle").addEventListener("input", showDetail);
  for (const [id, step] of [["previous", -1], ["following", 1]]) {
    element(id).addEventListener("click", () => { const other = shown[shown.indexOf(current) + step]; if (other && !other.error) inspect(other); });
  }
  element("thresholds").addEventListener("input", ({ target }) => {
    delete THRESHOLDS[target.name];
    const others = Object.keys(THRESHOLDS).length;
    target.setCustomValidity(target.value && others === CLASSES.length - 1 ? "One class has to be without a threshold." : "");
    if (target.value && target.reportValidity()) THRESHOLDS[target.name] = Number(target.value);
    update();
    if (current) showDetail();
  });
  new ResizeObserver(() => { if (current) showDetail(); }).observe(element("chart"));
}

function build() {
  const option = (value, name) => { const made = make("option", { value }, name); made.dataset.name = name; return made; };
  element("filter").append(option("", "all images"), ...CLASSES.map((name, i) => option(i, name)), option(UNREADABLE, "cannot be read"));
  for (const label of CLASSES) {
    const input = make("input", { type: "number", name: label, min: 0.001, max: 0.999, step: "any", value: THRESHOLDS[label] ?? "" });
    element("thresholds").append(make("label", {}, label, input));
  }
  NETWORKS.forEach(({ name }, k) => {
    const title = NETWORKS.length > 1 ? `${name}: ` : "";
    if (k) element("headings").append(make("th", { scope: "col" }, `${title}class`), make("th", { scope: "col", class: "number" }, "probability"));
    element("bar-headings").append(make("th", { scope: "col" }, name));
    element("answers").append(make("article", { id: `answer-${k}`, class: "answer", style: `color: ${COLORS[k]}` }, make("h3", {}, name), make("p", { class: "class" }, "–"), make("p", { class: "share" }), make("p", { class: "same" })));
  });
}

build();
listen();
load().catch((error) => { element("status").textContent = `The network did not start: ${error.message}.`; });
