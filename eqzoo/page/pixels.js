"use strict";
// Image files as eqzoo.data.load_image reads them, preprocessed and rotated as eqzoo.data.preprocess and eqzoo.rotate do.
// An image is {width, height, planes}: for each channel an array of values in 0 to 255, row by row.

const TIFF_COMPRESSIONS = [1, 5, 8, 32773, 32946]; // none, LZW, Deflate, PackBits, Deflate

/** Rounds to the nearest integer, halves to the even one, as Python's round. */
function roundEven(value) {
  const nearest = Math.round(value);
  return Math.abs(value % 1) === 0.5 && nearest % 2 ? nearest - 1 : nearest;
}

// Rotation and reflection of an image for each orientation of EXIF, 1 to 8: as the arguments of `symmetric`.
const ORIENTATIONS = [[0, false], [0, true], [2, false], [2, true], [1, true], [3, false], [3, true], [1, false]];

const latin = (bytes, first, count) => String.fromCharCode(...bytes.subarray(first, first + count));

/** The image of a file, with 1 (gray), 3 (RGB) or 4 (RGB and opacity) channels. */
async function decode(blob, channels) {
  const bytes = new Uint8Array(await blob.arrayBuffer()), kind = latin(bytes, 0, 4);
  if (kind === "II*\0" || kind === "MM\0*") return decodeTiff(bytes.buffer, channels);
  if (kind === "II+\0" || kind === "MM\0+") throw Error("it is a BigTIFF: save it as a TIFF of less than 4 GB");
  const { frames, orientation, deep } = described(bytes, kind);
  if (!frames) throw Error("the file is cut off");
  if (frames !== 1) throw Error(`it is an animation of ${frames} images`);
  const image = deep ? decodeDeepPng(bytes, channels) : await decodeInBrowser(new Blob([bytes], { type: blob.type }), channels);
  return symmetric(image, ...(ORIENTATIONS[orientation - 1] ?? ORIENTATIONS[0]));
}

async function decodeInBrowser(blob, channels) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const { width, height } = bitmap;
  if (channels === 4) return fromRgba(straight(bitmap), width, height, channels);
  // A canvas without opacity is black, so that transparent pixels are composited onto black.
  const canvas = new OffscreenCanvas(width, height).getContext("2d", { alpha: false, willReadFrequently: true });
  canvas.drawImage(bitmap, 0, 0);
  const { data } = canvas.getImageData(0, 0, width, height);
  if (data[3] !== 255) throw Error("it has more pixels than this browser reads"); // nothing was drawn
  return fromRgba(data, width, height, channels);
}

/** The chunks [type, first byte, end] of a PNG or a WebP. */
function* chunks(bytes, png) {
  const data = new DataView(bytes.buffer);
  for (let at = png ? 8 : 12; at + 8 <= bytes.length;) {
    const length = data.getUint32(png ? at : at + 4, !png), first = at + 8;
    yield [latin(bytes, png ? at + 4 : at, 4), first, first + length];
    at = first + length + (png ? 4 : length % 2);
  }
}

/**
 * How many images a file holds, its orientation by EXIF data that browsers may or may not follow, and whether it is a
 * gray PNG of 16 bits, of which browsers keep 8.
 */
function described(bytes, kind) {
  const png = kind === "\x89PNG", data = new DataView(bytes.buffer);
  const found = { frames: 1, orientation: 1, deep: png && bytes.length > 26 && bytes[24] === 16 && bytes[25] === 0 };
  if (kind === "GIF8") found.frames = gifFrames(bytes);
  if (latin(bytes, 4, 8) === "ftypavis") found.frames = "several"; // AVIF
  if (!png && !(kind === "RIFF" && latin(bytes, 8, 4) === "WEBP")) return found;
  let images = 0, apart = false; // whether the image of an animated PNG is none of its frames
  for (const [type, first, end] of chunks(bytes, png)) {
    if (type === "acTL") [found.frames, apart] = [data.getUint32(first), true];
    if (type === "fcTL") apart = false;
    if (type === "IDAT" && apart) [found.frames, apart] = [found.frames + 1, false];
    if (type === "ANMF") found.frames = ++images;
    if (type === "eXIf" || type === "EXIF") {
      try { found.orientation = takeOrientation(bytes.subarray(first, end)); } catch { /* damaged, it says nothing */ }
    }
  }
  return found;
}

