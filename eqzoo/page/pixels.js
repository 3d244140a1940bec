"use strict";
// Image files as eqzoo.data.load_image reads them, preprocessed and rotated as eqzoo.data.preprocess and eqzoo.rotate do.
// An image is {width, height, planes}: for each channel an array of values in 0 to 255, row by row.

const TIFF_COMPRESSIONS = [1, 5, 8, 32773, 32946]; // none, LZW, Deflate, PackBits, Deflate

/** Rounds to the nearest integer, halves to the even one, as Python's round. */
function roundEven(value) {
  const nearest = Math.round(value);
  return Math.abs(value % 1) === 0.5 && nearest % 2 ? nearest - 1 : nearest;
}

/** The image of a file, with 1 (gray), 3 (RGB) or 4 (RGB and opacity) channels. */
async function decode(blob, channels) {
  const magic = new Uint8Array(await blob.slice(0, 4).arrayBuffer());
  if (["73,73,42,0", "77,77,0,42"].includes(magic.join())) return decodeTiff(await blob.arrayBuffer(), channels);
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const { width, height } = bitmap;
  if (channels === 4) return fromRgba(straight(bitmap), width, height, channels);
  // A canvas without opacity is black, so that transparent pixels are composited onto black.
  const canvas = new OffscreenCanvas(width, height).getContext("2d", { alpha: false, willReadFrequently: true });
  canvas.drawImage(bitmap, 0, 0);
  return fromRgba(canvas.getImageData(0, 0, width, height).data, width, height, channels);
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
  const pages = UTIF.decode(buffer).filter((page) => page.t256);
  const [page] = pages, tag = (number, otherwise) => (page[`t${number}`] ?? [otherwise])[0];
  const bits = tag(258, 1), samples = tag(277, 1), meaning = tag(262, 1);
  const area = (each) => each.t256[0] * each.t257[0];
  if (pages.some((each, i) => i && area(each) >= area(page))) throw Error(`it is a stack of ${pages.length} images`);
  const known = [8, 16].includes(bits) && TIFF_COMPRESSIONS.includes(tag(259, 1)) && tag(284, 1) === 1 && tag(339, 1) === 1;
  if (!known || meaning > 3 || samples !== (meaning === 2 ? Math.max(3, Math.min(samples, 4)) : 1)) {
    throw Error("this kind of TIFF is not supported: save it as gray or RGB of 8 or 16 bits, uncompressed, LZW or Deflate");
  }
  UTIF.decodeImage(buffer, page);
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
function symmetric({ width, height, planes }, quarters, reflected) {
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

/** Resizes an image and crops its center to [height, width], as eqzoo.data.preprocess. */
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
        result[y * size[1] + x] = Math.min(Math.max(sum, 0), 255);
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
 * A view of an image in the size that a network takes: the image is reflected, if asked for, then rotated. Square images
 * may be preprocessed before, since that commutes with the symmetries of the grid.
 */
function view(image, [, height, width], angle, reflected) {
  const quarters = roundEven(angle / 90);
  const moved = symmetric(image, ((quarters % 4) + 4) % 4, reflected);
  return rotate(preprocess(moved, [height, width]), angle - 90 * quarters);
}
