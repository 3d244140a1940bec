"use strict";
// The page: files come in, workers classify them, a table lists them, and one of them is shown at all angles.

const element = (id) => document.getElementById(id);
const { networks: NETWORKS, thresholds, ignored: IGNORED, brightness: BRIGHTNESS } = JSON.parse(element("config").textContent);
const CLASSES = NETWORKS[0].classes, THRESHOLDS = new Map(Object.entries(thresholds));
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
const READABLE = /\.(png|jpe?g|webp|bmp|tiff?)$/i; // of the files in a folder
const UNREADABLE = "unreadable", DIFFERENT = "different"; // the filter's choices beside the numbers of classes
const STEPS = [["previous", -1], ["following", 1]]; // buttons, and their directions in the table
const collator = new Intl.Collator(undefined, { numeric: true });

const items = [], names = new Set();
let added = 0, leftOut = 0; // the latter are files of other formats in folders
let trouble = ""; // with what was dropped last
let shown = []; // those that pass the filter, in the order of the table
let current = null;
let order = { key: "added", descending: false };

// --- Workers ---

const queue = [], workers = [];
let payload = null, code = null, possible = WORKERS, started = false, failure = "";

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
  const state = { worker: new Worker(code), answer: null };
  const reply = (data) => { const { answer } = state; state.answer = null; answer?.(data); next(); };
  state.worker.onmessage = ({ data }) => reply(data);
  state.worker.onerror = (event) => reply({ error: event.message || "it ended" });
  state.answer = ({ error }) => {
    started ||= !error;
    if (!error) { tell(); return; }
    state.worker.terminate();
    workers.splice(workers.indexOf(state), 1);
    possible = workers.length; // others would fail too, as where memory is short
    if (!possible) fail(error);
  };
  workers.push(state);
  state.worker.postMessage(payload);
}

function fail(message) {
  failure = `The network did not start: ${message}. A current browser with WebAssembly is needed.`;
  tell();
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
    if (state.answer || !queue.length) continue;
    const { job, resolve } = queue.shift();
    state.answer = resolve;
    state.worker.postMessage(job);
  }
  if (queue.length > 2 * workers.length && workers.length && workers.length < possible) startWorker();
}

function softmax(logits) {
  const most = Math.max(...logits), powers = logits.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((value) => value / sum);
}

// --- Images ---

/** Those of files below folders, the first part of their paths, that are images, as `eqzoo predict` lists them. */
function listed(files) {
  const pathOf = (file) => file.path ?? file.webkitRelativePath;
  const visible = files.filter((file) => !pathOf(file).split("/").slice(1).some((name) => name.startsWith(".") || IGNORED.includes(name)));
  const found = visible.filter((file) => READABLE.test(pathOf(file)));
  leftOut += visible.length - found.length;
  const key = (file) => pathOf(file).replaceAll("/", "\0"); // folder by folder, as Python sorts paths
  return found.sort((a, b) => (key(a) < key(b) ? -1 : 1));
}

/** A name that no other image has, such as of a second pasted one. */
function unique(name) {
  let found = name;
  for (let i = 2; names.has(found); i++) found = `${name} (${i})`;
  names.add(found);
  return found;
}

/** Classifies files, or {name or path, blob} of other sources. */
function add(files) {
  for (const file of files) {
    const blob = file.blob ?? file;
    const item = { key: added++, name: unique(file.path || blob.webkitRelativePath || file.name || "pasted image"), blob, changed: true };
    item.row = makeRow(item);
    items.push(item);
    run({ key: item.key, blob, views: [[0, false]], thumbnail: true }).then(({ logits, signs, seen, error }) => {
      if (!items.includes(item)) return; // removed
      if (error) item.error = error;
      else {
        Object.assign(item, { signs, probabilities: logits.map(([values]) => softmax(values)) });
        item.row.querySelector("img").src = URL.createObjectURL(seen);
      }
      judge(item);
      const first = items.find((each) => !each.error);
      if (!current && first?.probabilities) inspect(first);
      updateLater();
    });
  }
  if (items.length || leftOut || trouble) updateLater();
}

/** Gives an image its class by each network, under the present thresholds. */
function judge(item) {
  item.labels = item.probabilities?.map(chosen);
  item.changed = true;
}