/** The number of images in a GIF, of whose blocks those of images begin with a comma and extensions with an exclamation mark. */
function gifFrames(bytes) {
  const colors = (flags) => (flags & 0x80 ? 3 << ((flags & 7) + 1) : 0); // bytes of a table of colors
  let frames = 0, at = 13 + colors(bytes[10]);
  for (; [0, 0x21, 0x2c].includes(bytes[at]); at++) { // behind the last part of each block stands a 0
    if (bytes[at] === 0) continue;
    if (bytes[at] === 0x2c) frames += 1;
    at += bytes[at] === 0x2c ? 11 + colors(bytes[at + 9]) : 2;
    while (bytes[at]) at += 1 + bytes[at];
  }
  return frames;
}

/** The orientation in EXIF data, 1 to 8; it becomes 1 there, so that no browser turns the image as well. */
function takeOrientation(exif) {
  const start = latin(exif, 0, 4) === "Exif" ? 6 : 0, data = new DataView(exif.buffer, exif.byteOffset + start, exif.length - start);
  const little = data.getUint8(0) === 73, first = data.getUint32(4, little);
  for (let i = 0; i < data.getUint16(first, little); i++) {
    const entry = first + 2 + 12 * i, orientation = data.getUint16(entry + 8, little);
    if (data.getUint16(entry, little) !== 274) continue;
    data.setUint16(entry + 8, 1, little);
    return orientation;
  }
  return 1;
}

/** A gray PNG of 16 bits. */
function decodeDeepPng(bytes, channels) {
  const data = new DataView(bytes.buffer), width = data.getUint32(16), height = data.getUint32(20), stride = 2 * width;
  if (bytes[28]) throw Error("it is an interlaced PNG of 16 bits: save it without interlace");
  const inflated = new pako.Inflate();
  let clear = -1; // the transparent value
  for (const [type, first, end] of chunks(bytes, true)) {
    if (type === "IDAT") inflated.push(bytes.subarray(first, end), 0);
    if (type === "tRNS") clear = data.getUint16(first);
  }
  const raw = inflated.result ?? [];
  if (inflated.err || raw.length < height * (stride + 1)) throw Error("the file is cut off or damaged");
  const lines = new Uint8Array(stride * height);
  for (let y = 0, from = 0, to = 0; y < height; y++) {
    const filter = raw[from++];
    for (let x = 0; x < stride; x++, to++) {
      const left = x > 1 ? lines[to - 2] : 0, up = y ? lines[to - stride] : 0, corner = x > 1 && y ? lines[to - stride - 2] : 0;
      lines[to] = raw[from++] + filtered(filter, left, up, corner); // modulo 256
    }
  }
  const gray = new Float32Array(width * height), opacity = new Float32Array(width * height).fill(255);
  for (let i = 0; i < gray.length; i++) {
    const value = 256 * lines[2 * i] + lines[2 * i + 1];
    if (value === clear) opacity[i] = 0;
    gray[i] = value === clear && channels < 4 ? 0 : value * (255 / 65535);
  }
  return { width, height, planes: Array.from({ length: channels }, (_, c) => (c === 3 ? opacity : gray)) };
}

/** What the filters of a PNG, 0 to 4, predict of a byte: nothing, one of its neighbors, their mean, or Paeth's choice. */
function filtered(filter, left, up, corner) {
  if (filter < 4) return filter === 0 ? 0 : filter === 1 ? left : filter === 2 ? up : (left + up) >> 1;
  const [toLeft, toUp, toCorner] = [Math.abs(up - corner), Math.abs(left - corner), Math.abs(left + up - 2 * corner)];
  return toLeft <= toUp && toLeft <= toCorner ? left : toUp <= toCorner ? up : corner;
}

