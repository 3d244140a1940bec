"use strict";
// The page: both networks classify the drawing at all angles as one batch; the slider only looks up the result.

const STEP = 10; // degrees between angles
const COUNT = 360 / STEP;
const NETWORKS = [
  { id: "p4", name: "p4_cnn", color: "var(--p4)", dash: "" },
  { id: "z2", name: "z2_cnn", color: "var(--z2)", dash: "7 4" },
];

const page = Object.fromEntries(["pad", "seen", "angle", "angle-text", "play", "status", "chart", "samples", "clear"].map((id) => [id, document.getElementById(id)]));
const pen = page.pad.getContext("2d", { willReadFrequently: true });
let images = null; // at every angle
let busy = false, stale = false;
let playing = null;

function bytes(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

/** Starts the runtime from what the page holds, so that it works without a server. */
async function load() {
  const unzipped = new Blob([bytes(EQZOO_WASM)]).stream().pipeThrough(new DecompressionStream("gzip"));
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = await new Response(unzipped).arrayBuffer();
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(new Blob([EQZOO_LOADER], { type: "text/javascript" })) };
  for (const network of NETWORKS) {
    const model = EQZOO_MODELS[network.name];
    document.querySelector(`[data-error="${network.name}"]`).textContent = model.error.toFixed(1);
    network.mean = JSON.parse(model.metadata.mean)[0];
    network.std = JSON.parse(model.metadata.std)[0];
    network.session = await ort.InferenceSession.create(bytes(model.onnx), { executionProviders: ["wasm"] });
  }
}

/** The probabilities of all digits at all angles. */
async function classify(network) {
  const input = new Float32Array(COUNT * SIDE * SIDE);
  images.forEach((image, i) => {
    for (let j = 0; j < image.length; j++) input[i * image.length + j] = (image[j] - network.mean) / network.std;
  });
  const { logits } = await network.session.run({ image: new ort.Tensor("float32", input, [COUNT, 1, SIDE, SIDE]) });
  return Array.from({ length: COUNT }, (_, i) => softmax(Array.from(logits.data.slice(10 * i, 10 * i + 10))));
}

function softmax(logits) {
  const most = Math.max(...logits);
  const powers = logits.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((value) => value / sum);
}

/** Classifies the drawing; if it changes meanwhile, classifies it again. */
async function read() {
  if (!NETWORKS.every((network) => network.session)) return;
  if (busy) { stale = true; return; }
  busy = true;
  do {
    stale = false;
    const ink = inkOf(page.pad), place = measure(ink);
    images = place && allAngles(ink, place, STEP);
    for (const network of NETWORKS) network.probabilities = place ? await classify(network) : null;
  } while (stale);
  busy = false;
  show();
}

/** The digit with the largest probability in the equivariant network, summed over all angles. */
function believed() {
  const sums = Array(10).fill(0);
  for (const p of NETWORKS[0].probabilities) p.forEach((value, digit) => { sums[digit] += value; });
  return sums.indexOf(Math.max(...sums));
}

function show() {
  const now = Number(page.angle.value) / STEP;
  page["angle-text"].textContent = `${now * STEP}°`;
  page.angle.setAttribute("aria-valuetext", `${now * STEP} degrees`);
  const view = page.seen.getContext("2d");
  const image = view.createImageData(SIDE, SIDE);
  for (let i = 0; i < SIDE * SIDE; i++) {
    const value = images ? 255 * images[now][i] : 0;
    image.data.set([value, value, value, 255], 4 * i);
  }
  view.putImageData(image, 0, 0);
  const done = NETWORKS.every((network) => network.probabilities);
  for (const network of NETWORKS) showCard(network, now, done);
  if (!done) {
    page.status.textContent = NETWORKS[0].session ? "Draw or choose a digit." : page.status.textContent;
    page.chart.replaceChildren();
    return;
  }
  const [exact, plain] = NETWORKS.map((network) => spread(network, now));
  page.status.textContent = `Under rotations of this image by 90° a probability changes by at most ${exact} in p4_cnn and ${plain} in z2_cnn.`;
  drawChart(page.chart, NETWORKS, believed(), now);
}

function showCard(network, now, done) {
  const card = document.getElementById(`card-${network.id}`);
  const write = (name, text) => { card.querySelector(`.${name}`).textContent = text; };
  if (!done) {
    for (const name of ["digit", "share", "same"]) write(name, name === "digit" ? "–" : "");
    return;
  }
  const best = network.probabilities.map((p) => p.indexOf(Math.max(...p)));
  write("digit", best[now]);
  write("share", `${(100 * network.probabilities[now][best[now]]).toFixed(1)} %`);
  write("same", `same prediction at ${best.filter((digit) => digit === best[now]).length} of ${COUNT} angles`);
}

/** The largest change of a probability over the 90° rotations of the image of the slider. */
function spread(network, now) {
  let most = 0;
  for (let digit = 0; digit < 10; digit++) {
    const values = [0, 1, 2, 3].map((k) => network.probabilities[(now + k * COUNT / 4) % COUNT][digit]);
    most = Math.max(most, Math.max(...values) - Math.min(...values));
  }
  return most < 1e-4 ? most.toExponential(0) : most.toFixed(most < 0.01 ? 4 : 2);
}

function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, INK, INK);
}

function line(from, to) {
  pen.strokeStyle = "#fff";
  pen.lineWidth = 20;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}

function take(digit) {
  clear();
  for (const stroke of STROKES[digit]) stroke.slice(1).forEach((point, i) => line(stroke[i], point));
  read();
}

function listen() {
  let last = null;
  const at = (event) => {
    const box = page.pad.getBoundingClientRect();
    return [(event.clientX - box.left) * INK / box.width, (event.clientY - box.top) * INK / box.height];
  };
  page.pad.addEventListener("pointerdown", (event) => {
    page.pad.setPointerCapture(event.pointerId);
    last = at(event);
    line(last, last);
    read();
  });
  page.pad.addEventListener("pointermove", (event) => {
    if (!last) return;
    // A fast pen reports several places in one event.
    for (const each of event.getCoalescedEvents?.() ?? [event]) { const next = at(each); line(last, next); last = next; }
    read();
  });
  for (const end of ["pointerup", "pointercancel"]) page.pad.addEventListener(end, () => { last = null; });
  page.samples.addEventListener("click", (event) => { if (event.target.dataset.digit) take(event.target.dataset.digit); });
  page.clear.addEventListener("click", () => { clear(); read(); });
  page.angle.addEventListener("input", show);
  page.play.addEventListener("click", play);
  new ResizeObserver(() => { if (NETWORKS[0].probabilities && !busy) show(); }).observe(page.chart);
}

function play() {
  if (playing) { clearInterval(playing); playing = null; }
  else playing = setInterval(() => { page.angle.value = (Number(page.angle.value) + STEP) % 360; show(); }, 150);
  page.play.textContent = playing ? "stop" : "play";
  page.play.setAttribute("aria-pressed", String(Boolean(playing)));
}

clear();
listen();
load().then(() => take(2)).catch((error) => {
  page.status.textContent = `The networks did not start: ${error.message}. A current browser with WebAssembly is needed.`;
});