/** The class of an image, see `eqzoo predict --threshold`: one that reaches its threshold, else one that has none. */
function chosen(probabilities) {
  const limit = (i) => THRESHOLDS.get(CLASSES[i]);
  const reached = probabilities.map((p, i) => p >= (limit(i) ?? Infinity));
  const allowed = reached.includes(true) ? reached : probabilities.map((_, i) => limit(i) === undefined);
  return probabilities.reduce((best, p, i) => (allowed[i] && (best < 0 || p > probabilities[best]) ? i : best), -1);
}

const percent = (p) => `${(100 * p).toFixed(1)} %`;
const classOf = (item) => (item.error ? UNREADABLE : item.labels ? String(item.labels[0]) : null);
const surest = (item) => (item.labels ? item.probabilities[0][item.labels[0]] : -1);
const differs = (item) => Boolean(item.labels?.some((label) => label !== item.labels[0]));

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
  return make("tr", {}, make("td", {}, make("img", { alt: "", width: 48, height: 48, loading: "lazy" })), make("th", { scope: "row" }, button), ...cells);
}

function fillRow(item) {
  item.changed = false;
  const cells = [...item.row.querySelectorAll("td")].slice(1);
  item.row.classList.toggle("broken", Boolean(item.error));
  if (item.error) cells[0].textContent = `cannot be read: ${item.error}`;
  else if (!item.probabilities) cells[0].textContent = "waiting";
  else {
    item.probabilities.forEach((p, k) => {
      cells[2 * k].textContent = CLASSES[item.labels[k]];
      cells[2 * k + 1].textContent = percent(p[item.labels[k]]);
    });
  }
}

let planned = 0, pause = 200;
/** Fills the table soon; after the answer of a worker a few times a second, and seldom where that takes long. */
function update(delay = 0) {
  clearTimeout(planned);
  planned = setTimeout(() => {
    planned = 0;
    const start = performance.now();
    fillTable();
    tell();
    pause = Math.max(200, 5 * (performance.now() - start));
  }, delay);
}

/** Fills the table after a pause, also if others ask for it meanwhile. */
function updateLater() {
  if (!planned) update(pause);
}

function fillTable() {
  const focused = document.activeElement;
  for (const item of items) if (item.changed) { fillRow(item); item.row.remove(); } // so that the others stay where they are
  const filter = element("filter").value, most = Number(element("most").value || 100) / 100;
  const passes = (item) => !filter || (filter === DIFFERENT ? differs(item) : classOf(item) === filter);
  shown = items.filter((item) => passes(item) && surest(item) <= most);
  const values = {
    added: (item) => item.key, probability: surest, file: (item) => item.name,
    class: (item) => CLASSES[item.labels?.[0]] ?? "",
  };
  const value = values[order.key], sign = order.descending ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a - b);
  shown.sort((a, b) => sign * compare(value(a), value(b)) || a.key - b.key);
  placeRows();
  if (focused !== document.activeElement && element("rows").contains(focused)) focused.focus({ preventScroll: true });
  for (const heading of document.querySelectorAll("#table [data-sort]")) {
    const sorted = heading.dataset.sort === order.key;
    heading.setAttribute("aria-sort", sorted ? (order.descending ? "descending" : "ascending") : "none");
  }
  const counts = new Map([["", items.length], [DIFFERENT, items.filter(differs).length]]);
  for (const item of items) counts.set(classOf(item), (counts.get(classOf(item)) ?? 0) + 1);
  for (const option of element("filter").options) {
    const text = `${option.dataset.name} (${counts.get(option.value) ?? 0})`;
    if (option.textContent !== text) option.textContent = text;
  }
}