/** RGBA whose colors are not multiplied by the opacity: a 2-D canvas would lose those of transparent pixels. */
function straight(bitmap) {
  const gl = new OffscreenCanvas(1, 1).getContext("webgl2"), texture = gl.createTexture();
  gl.bindTexture(gl.TEXTURE_2D, texture);
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, gl.RGBA, gl.UNSIGNED_BYTE, bitmap);
  gl.bindFramebuffer(gl.FRAMEBUFFER, gl.createFramebuffer());
  gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, texture, 0);
  const rgba = new Uint8Array(4 * bitmap.width * bitmap.height);
  gl.readPixels(0, 0, bitmap.width, bitmap.height, gl.RGBA, gl.UNSIGNED_BYTE, rgba);
  if (gl.getError()) throw Error("it has more pixels than the browser reads with opacity");
  gl.getExtension("WEBGL_lose_context")?.loseContext(); // browsers keep about 16 of them
  return rgba;
}

/** Separates interleaved RGBA; gray is Pillow's luma of ITU-R 601-2. */
function fromRgba(rgba, width, height, channels) {
  const planes = Array.from({ length: channels }, () => new Uint8Array(width * height));
  for (let i = 0, j = 0; i < width * height; i++, j += 4) {
    if (channels === 1) planes[0][i] = (19595 * rgba[j] + 38470 * rgba[j + 1] + 7471 * rgba[j + 2] + 0x8000) >> 16;
    else for (let c = 0; c < channels; c++) planes[c][i] = rgba[j + c];
  }
  return { width, height, planes };
}

/** The first page of a TIFF of 8 or 16 bits; the library would read others as black, so they are errors. */
function decodeTiff(buffer, channels) {
  const unsupported = () => Error("this kind of TIFF is not supported: save it as gray or RGB of 8 or 16 bits, uncompressed, LZW or Deflate");
  checkDirectories(new DataView(buffer));
  const pages = UTIF.decode(buffer).filter((page) => page.t256);
  const [page] = pages, tagOf = (each, number, otherwise) => (each[`t${number}`] ?? [otherwise])[0];
  if (!page) throw Error("the file is cut off");
  const tag = (number, otherwise) => tagOf(page, number, otherwise), area = (each) => each.t256[0] * each.t257[0];
  const copyOrMask = (each) => tagOf(each, 254, 0) & 5 || area(each) < area(page);
  if (pages.some((each, i) => i && !copyOrMask(each))) throw Error(`it is a stack of ${pages.length} images`);
  const thumbnail = tag(254, 0) & 1 && page.t330; // a thumbnail before the image of a camera
  if (tag(32997, 1) > 1 || thumbnail || /^ImageJ=[^]*^images=([2-9]|\d\d)|"truncated": true/m.test(tag(270, ""))) throw Error("it is a stack, or a thumbnail before an image");
  const bits = tag(258, 1), samples = tag(277, 1), meaning = tag(262, 1), compression = tag(259, 1);
  const known = [8, 16].includes(bits) && TIFF_COMPRESSIONS.includes(compression);
  const plain = tag(284, 1) === 1 && tag(339, 1) === 1 && tag(266, 1) === 1; // bands side by side, no sign, first bit first
  const apart = samples < 4 || tag(338, 2) === 2; // else colors times opacity, or a band of another meaning
  const colors = meaning !== 3 || Math.max(...page.t320 ?? [0]) > 255; // of a palette, with 16 bits
  if (!known || !plain || !apart || !colors || meaning > 3 || samples !== (meaning === 2 ? Math.max(3, Math.min(samples, 4)) : 1)) throw unsupported();
  const [width, height] = [tag(256), tag(257)], tiled = Boolean(page.t324), rows = tiled ? tag(323) : Math.min(tag(278, height), height);
  const offsets = page.t324 ?? page.t273 ?? [], counts = tiled ? "t325" : "t279";
  const needed = offsets.map((_, i) => (tiled ? tag(322) * rows : width * Math.min(rows, height - i * rows)) * samples * bits / 8);
  const sizes = compression === 1 ? needed : page[counts] ?? [buffer.byteLength - offsets[0]];
  page[counts] = sizes;
  offsets.forEach((offset, i) => { // what is missing would be black
    if (!(offset + sizes[i] <= buffer.byteLength)) throw Error("the file is cut off");
    if (![8, 32946].includes(compression)) return;
    const inflated = new pako.Inflate();
    inflated.push(new Uint8Array(buffer, offset, sizes[i]), true);
    if (inflated.err || inflated.result?.length !== needed[i]) throw Error("the file is damaged");
  });
  let image;
  try {
    UTIF.decodeImage(buffer, page);
    image = pixelsOf(page, bits, meaning, channels);
  } catch {
    throw unsupported();
  }
  return symmetric(image, ...(ORIENTATIONS[tag(274, 1) - 1] ?? ORIENTATIONS[0]));
}

