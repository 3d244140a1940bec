"use strict";
// Reads images and runs the networks, away from the page. It answers each job in the order in which they come.

let networks = [];
let recent = { key: null, values: new Map() };

/** Starts ONNX Runtime from bytes that the page holds, without any request. */
async function start({ wasm, loader, networks: given }) {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmBinary = wasm;
  ort.env.wasm.wasmPaths = { mjs: URL.createObjectURL(new Blob([loader], { type: "text/javascript" })) };
  for (const network of given) {
    const session = await ort.InferenceSession.create(network.onnx, { executionProviders: ["wasm"] });
    networks.push({ ...network, session });
  }
}

/**
 * The logits of every network for views [angle, reflected] of an image, the views as RGBA of the first network, and of
 * a thumbnail whether the image is dark or bright for the networks.
 */
async function classify({ key, blob, views, thumbnail }) {
  const logits = [], seen = [];
  const signs = new Set();
  if (recent.key !== key) recent = { key, values: new Map() };
  for (const { size, mean, std, session } of networks) {
    const [channels, height, width] = size, area = height * width;
    const read = () => remembered(`${channels}`, () => decode(blob, channels));
    if (thumbnail) signs.add(brightness(await read(), mean, std));
    const image = height === width ? await remembered(`${size}`, async () => preprocess(await read(), [height, width])) : await read();
    const input = new Float32Array(views.length * channels * area);
    views.forEach(([angle, reflected], i) => {
      const { planes } = view(image, size, angle, reflected);
      planes.forEach((plane, c) => {
        const start = (i * channels + c) * area;
        for (let k = 0; k < area; k++) input[start + k] = (plane[k] / 255 - mean[c % mean.length]) / std[c % std.length];
      });
      if (session === networks[0].session) seen.push(toRgba(planes, width, height));
    });
    const feeds = { [session.inputNames[0]]: new ort.Tensor("float32", input, [views.length, ...size]) };
    const output = (await session.run(feeds))[session.outputNames[0]];
    const count = output.data.length / views.length;
    logits.push(views.map((_, i) => Array.from(output.data.slice(i * count, (i + 1) * count))));
  }
  if (networks.every(({ size }) => size[1] === size[2])) networks.forEach(({ size }) => recent.values.delete(`${size[0]}`)); // large
  return { logits, signs: [...signs], seen: thumbnail ? await encoded(seen[0]) : seen };
}

/** A value of the current image, computed once. */
async function remembered(name, compute) {
  if (!recent.values.has(name)) recent.values.set(name, await compute());
  return recent.values.get(name);
}

function toRgba(planes, width, height) {
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = planes[planes.length === 1 ? 0 : c][i];
    image.data[4 * i + 3] = 255;
  }
  return image;
}

function encoded(image) {
  const canvas = new OffscreenCanvas(image.width, image.height);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas.convertToBlob();
}

let last = Promise.resolve();
onmessage = ({ data: job }) => {
  last = last.then(async () => {
    try {
      postMessage({ ...(job.networks ? await start(job) : await classify(job)) });
    } catch (error) {
      postMessage({ error: error.message || String(error) });
    }
  });
};