/** Reorders the rows; those in order stay in the document, so that a click or the focus on them is not lost. */
function placeRows() {
  const rows = element("rows");
  const wanted = new Set(shown.map((item) => item.row));
  for (const row of [...rows.children]) if (!wanted.has(row)) row.remove();
  let following = rows.firstElementChild;
  for (const { row } of shown) {
    if (row === following) following = following.nextElementSibling;
    else rows.insertBefore(row, following);
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
  for (const [id, step] of STEPS) element(id).setAttribute("aria-disabled", String(!neighbor(step)));
  const also = [broken && `${broken} cannot be read`, leftOut && `files of other formats left out: ${leftOut}`].filter(Boolean);
  const text = [items.length ? `${done} of ${items.length} images classified` : "Ready: drop, paste or choose images", ...also].join("; ");
  element("count").textContent = `${text}.`;
  const rest = started ? `${text}.` : "The network is starting …";
  const status = failure || (waiting ? "Images are being classified." : rest); // a screen reader is not told each step
  if (element("status").textContent !== status) element("status").textContent = status;
  const notes = Object.entries(BRIGHTNESS).map(([sign, note]) => {
    const found = items.filter((item) => item.signs?.includes(Number(sign)));
    return found.length && `${found.length} of ${items.length} images, such as ${found[0].name}: ${note}.`;
  });
  element("notes").replaceChildren(...[trouble, ...notes].filter(Boolean).map((note) => make("li", {}, note)));
}

/** Comma-separated values as `eqzoo predict --csv` writes them; files that cannot be read have empty values. */
function csv() {
  const several = NETWORKS.length > 1 || CLASSES.includes("file") || CLASSES.includes("prediction");
  const heading = NETWORKS.flatMap(({ name }) => (several ? [name, ...CLASSES.map((label) => `${name} ${label}`)] : ["prediction", ...CLASSES]));
  const lines = items.map((item) => [item.name, ...(item.labels ? item.probabilities.flatMap((p, k) => [CLASSES[item.labels[k]], ...p]) : heading.map(() => ""))]);
  const quoted = (value) => (/[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  return [["file", ...heading], ...lines].map((line) => line.map(quoted).join(",") + "\n").join("");
}

// --- One image ---

/** Shows an image and classifies it at all angles. */
function inspect(item, focus = false) {
  if (current) current.row?.removeAttribute("aria-current");
  if (current && current !== item) current.views = null; // large
  if (current?.row) clearDetail();
  current = item;
  item.row?.setAttribute("aria-current", "true");
  queue.splice(0, queue.length, ...queue.filter(({ job }) => job.thumbnail)); // views of another image
  item.unseen = item.error;
  item.views = VIEWS.map(() => null); // for each view {probabilities: of each network, seen}
  const views = item.views, original = element("original");
  URL.revokeObjectURL(original.src);
  original.hidden = !item.row;
  original.src = URL.createObjectURL(item.blob);
  original.alt = item.name;
  const batches = Array.from({ length: Math.ceil(VIEWS.length / BATCH) }, (_, i) => VIEWS.slice(BATCH * i, BATCH * (i + 1)));
  for (const [i, batch] of item.error ? [] : [...batches.entries()].reverse()) { // the first one is put in front last
    run({ key: item.key, blob: item.blob, views: batch }, true).then(({ logits, seen, error }) => {
      if (current !== item || item.views !== views) return;
      if (error) item.unseen = error; // such as of a file that is gone since it was classified
      else batch.forEach((_, j) => { views[BATCH * i + j] = { probabilities: logits.map((each) => softmax(each[j])), seen: seen[j] }; });
      showDetail();
    });
  }
  tell();
  showDetail();
  if (focus) { element("detail-title").focus(); element("detail").scrollIntoView({ block: "nearest" }); }
}

function showDetail() {
  if (!current) return;
  const now = Number(element("angle").value) / STEP, angle = ANGLES[now];
  element("detail-title").textContent = current.name;
  element("angle-text").textContent = `${angle}°`;
  element("angle").setAttribute("aria-valuetext", `${angle} degrees`);
  element("sentence").textContent = current.unseen ? `This image cannot be read: ${current.unseen.replace(/\.$/, "")}.` : "";
  const view = current.views[OF_ANGLE[now]];
  if (!view || !current.views[0]) {
    if (current.row || current.unseen) clearDetail(); // a drawing is answered at once
    return;
  }
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

function clearDetail() {
  for (const part of document.querySelectorAll("#answers p")) part.textContent = part.className === "class" ? "–" : "";
  for (const id of ["bars", "chart"]) element(id).replaceChildren();
  element("seen").width = element("seen").width; // empties it
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

/** The next image of the table that can be read, in a direction. */
function neighbor(step) {
  const place = shown.indexOf(current), side = step > 0 ? shown.slice(place + 1) : shown.slice(0, Math.max(place, 0)).reverse();
  return side.find((item) => !item.error);
}

/**
 * The files of what was dropped, those of a folder with their paths. It has to be called while the event is handled.
 * Chromium gives no files by the entry of a folder to a page from the disk, but by its handle, which others do not have.
 */
function dropped(item) {
  const entry = item.webkitGetAsEntry?.(), file = item.getAsFile();
  if (!entry?.isDirectory) return file ? [file] : [];
  const handle = item.getAsFileSystemHandle?.();
  return (handle ? handle.then((folder) => filesOfHandle(folder, folder.name)) : filesOfEntry(entry)).then(listed);
}

async function filesOfHandle(handle, path) {
  if (handle.kind === "file") return [{ blob: await handle.getFile(), path }];
  const found = [];
  for await (const inner of handle.values()) found.push(...await filesOfHandle(inner, `${path}/${inner.name}`));
  return found;
}

async function filesOfEntry(entry) {
  if (entry.isFile) return [{ blob: await new Promise((resolve, reject) => entry.file(resolve, reject)), path: entry.fullPath.slice(1) }];
  const reader = entry.createReader(), found = [];
  for (let part; (part = await new Promise((resolve, reject) => reader.readEntries(resolve, reject))).length;) found.push(...part); // 100 at a time
  return (await Promise.all(found.map(filesOfEntry))).flat();
}

function listen() {
  const change = (id, act) => element(id).addEventListener("change", act);
  change("files", ({ target }) => { add(target.files); target.value = ""; });
  change("folder", ({ target }) => { add(listed([...target.files])); target.value = ""; });
  for (const id of ["filter", "most"]) element(id).addEventListener("input", update);
  document.addEventListener("paste", ({ clipboardData }) => add(clipboardData.files));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    const answers = await Promise.allSettled([...event.dataTransfer.items].map(dropped));
    trouble = answers.map(({ reason }) => reason && `What was dropped cannot be read: ${reason.message.replace(/\.$/, "")}.`).find(Boolean) ?? "";
    add(answers.flatMap(({ value }) => value ?? []));
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
    for (const { row } of items) URL.revokeObjectURL(row.querySelector("img").src);
    queue.length = items.length = leftOut = 0;
    names.clear();
    trouble = "";
    current = null;
    update();
    element("files").focus(); // this button is hidden
  });
  element("angle").addEventListener("input", showDetail);
  for (const [id, step] of STEPS) element(id).addEventListener("click", () => { const other = neighbor(step); if (other) inspect(other); });
  element("thresholds").addEventListener("input", () => {
    THRESHOLDS.clear();
    for (const input of element("thresholds").querySelectorAll("input")) {
      const value = Number(input.value), all = input.value && THRESHOLDS.size === CLASSES.length - 1;
      const outside = input.value && !(value > 0 && value < 1);
      input.setCustomValidity(all ? "One class has to be without a threshold." : outside ? "A threshold is above 0 and below 1." : "");
      if (input.value && input.validity.valid) THRESHOLDS.set(input.name, value);
    }
    items.forEach(judge);
    update();
    if (current) showDetail();
  });
  change("thresholds", () => element("thresholds").querySelector("input:invalid")?.reportValidity());
  new ResizeObserver(() => { if (current) showDetail(); }).observe(element("chart"));
}

function build() {
  const option = (value, name) => { const made = make("option", { value }, name); made.dataset.name = name; return made; };
  element("filter").append(option("", "all images"), ...CLASSES.map((name, i) => option(i, name)), option(UNREADABLE, "cannot be read"));
  if (NETWORKS.length > 1) element("filter").append(option(DIFFERENT, "the networks differ"));
  for (const label of CLASSES) {
    const input = make("input", { type: "number", name: label, min: 0, max: 1, step: "any", value: THRESHOLDS.get(label) ?? "" });
    element("thresholds").append(make("label", {}, label, input));
  }
  NETWORKS.forEach(({ name }, k) => {
    const title = NETWORKS.length > 1 ? `${name}: ` : "";
    if (k) element("headings").append(make("th", { scope: "col" }, `${title}class`), make("th", { scope: "col", class: "number" }, "probability"));
    element("bar-headings").append(make("th", { scope: "col" }, name));
    element("answers").append(make("article", { id: `answer-${k}`, class: "answer", style: `color: ${COLORS[k]}` }, make("h3", {}, name), make("p", { class: "class" }, "–"), make("p", { class: "share" }), make("p", { class: "same" })));
  });
}

document.body.classList.toggle("two", NETWORKS.length > 1);
build();
listen();
load().catch((error) => fail(error.message));