/** An error if the directories of a TIFF refer to one another in a circle, which the library would follow forever. */
function checkDirectories(data) {
  if (data.byteLength < 8) throw Error("the file is cut off");
  const little = data.getUint8(0) === 73, seen = new Set();
  for (let at = data.getUint32(4, little); at && at + 2 <= data.byteLength;) {
    if (seen.has(at)) throw Error("the file is damaged: its pages refer to one another in a circle");
    seen.add(at);
    const next = at + 2 + 12 * data.getUint16(at, little);
    at = next + 4 <= data.byteLength ? data.getUint32(next, little) : 0;
  }
}

function pixelsOf(page, bits, meaning, channels) {
  const { width, height, data } = page;
  if (bits === 8 || meaning > 1) {
    const rgba = UTIF.toRGBA8(page);
    for (let i = 0; channels < 4 && i < rgba.length; i += 4) {
      for (let c = 0; c < 3; c++) rgba[i + c] = Math.round(rgba[i + c] * rgba[i + 3] / 255); // onto black
    }
    return fromRgba(rgba, width, height, channels);
  }
  const gray = new Float32Array(width * height);
  for (let i = 0; i < gray.length; i++) {
    const value = (data[2 * i] + 256 * data[2 * i + 1]) * (255 / 65535);
    gray[i] = meaning === 0 ? 255 - value : value;
  }
  const planes = Array.from({ length: channels }, (_, c) => (c === 3 ? new Float32Array(gray.length).fill(255) : gray));
  return { width, height, planes };
}

/** A symmetry of the pixel grid: the image is reflected, if asked for, then rotated counter-clockwise by 90° times quarters. */
function symmetric(image, quarters, reflected) {
  if (!quarters && !reflected) return image;
  const { width, height, planes } = image;
  const odd = quarters % 2, [w, h] = odd ? [height, width] : [width, height];
  const source = [
    (x, y) => [x, y], (x, y) => [width - 1 - y, x], (x, y) => [width - 1 - x, height - 1 - y], (x, y) => [y, height - 1 - x],
  ][quarters];
  const moved = planes.map((plane) => {
    const result = new plane.constructor(w * h);
    for (let y = 0; y < h; y++) {
      for (let x = 0; x < w; x++) {
        const [column, row] = source(x, y);
        result[y * w + x] = plane[row * width + (reflected ? width - 1 - column : column)];
      }
    }
    return result;
  });
  return { width: w, height: h, planes: moved };
}

/** Weights of bicubic interpolation (a = -0.5) from size to target pixels, wider where it shrinks: [first, weights] each. */
function antialiased(size, target) {
  const scale = size / target, wide = Math.max(scale, 1), support = 2 * wide;
  const cubic = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0);
  return Array.from({ length: target }, (_, i) => {
    const center = scale * (i + 0.5), first = Math.max(Math.trunc(center - support + 0.5), 0);
    const count = Math.min(Math.trunc(center + support + 0.5), size) - first;
    const weights = Array.from({ length: count }, (_, j) => cubic(Math.abs((j + first - center + 0.5) / wide)));
    const sum = weights.reduce((a, b) => a + b);
    return [first, weights.map((weight) => weight / sum)];
  });
}

/** Resizes an image and crops its center to [height, width], rounded, as eqzoo.data.images.preprocess_uint8. */
function preprocess({ width, height, planes }, size) {
  const factor = Math.max(size[0] / height, size[1] / width);
  const [tall, wide] = [height, width].map((side, i) => size[i] + 2 * roundEven((side * factor - size[i]) / 2));
  const top = (tall - size[0]) / 2, left = (wide - size[1]) / 2;
  const same = tall === height && wide === width;
  const one = (side) => Array.from({ length: side }, (_, i) => [i, [1]]);
  const rows = (same ? one(tall) : antialiased(height, tall)).slice(top, top + size[0]);
  const columns = (same ? one(wide) : antialiased(width, wide)).slice(left, left + size[1]);
  const resized = planes.map((plane) => {
    const narrow = new Float64Array(height * size[1]), result = new Float32Array(size[0] * size[1]);
    for (let y = 0; y < height; y++) {
      columns.forEach(([first, weights], x) => {
        let sum = 0;
        for (let j = 0; j < weights.length; j++) sum += weights[j] * plane[y * width + first + j];
        narrow[y * size[1] + x] = sum;
      });
    }
    rows.forEach(([first, weights], y) => {
      for (let x = 0; x < size[1]; x++) {
        let sum = 0;
        for (let j = 0; j < weights.length; j++) sum += weights[j] * narrow[(first + j) * size[1] + x];
        result[y * size[1] + x] = roundEven(Math.min(Math.max(sum, 0), 255));
      }
    });
    return result;
  });
  return { width: size[1], height: size[0], planes: resized };
}

/** Rotates an image counter-clockwise by at most 45°, bicubic (a = -0.75), reflected at its border, as eqzoo.rotate. */
function rotate(image, degrees) {
  if (!degrees) return image;
  const { width, height, planes } = image, cos = Math.cos(degrees * Math.PI / 180), sin = Math.sin(degrees * Math.PI / 180);
  const cubic = (x) => (x < 1 ? (1.25 * x - 2.25) * x * x + 1 : ((-0.75 * x + 3.75) * x - 6) * x + 3);
  const mirrored = (i, n) => { const k = ((i % (2 * n)) + 2 * n) % (2 * n); return k < n ? k : 2 * n - 1 - k; };
  const results = planes.map((plane) => new Float32Array(plane.length));
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const right = x + 0.5 - width / 2, down = y + 0.5 - height / 2;
      const column = cos * right - sin * down + width / 2 - 0.5, row = sin * right + cos * down + height / 2 - 0.5;
      const x0 = Math.floor(column), y0 = Math.floor(row);
      for (let j = -1; j < 3; j++) {
        for (let i = -1; i < 3; i++) {
          const weight = cubic(Math.abs(row - y0 - j)) * cubic(Math.abs(column - x0 - i));
          const place = mirrored(y0 + j, height) * width + mirrored(x0 + i, width);
          planes.forEach((plane, c) => { results[c][y * width + x] += weight * plane[place]; });
        }
      }
    }
  }
  return { width, height, planes: results };
}

/**
 * Whether an image is much darker (-1) or brighter (1) than those that a network was trained on, or neither (0), as
 * eqzoo predict says it: of 12 bits in a file of 16, for example.
 */
function brightness({ planes }, mean, std) {
  const DARK = 32, colors = planes.slice(0, 3), count = colors[0].length;
  const of = colors.map((plane, c) => {
    const center = 255 * mean[c % mean.length], deviation = 255 * std[c % std.length];
    let dark = 0, bright = 0, largest = 0;
    for (const value of plane) {
      if (value < DARK) dark += 1;
      if (value > center + 3 * deviation) bright += 1;
      if (value > largest) largest = value;
    }
    return { dark, bright, largest, center, limit: Math.min(center + deviation, DARK) };
  });
  if (of.every(({ bright }) => 2 * bright > count)) return 1; // the median
  if (of.every(({ largest }) => largest === 0)) return 0;
  const dark = Math.max(...of.map(({ center }) => center)) >= 2 * DARK
    ? of.reduce((sum, each) => sum + each.dark, 0) >= 0.999 * count * of.length
    : of.every(({ largest, limit }) => largest < limit);
  return dark ? -1 : 0;
}

/**
 * A view of an image in the size that a network takes: the image is reflected, if asked for, then rotated. Square images
 * may be preprocessed before, since that commutes with the symmetries of the grid.
 */
function view(image, [, height, width], angle, reflected) {
  const quarters = roundEven(angle / 90);
  const moved = symmetric(image, ((quarters % 4) + 4) % 4, reflected);
  return rotate(preprocess(moved, [height, width]), angle - 90 * quarters);
}
